"""How fast a push moves KV, against a bare NIXL write and memcpy; and what streaming it saves on a slow link.

    python -m bench.kv_push [--json FILE] [--quick] [--rounds 7] [--skip-link]

One run measures all three on the same blocks, in turn, and prints medians. Ours is counted from the moment
at which the last forward pass has ended until decode's engine is told that its KV has arrived; the bare write
from the post until NIXL says that it is done, watched without a pause, with no word to decode at all. The
second part joins the two processes by a link of 200 Mbit/s: the time from the end of prefill until decode
has the KV, streamed chunk by chunk against pushed at the end.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.limited_link import NotPermittedError, limited_link

MIB = 1024 * 1024
SIZES_MIB = (1, 8, 64)
LINK_MBIT_PER_S = 200
CHUNKS = 10
CHUNK_MIB = 1
# A little longer than the link needs for a chunk, so that prefill and not the link sets the pace.
CHUNK_COMPUTE_S = 1.25 * CHUNK_MIB * MIB * 8 / (LINK_MBIT_PER_S * 1e6)
# 1 MiB blocks (bench/kv_push_peer.py), and block 0 is never used, as in vLLM.
NUM_BLOCKS = max(*SIZES_MIB, CHUNKS * CHUNK_MIB) + 1
SHARE_OF_BARE_WRITE = 0.8
SHARE_OF_PUSH_AT_THE_END = 0.25


class Side:
    """A `bench.kv_push_peer` process; its methods are called by name."""

    def __init__(
        self, role: str, host: str, port: int, prefix: list[str], environment: dict[str, str]
    ) -> None:
        self.host, self.port = host, port
        variables = os.environ | environment
        variables |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        variables.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        command = [*prefix, sys.executable, "-m", "bench.kv_push_peer", role, str(NUM_BLOCKS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def call(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def send(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side of the benchmark ended early; its output says why")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Bench:
    def __init__(self, prefill: Side, decode: Side) -> None:
        self._prefill, self._decode = prefill, decode
        self._names = (f"push-{number}" for number in itertools.count())
        for side in (prefill, decode):
            assert side.answer() == "ready"

    def push(self, num_blocks: int, num_chunks: int = 1, chunk_s: float = 0.0, stream: bool = True) -> float:
        """Seconds from the end of the last forward pass until decode's engine knows that it has the KV."""
        name = next(self._names)
        self._decode.call("register", name, num_blocks, self._prefill.host, self._prefill.port)
        self._prefill.call("registered", name)
        self._decode.send("received", name)
        computed_at = self._prefill.call("push", name, num_blocks, num_chunks, chunk_s, stream)
        return float(self._decode.answer() - computed_at)

    def bare_write(self, num_blocks: int) -> float:
        return float(self._prefill.call("bare_write", num_blocks))

    def memcpy(self, num_bytes: int) -> float:
        return float(self._prefill.call("memcpy", num_bytes))


@contextmanager
def bench(
    hosts: tuple[str, str], prefixes: tuple[list[str], list[str]], environment: dict[str, str]
) -> Iterator[Bench]:
    sides = [
        Side(role, host, port, prefix, environment)
        for role, host, port, prefix in zip(
            ("prefill", "decode"), hosts, (56011, 56012), prefixes, strict=True
        )
    ]
    try:
        yield Bench(*sides)
    finally:
        for side in sides:
            side.close()


def throughput(rounds: int) -> list[dict[str, float]]:
    """Print and return GB/s of the three, one row for each size."""
    rows = []
    with bench(("127.0.0.1", "127.0.0.1"), ([], []), {}) as sides:
        sides.push(NUM_BLOCKS - 1)  # connects, and touches the memory
        print(f"{'MiB':>4} {'push':>14} {'bare write':>14} {'memcpy':>14}   push : bare write")
        for size in SIZES_MIB:
            seconds = [
                (sides.push(size), sides.bare_write(size), sides.memcpy(size * MIB)) for _ in range(rounds)
            ]
            push, bare, memcpy = (statistics.median(column) for column in zip(*seconds, strict=True))
            speeds = [size * MIB / value / 1e9 for value in (push, bare, memcpy)]
            cells = [f"{speed:6.2f} GB/s" for speed in speeds]
            print(f"{size:>4} {cells[0]:>14} {cells[1]:>14} {cells[2]:>14}   {bare / push:.2f}")
            names = ("push_gb_per_s", "bare_write_gb_per_s", "memcpy_gb_per_s")
            rows.append({"mib": size, **dict(zip(names, speeds, strict=True)), "push_to_bare": bare / push})
    return rows


def streaming(rounds: int) -> dict[str, Any]:
    """Print and return the two times on the slow link, or why it could not be made."""
    try:
        with limited_link(LINK_MBIT_PER_S) as ends:
            hosts = ends[0].address, ends[1].address
            # Without this UCX goes past the link: both processes share the machine's memory.
            with bench(hosts, (ends[0].command, ends[1].command), {"UCX_TLS": "tcp"}) as sides:
                blocks = CHUNKS * CHUNK_MIB
                sides.push(blocks)
                streamed, at_end = (
                    statistics.median(
                        sides.push(blocks, CHUNKS, CHUNK_COMPUTE_S, stream) for _ in range(rounds)
                    )
                    for stream in (True, False)
                )
    except NotPermittedError as error:
        print(f"Not measured, a slow link cannot be made here: {error}")
        return {"not_measured": str(error)}
    print(
        f"{LINK_MBIT_PER_S} Mbit/s, {CHUNKS} chunks of {CHUNK_MIB} MiB, {CHUNK_COMPUTE_S * 1e3:.0f} ms each: "
        f"KV complete {streamed * 1e3:.0f} ms after the end of prefill when streamed, "
        f"{at_end * 1e3:.0f} ms when pushed at the end: {streamed / at_end:.2f}"
    )
    return {"streamed_s": streamed, "at_end_s": at_end, "streamed_to_at_end": streamed / at_end}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="three rounds, the slow link left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-link", action="store_true", help="leave the slow link out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the link is taken down
    begin = time.monotonic()
    rounds = 3 if options.quick else options.rounds
    sizes = throughput(rounds)
    link = {} if options.quick or options.skip_link else streaming(rounds)
    ok = sizes[-1]["push_to_bare"] >= SHARE_OF_BARE_WRITE
    ok = ok and link.get("streamed_to_at_end", 0) <= SHARE_OF_PUSH_AT_THE_END
    if options.json:
        options.json.write_text(json.dumps({"sizes": sizes, "link": link}, indent=2))
    print(f"{time.monotonic() - begin:.0f} s in all; {'as required' if ok else 'NOT as required'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
