"""One rank of the exchange tests, a process of its own: runs scenarios in order, prints what it saw as JSON.

Usage: exchange_ranks.py SCENARIO[,SCENARIO...] WAY RANK WORLD_SIZE RENDEZVOUS_FILE
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from decode_node.cpu_platform.exchange import Exchange, GlooExchange
from decode_node.cpu_platform.shm_exchange import SharedMemoryExchange

BUFFER_BYTES = 4096


def rows(rank: int, size: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[size, width] of numbers that say where they come from: rank, row, column."""
    row = torch.arange(size).view(-1, 1) * 10 + torch.arange(width)
    return (row + rank * 100).to(dtype)


def gather(exchange: Exchange, rank: int, sizes: list[int]) -> Any:
    """Three tensors of three widths and dtypes in one exchange."""
    kinds = [(5, torch.float32), (3, torch.bfloat16), (2, torch.int64)]
    mine = [rows(rank, sizes[rank], width, dtype) for width, dtype in kinds]
    gathered = exchange.all_gatherv(mine, sizes)
    expected = [
        torch.cat([rows(peer, size, width, dtype) for peer, size in enumerate(sizes)])
        for width, dtype in kinds
    ]
    return [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(gathered, expected, strict=True)]


def reduce(exchange: Exchange, rank: int, sizes: list[int]) -> Any:
    """The sum over ranks of this rank's rows; numbers small enough to be exact in bfloat16."""
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.arange(sum(sizes)).view(-1, 1) + torch.zeros(4)
        reduced = exchange.reduce_scatterv((total * (rank + 1)).to(dtype), sizes)
        first = sum(sizes[:rank])
        factor = sum(range(1, len(sizes) + 1))
        expected = (total[first : first + sizes[rank]] * factor).to(dtype)
        seen.append(torch.equal(reduced, expected) and reduced.dtype == dtype)
    return seen


def values(exchange: Exchange, rank: int, world_size: int) -> Any:
    """Equal, unequal and empty sizes, and a step too large for the shared buffer."""
    seen = {}
    for name, sizes in {
        "equal": [3] * world_size,
        "unequal": list(range(1, world_size + 1)),
        "empty": [0] + [2] * (world_size - 1),
        "large": [BUFFER_BYTES] * world_size,
    }.items():
        seen[f"gather {name}"] = gather(exchange, rank, sizes)
        if name != "large":
            seen[f"reduce {name}"] = reduce(exchange, rank, sizes)
    return seen


def many(exchange: Exchange, rank: int, world_size: int) -> Any:
    """Hundreds of exchanges back to back, each rank late now and then: no payload is overwritten early."""
    wrong = 0
    for step in range(400):
        if step % 50 == rank * 10:
            time.sleep(0.005)
        mine = torch.full((2, 8), float(step * 10 + rank))
        (gathered,) = exchange.all_gatherv([mine], [2] * world_size)
        expected = [float(step * 10 + peer) for peer in range(world_size) for _ in range(2)]
        wrong += gathered[:, 0].tolist() != expected
        reduced = exchange.reduce_scatterv(torch.full((world_size, 8), float(step + rank)), [1] * world_size)
        wrong += reduced[0, 0].item() != step * world_size + sum(range(world_size))
    return wrong


def late_peer(exchange: Exchange, rank: int, world_size: int) -> Any:
    """Seconds of processor time that rank 0 spends waiting 2 s for its peer."""
    if rank:
        time.sleep(2)
    cpu_s, started = time.process_time(), time.monotonic()
    exchange.all_gatherv([torch.zeros(1, 1)], [1] * world_size)
    return {"cpu_s": time.process_time() - cpu_s, "waited_s": time.monotonic() - started}


def dead_peer(exchange: Exchange, rank: int, world_size: int) -> Any:
    """What rank 0 is told when its peer dies before it answers."""
    if rank:
        os._exit(0)
    started = time.monotonic()
    try:
        exchange.all_gatherv([torch.zeros(1, 1)], [1] * world_size)
    except RuntimeError as error:
        return {"error": str(error), "after_s": time.monotonic() - started}
    return None


def left_behind(exchange: Exchange, rank: int, world_size: int) -> Any:
    """Names of this exchange's segments that still exist while it is in use."""
    assert isinstance(exchange, SharedMemoryExchange)
    dist.barrier()
    return [segment.path for segment in exchange._segments if os.path.exists(segment.path)]


SCENARIOS: dict[str, Callable[[Exchange, int, int], Any]] = {
    function.__name__: function for function in (values, many, late_peer, dead_peer, left_behind)
}


def main() -> None:
    scenarios, way, rank, world_size, rendezvous = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size)
    )
    gloo = GlooExchange(dist.group.WORLD)
    exchange: Exchange = gloo
    if way == "shm":
        opened = SharedMemoryExchange.open(dist.group.WORLD, gloo, BUFFER_BYTES)
        assert opened is not None
        exchange = opened
    seen = {name: SCENARIOS[name](exchange, int(rank), int(world_size)) for name in scenarios.split(",")}
    sys.stdout.write(json.dumps(seen))
    sys.stdout.flush()
    # Leaving the group would wait for a peer that may be dead.
    os._exit(0)


main()
