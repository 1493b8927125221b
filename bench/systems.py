"""The systems that the benchmarks compare: Lockstep stacks and a plain vLLM server, all up at once."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness import run_reference, run_stack


@dataclass(frozen=True, slots=True)
class System:
    """One system under load: its name in the tables, its endpoint, its decode ranks."""

    name: str
    url: str
    decode_ranks: int


PLAIN = "plain vLLM"


@contextlib.contextmanager
def running(decode_ranks: tuple[int, ...] = (1, 2)) -> Iterator[list[System]]:
    """Start a plain vLLM server and one stack for each number of decode ranks; stop them at the end.

    Same model, dtype, K and one thread an engine everywhere. Idle systems stay up beside the loaded one, so
    that runs can alternate.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        systems = []
        plain = directory / "plain"
        plain.mkdir()
        systems.append(System(PLAIN, stack.enter_context(run_reference(plain)), 1))
        for ranks in decode_ranks:
            state = directory / f"ranks{ranks}"
            state.mkdir()
            running_stack = stack.enter_context(run_stack(state, "--decode-ranks", str(ranks)))
            systems.append(System(_name(ranks), running_stack.url, ranks))
        yield systems


def _name(decode_ranks: int) -> str:
    return f"Lockstep 1 P + {decode_ranks} D rank{'s' if decode_ranks > 1 else ''}"
