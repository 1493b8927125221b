"""TTFT, ITL and throughput of Lockstep beside plain vLLM, in one run: `python -m bench.serve`.

All systems are up at once and take turns; each figure is the median of the alternating runs. Absolute numbers
belong to the machine, the ratios to the systems.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import load
from bench.load import Figures, Shape
from bench.systems import PLAIN, System, running

CONCURRENCY = (1, 4, 8)
STEP_ROWS = 4
"""Rows of each rank when the time of a decode step is compared: one request is one row of 1 + K tokens."""


def measure(
    systems: list[System], concurrency: Iterable[int], runs: int, shape: Shape
) -> dict[tuple[str, int], Figures]:
    """Medians by system and concurrency."""
    medians = {}
    for level in concurrency:
        samples: dict[str, list[Figures]] = {system.name: [] for system in systems}
        for run in range(-1, runs):  # the first is a warm-up
            for system in systems:
                figures = load.run(system.url, shape, level, seed=1000 * level + run + 1)
                if run >= 0:
                    samples[system.name].append(figures)
        medians |= {(name, level): _median(values) for name, values in samples.items()}
    return medians


def measure_step(systems: list[System], runs: int, shape: Shape) -> dict[str, float]:
    """Milliseconds of a decode step by system, with STEP_ROWS rows on every rank."""
    samples: dict[str, list[float]] = {system.name: [] for system in systems}
    for run in range(-1, runs):
        for system in systems:
            rows = STEP_ROWS * system.decode_ranks
            one_batch = Shape(shape.input_tokens, 4 * shape.output_tokens, requests=rows)
            figures = load.run(system.url, one_batch, rows, seed=77000 + run)
            if run >= 0:
                samples[system.name].append(figures.itl_ms)
    return {name: statistics.median(values) for name, values in samples.items()}


def _median(samples: list[Figures]) -> Figures:
    return Figures(
        *(statistics.median(getattr(sample, field.name) for sample in samples) for field in fields(Figures))
    )


def report(medians: dict[tuple[str, int], Figures], steps: dict[str, float]) -> dict[str, Any]:
    """The figures with their ratios to plain vLLM, as JSON."""
    rows = [
        {
            "system": name,
            "concurrency": level,
            **asdict(figures),
            "ratio_to_plain": {
                field: value / getattr(medians[PLAIN, level], field)
                for field, value in asdict(figures).items()
            },
        }
        for (name, level), figures in medians.items()
    ]
    one, two = (next(ms for name, ms in steps.items() if f"{n} D" in name) for n in (1, 2))
    return {"runs": rows, "decode_step_ms": steps, "decode_step_two_ranks_to_one": two / one}


def show(result: dict[str, Any]) -> None:
    table = Table(title="Medians; in brackets the ratio to plain vLLM")
    for column in ("concurrency", "system", "TTFT ms", "ITL ms", "TPOT ms", "output tokens/s"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in result["runs"]:
        cells = [
            f"{row[field.name]:.1f} ({row['ratio_to_plain'][field.name]:.2f})" for field in fields(Figures)
        ]
        table.add_row(str(row["concurrency"]), row["system"], *cells)
    console = Console(width=120)
    console.print(table)
    for name, step_ms in result["decode_step_ms"].items():
        console.print(f"decode step, {STEP_ROWS} rows a rank, {name}: {step_ms:.1f} ms")
    console.print(f"two ranks to one: {result['decode_step_two_ranks_to_one']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one run of each instead of five")
    args = parser.parse_args()
    runs = 1 if args.quick else 5
    with running() as systems:
        medians = measure(systems, CONCURRENCY, runs, Shape())
        steps = measure_step(systems, runs, Shape())
    result = report(medians, steps)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    show(result)


if __name__ == "__main__":
    main()
