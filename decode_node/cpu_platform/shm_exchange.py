"""Owns the MoE exchange over shared memory, for ranks on one host; large steps go over gloo."""

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist

from decode_node.cpu_platform.exchange import GlooExchange, row_bytes, sum_parts
from decode_node.cpu_platform.shm_segment import PeerWatch, Segment, wait_for

# Engine processes show only loggers under "vllm" (vllm/logger.py).
logger = logging.getLogger(f"vllm.{__name__}")

# Holds a decode step of thousands of rows of a small model or of 128 rows of 8192 float32; the time of a step
# that does not fit is its compute.
BUFFER_BYTES = 4 << 20
# Longer than any compilation inside a step; a peer that dies is noticed within a second.
TIMEOUT_S = 300.0


class SharedMemoryExchange:
    """Copies rows straight between tensors and the ranks' segments, one wait for each peer and exchange."""

    def __init__(
        self, rank: int, segments: list[Segment], watch: PeerWatch, gloo: GlooExchange, buffer_bytes: int
    ) -> None:
        self._rank = rank
        self._segments = segments
        self._watch = watch
        self._gloo = gloo
        self._buffer_bytes = buffer_bytes
        self._operation = 0

    @classmethod
    def open(
        cls, group: dist.ProcessGroup, gloo: GlooExchange, buffer_bytes: int = BUFFER_BYTES
    ) -> Self | None:
        """Set up over the group, a collective: all ranks get an exchange, or all get None and use gloo."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        own: Segment | None = None
        try:
            own = Segment.create(buffer_bytes)
        except OSError as error:
            logger.warning("No shared memory for the MoE exchange: %s", error)
        offers: list[tuple[str, int] | None] = [None] * world_size
        dist.all_gather_object(offers, (own.path, os.getpid()) if own else None, group=group)
        mapped: tuple[list[Segment], PeerWatch] | None = None
        if own is not None and all(offers):
            mapped = cls._map_peers(rank, own, [offer for offer in offers if offer], buffer_bytes)
        ready: list[bool] = [False] * world_size
        dist.all_gather_object(ready, mapped is not None, group=group)
        if own is not None:
            own.unlink()
        if mapped is None or not all(ready):
            return None
        segments, watch = mapped
        return cls(rank, segments, watch, gloo, buffer_bytes)

    @staticmethod
    def _map_peers(
        rank: int, own: Segment, offers: Sequence[tuple[str, int]], buffer_bytes: int
    ) -> tuple[list[Segment], PeerWatch] | None:
        try:
            segments = [
                own if peer == rank else Segment(path, buffer_bytes, create=False)
                for peer, (path, _) in enumerate(offers)
            ]
            watch = PeerWatch({peer: pid for peer, (_, pid) in enumerate(offers) if peer != rank})
        except OSError as error:
            logger.warning("A peer's shared memory or process cannot be reached: %s", error)
            return None
        return segments, watch

    def all_gatherv(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        widths = [row_bytes(tensor) for tensor in tensors]
        # The same numbers on every rank, so all take the same way.
        if max(sizes) * sum(widths) > self._buffer_bytes:
            return self._gloo.all_gatherv(tensors, sizes)
        operation = self._next_operation()
        own = self._segments[self._rank]
        sources = [tensor.contiguous() for tensor in tensors]
        address = own.buffer(operation)
        for source in sources:
            ctypes.memmove(address, source.data_ptr(), source.nbytes)
            address += source.nbytes
        own.publish(operation)
        outputs = [source.new_empty((sum(sizes), *source.shape[1:])) for source in sources]
        first_row = 0
        for rank, size in enumerate(sizes):
            self._wait(rank, operation)
            address = self._segments[rank].buffer(operation)
            for output, width in zip(outputs, widths, strict=True):
                ctypes.memmove(output.data_ptr() + first_row * width, address, size * width)
                address += size * width
            first_row += size
        return outputs

    def reduce_scatterv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        width = row_bytes(tensor)
        if sum(sizes) * width > self._buffer_bytes:
            return self._gloo.reduce_scatterv(tensor, sizes)
        operation = self._next_operation()
        own = self._segments[self._rank]
        source = tensor.contiguous()
        ctypes.memmove(own.buffer(operation), source.data_ptr(), source.nbytes)
        own.publish(operation)
        first_row, mine = sum(sizes[: self._rank]), sizes[self._rank]
        parts = []
        for rank, segment in enumerate(self._segments):
            self._wait(rank, operation)
            part = source.new_empty((mine, *source.shape[1:]))
            ctypes.memmove(part.data_ptr(), segment.buffer(operation) + first_row * width, part.nbytes)
            parts.append(part)
        return sum_parts(parts)

    def _next_operation(self) -> int:
        self._operation += 1
        return self._operation

    def _wait(self, rank: int, operation: int) -> None:
        if rank != self._rank:
            wait_for(self._segments[rank], operation, rank, self._watch, TIMEOUT_S)
