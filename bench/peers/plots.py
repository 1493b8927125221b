"""Draws a comparison as SVG: TTFT and output tokens/s over concurrency, processor time and memory.

Run by the Python of an environment with matplotlib: `python -m bench.peers.plots FILE FOLDER`.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

from bench.peers import figures
from bench.peers.figures import PATCHED, Data

COLOURS = {
    "lockstep": "#d62728",
    "plain": "#555555",
    "router-pull": "#1f77b4",
    "router-push": "#17becf",
    "smg": "#2ca02c",
    "dynamo": "#8c564b",
}
LABELS = {
    "lockstep": "Lockstep",
    "plain": "plain vLLM",
    "router-pull": "vllm-router, pull",
    "router-push": "vllm-router, push",
    "smg": "smg",
    "dynamo": "Dynamo",
}

ORDER = (*LABELS, *(key + PATCHED for key in LABELS))
"""A patched peer has the same colour, dashed."""


def _label(key: str) -> str:
    return LABELS[key.removesuffix(PATCHED)] + (", patched" if key.endswith(PATCHED) else "")


def _colour(key: str) -> str:
    return COLOURS[key.removesuffix(PATCHED)]


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    # The same file for the same figures: no date, no random ids.
    plt.rcParams.update({"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 9})
    _lines(data, folder / "peers-ttft.svg", "ttft_p50_ms", "TTFT p50, ms")
    _lines(data, folder / "peers-throughput.svg", "output_tokens_per_s", "output tokens/s")
    _bars(data, folder / "peers-cost.svg")


def _lines(data: Data, file: Path, figure: str, title: str) -> None:
    levels = sorted(int(name[1:]) for name in figures.point_names(data) if name[1:].isdigit())
    axes = plt.figure(figsize=(6, 3.4)).gca()
    for key in ORDER:
        values = [figures.median(data, key, figure, f"c{level}") for level in levels]
        measured = [(level, value) for level, value in zip(levels, values, strict=True) if value is not None]
        if measured:
            style = "--" if key.endswith(PATCHED) else "-"
            axes.plot(*zip(*measured, strict=True), style, marker="o", label=_label(key), color=_colour(key))
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.set_xlabel("concurrency")
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _save(file)


def _bars(data: Data, file: Path) -> None:
    shown = (
        ("CPU s per 1,000 tokens, c1", "cpu_s_per_1000_tokens", "c1"),
        ("CPU s per 1,000 tokens, c8", "cpu_s_per_1000_tokens", "c8"),
        ("memory, MiB", "memory_mib", ""),
    )
    _, all_axes = plt.subplots(1, len(shown), figsize=(9, 2.8), sharey=True)
    for axes, (title, figure, point) in zip(all_axes, shown, strict=True):
        measured = {
            key: value for key in ORDER if (value := figures.median(data, key, figure, point)) is not None
        }
        axes.barh(
            [_label(key) for key in measured], measured.values(), color=[_colour(key) for key in measured]
        )
        axes.set_title(title, fontsize=9)
        axes.grid(axis="x", alpha=0.3)
    all_axes[0].invert_yaxis()
    _save(file)


def _save(file: Path) -> None:
    plt.tight_layout()
    plt.savefig(file, metadata={"Date": None})
    plt.close()


if __name__ == "__main__":
    main()
