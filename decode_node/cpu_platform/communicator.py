"""Owns the CPU communicator of a rank: vLLM's, with the MoE exchange that vLLM's lacks."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import in_the_same_node_as

from decode_node.cpu_platform.exchange import Exchange, GlooExchange, shared_core_count
from decode_node.cpu_platform.shm_exchange import SharedMemoryExchange

# Engine processes show only loggers under "vllm" (vllm/logger.py).
logger = logging.getLogger(f"vllm.{__name__}")

# The groups that MoE layers meet in (all2all.py, `AgRsAll2AllManager._get_comm_group`).
MOE_GROUPS = ("dp", "ep", "pcp")


class LockstepCpuCommunicator(CpuCommunicator):
    """vLLM's CPU communicator plus `all_gatherv` and `reduce_scatterv`, which MoE with DP > 1 needs."""

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=use_all2all)
        self.moe_exchange: Exchange | None = None
        if self.world_size > 1 and unique_name.split(":")[0] in MOE_GROUPS:
            self.moe_exchange = self._open_exchange()

    def _open_exchange(self) -> Exchange:
        """Shared memory when all ranks are on this host with a core for each, else gloo. A collective."""
        gloo = GlooExchange(self.cpu_group)
        exchange: Exchange | None = None
        if not all(in_the_same_node_as(self.cpu_group, source_rank=0)):
            why = "ranks on several hosts"
        # Ranks that take turns on a core would each spin away the other's turn.
        elif shared_core_count(self.cpu_group) < self.world_size:
            why = "fewer cores than ranks"
        else:
            why = "shared memory refused by a rank"
            exchange = SharedMemoryExchange.open(self.cpu_group, gloo)
        way = "shared memory" if exchange else f"gloo ({why})"
        logger.info("MoE exchange of group %s, %d ranks: %s.", self.unique_name, self.world_size, way)
        return exchange or gloo

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather [sizes[rank], ...] of every rank to [sum(sizes), ...]; a list travels in one exchange.

        Raises:
            ValueError: `dim` is not 0.
        """
        tensors = input_ if isinstance(input_, list) else [input_]
        self._check_dim(dim)
        if self.world_size == 1:
            return input_
        gathered = self._exchange().all_gatherv(tensors, self._sizes(sizes, tensors[0].shape[0]))
        return gathered if isinstance(input_, list) else gathered[0]

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum [sum(sizes), ...] over ranks; returns this rank's [sizes[rank], ...].

        Raises:
            ValueError: `dim` is not 0.
        """
        self._check_dim(dim)
        if self.world_size == 1:
            return input_
        equal = input_.shape[0] // self.world_size
        return self._exchange().reduce_scatterv(input_, self._sizes(sizes, equal))

    def _exchange(self) -> Exchange:
        if self.moe_exchange is None:
            self.moe_exchange = self._open_exchange()
        return self.moe_exchange

    def _sizes(self, sizes: Sequence[int] | None, equal: int) -> Sequence[int]:
        return sizes if sizes is not None else [equal] * self.world_size

    @staticmethod
    def _check_dim(dim: int) -> None:
        if dim != 0:
            raise ValueError(f"The MoE exchange works on rows (dim 0), not on dim {dim}")
