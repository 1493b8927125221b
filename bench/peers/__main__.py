"""`python -m bench.peers`: the systems run one at a time, round after round; medians and ratios at the end.

Every sample goes to the file as soon as it is there, and `--resume` adds to a file: rounds can be run apart.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from bench.peers import load, record, report
from bench.peers.catalog import CANDIDATES, Candidate
from bench.peers.environments import PLOTS
from bench.peers.sample import measure
from bench.proxy_peers import installed
from bench.sim_processes import StartError


def main() -> None:
    args = _arguments()
    data = json.loads(args.json.read_text()) if args.resume and args.json.exists() else record.empty()
    points = load.points(args.concurrency, args.rates, args.aiperf, args.quick)
    for _ in range(args.rounds):
        for candidate in _in_turn(args.systems, record.rounds_of(data, args.systems[0])):
            _one(data, candidate, points, args.logs)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n")
    print(report.markdown(data))
    if args.plots:
        _plot(args.json, args.plots)


def _one(data: record.Data, candidate: Candidate, points: list[load.Point], logs: Path | None) -> None:
    round_number = record.rounds_of(data, candidate.key)
    print(f"round {round_number}: {candidate.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-peers-") as folder:
        directory = Path(folder) if logs is None else logs / f"{candidate.key}-{round_number}"
        directory.mkdir(parents=True, exist_ok=True)
        try:
            record.add(data, measure(candidate, round_number, points, directory))
        except StartError as error:
            print(f"  did not start: {error}", flush=True)
            record.add_failure(data, candidate.key, str(error))


def _in_turn(keys: list[str], round_number: int) -> list[Candidate]:
    """Every other round goes backwards, so that none always comes after the same one."""
    chosen = [candidate for candidate in CANDIDATES if candidate.key in keys]
    return chosen[::-1] if round_number % 2 else chosen


def _plot(file: Path, folder: Path) -> None:
    python = installed(PLOTS) / PLOTS.command[0]
    subprocess.run([str(python), "-m", "bench.peers.plots", str(file), str(folder)], check=True, timeout=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    keys = [candidate.key for candidate in CANDIDATES]
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--resume", action="store_true", help="add to that file instead of starting it anew")
    parser.add_argument(
        "--quick", action="store_true", help="half of the requests, and only those at a concurrency"
    )
    parser.add_argument("--rounds", type=int, default=None, help="5, or 1 with --quick; 0 reports the file")
    parser.add_argument("--systems", nargs="+", choices=keys, default=keys, metavar="KEY", help=str(keys))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(load.CONCURRENCY))
    parser.add_argument("--rates", nargs="*", type=float, default=list(load.RATES_PER_S), help="requests/s")
    levels = list(load.AIPERF_CONCURRENCY)
    parser.add_argument("--aiperf", nargs="*", type=int, default=levels, help="concurrency under AIPerf")
    parser.add_argument("--plots", type=Path, help="draw the figures of the file as SVG into this folder")
    parser.add_argument("--logs", type=Path, help="keep what the processes write in this folder")
    args = parser.parse_args()
    if args.logs is not None:
        args.logs = args.logs.resolve()
    if args.rounds is None:
        args.rounds = 1 if args.quick else 5
    if args.json is None and (args.resume or args.plots):
        parser.error("--resume and --plots need --json")
    return args


if __name__ == "__main__":
    main()
