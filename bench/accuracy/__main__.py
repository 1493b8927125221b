"""`python -m bench.accuracy`: lm-eval against plain vLLM, then Lockstep; exit code 1 unless they are equal.

Both answer the same held-out tasks (perplexity, continuation, last word) with the same engine flags, one
after the other, at concurrency 64.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from bench.accuracy import client, comparison, held_out, tasks
from bench.accuracy.client import Result
from bench.accuracy.comparison import Comparison
from bench.peers import answers, ours, record
from bench.peers.processes import Layout, running
from lockstep.cli.ports import PortPicker

PLAIN, LOCKSTEP = "plain vLLM", "Lockstep"
SYSTEMS: dict[str, Callable[[Path, PortPicker], Layout]] = {PLAIN: ours.plain, LOCKSTEP: ours.lockstep}


def main() -> None:
    args = _arguments()
    command = client.installed()
    size = held_out.QUICK if args.quick else held_out.FULL
    with tempfile.TemporaryDirectory(prefix="lockstep-accuracy-") as folder:
        directory = Path(folder) if args.logs is None else args.logs.resolve()
        (directory / "tasks").mkdir(parents=True)
        tasks.write(directory / "tasks", size)
        results = {name: _measured(name, command, directory) for name in SYSTEMS}
    found = comparison.compare(results[PLAIN], results[LOCKSTEP])
    print(comparison.markdown(found))
    if args.json:
        args.json.write_text(json.dumps(_data(found, args.quick), indent=1) + "\n")
    sys.exit(bool(found.differences))


def _measured(name: str, command: Path, directory: Path) -> Result:
    """One system, started, asked and stopped. Raises StartError and ClientError."""
    folder = directory / name.replace(" ", "-")
    folder.mkdir()
    with running(SYSTEMS[name](folder, PortPicker()), folder) as system:
        print(f"{name}: first answer after {answers.wait_first(system):.1f} s", flush=True)
        started_s = time.monotonic()
        result = client.run(command, system.url, directory / "tasks", folder)
        print(f"{name}: lm-eval took {time.monotonic() - started_s:.1f} s", flush=True)
        return result


def _data(found: Comparison, quick: bool) -> record.Data:
    where = {name: value for name, value in record.empty().items() if name not in ("samples", "failures")}
    where["versions"]["lm-eval"] = client.VERSION
    return where | {"load_average": psutil.getloadavg()[1], "quick": quick} | asdict(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, help="write figures and differences to this file")
    parser.add_argument("--quick", action="store_true", help="a third of the documents")
    parser.add_argument("--logs", type=Path, help="keep tasks, samples and logs in this new folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
