"""Groups of one rank share a gloo group, counted in real processes by their polling threads."""

import subprocess
import sys

PROGRAM = """
import os, sys, tempfile, time
import torch, torch.distributed as dist
from decode_node.cpu_platform.lone_groups import LoneGroups

def loops(at_least):
    # A thread has its name a moment after it started.
    deadline = time.monotonic() + 2
    while True:
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
        count = sum(name == "gloo_tcp_loop" for name in names)
        if count >= at_least or time.monotonic() > deadline:
            return count
        time.sleep(0.02)

with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    before = loops(at_least=1)
    if sys.argv[1] == "shared":
        with LoneGroups().shared():
            groups = [dist.new_group([0], backend="gloo") for _ in range(6)]
    else:
        groups = [dist.new_group([0], backend="gloo") for _ in range(6)]
    opened = loops(at_least=before + 6) - before
    value = torch.ones(1)
    dist.all_reduce(value, group=groups[-1])
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    print(opened, int(value.item()), len(set(map(id, groups))))
"""


def _run(mode: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=120, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_lone_groups_are_one() -> None:
    """Six groups of this rank: one polling thread instead of six, and all of them can be destroyed."""
    assert _run("shared") == [1, 1, 1]
    assert _run("stock") == [6, 1, 6]
