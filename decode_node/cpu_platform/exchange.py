"""Owns the MoE exchange between ranks: its contract, and the version over torch.distributed (gloo)."""

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Exchange(Protocol):
    """Moves rows between the ranks of one group. Every rank calls the same operations in the same order.

    `sizes[r]` is the number of rows of rank r, the same list on every rank; sizes may differ and may be 0.
    """

    def all_gatherv(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Gather all tensors, each [sizes[rank], ...], in one exchange; returns each as [sum(sizes), ...]."""
        ...

    def reduce_scatterv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum [sum(sizes), ...] over ranks and return this rank's [sizes[rank], ...]."""
        ...


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row (index of the first dimension)."""
    elements: int = tensor.shape[1:].numel()
    return elements * int(tensor.element_size())


def sum_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in rank order; of more than two half-precision parts in float32, so that it rounds once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float() if parts[0].dtype.itemsize < 4 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class GlooExchange:
    """One collective for each exchange, over a torch.distributed group on CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def all_gatherv(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Each rank's rows of all tensors lie one after the other in a buffer padded to the largest rank."""
        widths = [row_bytes(tensor) for tensor in tensors]
        stride = max(sizes) * sum(widths)
        packed = torch.empty(stride, dtype=torch.uint8)
        offset = 0
        for tensor in tensors:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            packed[offset : offset + flat.numel()] = flat
            offset += flat.numel()
        gathered = torch.empty(self._world_size * stride, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, packed, group=self._group)
        return self._unpack(gathered.view(self._world_size, stride), tensors, widths, sizes)

    def _unpack(
        self,
        gathered: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        widths: Sequence[int],
        sizes: Sequence[int],
    ) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        for index, (tensor, width) in enumerate(zip(tensors, widths, strict=True)):
            before = sum(widths[:index])
            parts = [
                gathered[rank, size * before : size * (before + width)] for rank, size in enumerate(sizes)
            ]
            flat = torch.cat(parts).view(tensor.dtype)
            outputs.append(flat.view(sum(sizes), *tensor.shape[1:]))
        return outputs

    def reduce_scatterv(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Each rank sends every other only the rows that are the other's, and adds what it gets."""
        rows = tensor.contiguous().view(sum(sizes), -1).view(torch.uint8)
        mine = sizes[self._rank]
        received = torch.empty(mine * self._world_size, rows.shape[1], dtype=torch.uint8)
        dist.all_to_all_single(received, rows, [mine] * self._world_size, list(sizes), group=self._group)
        parts = received.view(tensor.dtype).view(self._world_size, mine, *tensor.shape[1:])
        return sum_parts(parts.unbind(0))


def shared_core_count(group: dist.ProcessGroup) -> int:
    """Number of distinct cores that the ranks of the group may use together (all on one host)."""
    allowed: list[set[int]] = [set() for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(allowed, os.sched_getaffinity(0), group=group)
    return len(set().union(*allowed))
