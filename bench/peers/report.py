"""The comparison as Markdown tables, as docs/benchmarks.md has them."""

from collections.abc import Sequence

from bench.peers import figures
from bench.peers.catalog import CANDIDATES
from bench.peers.figures import Data
from bench.peers.load import DEADLINE_S

NAMES = {candidate.key: candidate.name for candidate in CANDIDATES}
LOAD_COLUMNS = (
    ("TTFT p50", "ttft_p50_ms", 1),
    ("p99", "ttft_p99_ms", 0),
    ("ITL p50", "itl_p50_ms", 1),
    ("p99", "itl_p99_ms", 0),
    ("TPOT p50", "tpot_p50_ms", 2),
    ("p99", "tpot_p99_ms", 1),
    ("tokens/s", "output_tokens_per_s", 0),
    ("CPU s / 1,000", "cpu_s_per_1000_tokens", 2),
)


def markdown(data: Data) -> str:
    parts = [
        _systems(data),
        _loads(data),
        _ratios(data, "best peer as it comes", figures.AS_THEY_COME),
        _ratios(data, "best peer, patched or not", figures.PEERS),
        _beside_plain(data),
        _failures(data),
    ]
    return "\n\n".join(part for part in parts if part)


def measured(data: Data) -> list[str]:
    """Keys of the systems with samples, in the catalog's order."""
    return [key for key in NAMES if figures.samples_of(data, key)]


def _systems(data: Data) -> str:
    rows = []
    for key in measured(data):
        equal, asked = figures.equal_answers(data, key)
        rows.append(
            [
                NAMES[key],
                str(len(figures.samples_of(data, key))),
                _number(figures.median(data, key, "start_s"), 0),
                _number(figures.median(data, key, "memory_mib"), 0),
                _number(figures.median(data, key, "idle_cores"), 2),
                f"{equal} of {asked}",
                str(_errors(data, key)),
            ]
        )
    head = [
        "system",
        "rounds",
        "s to first answer",
        "memory MiB",
        "cores when idle",
        "answers equal",
        "errors",
    ]
    return _table(head, rows)


def _errors(data: Data, key: str) -> int:
    points = (point for sample in figures.samples_of(data, key) for point in sample["points"].values())
    return sum(point["errors"] for point in points)


def _loads(data: Data) -> str:
    rows = [
        [
            point,
            NAMES[key],
            *(
                _number(figures.median(data, key, figure, point), digits)
                for _, figure, digits in LOAD_COLUMNS
            ),
        ]
        for point in figures.point_names(data)
        for key in measured(data)
    ]
    return _table(["load", "system", *(title for title, _, _ in LOAD_COLUMNS)], rows)


def _ratios(data: Data, whose: str, peers: Sequence[str]) -> str:
    rows = [
        [
            f"{ratio.bound.figure} {ratio.bound.point}".strip(),
            NAMES[ratio.best_peer],
            f"{ratio.ours:.1f} : {ratio.theirs:.1f}",
            f"{ratio.value:.2f}",
            f"{'>=' if ratio.bound.at_least else '<='} {ratio.bound.limit:g}",
            "yes" if ratio.holds else "**no**",
        ]
        for ratio in figures.ratios(data, peers)
    ]
    return _table(["figure", whose, "Lockstep : peer", "ratio", "bound", "kept"], rows) if rows else ""


def _beside_plain(data: Data) -> str:
    lines = []
    ttft_ms = figures.median(data, figures.LOCKSTEP, "ttft_p50_ms", "c1")
    for system in (figures.LOCKSTEP, figures.PLAIN):
        bound_ms = figures.ttft_bound_ms(data, system)
        if ttft_ms is not None and bound_ms is not None:
            lines.append(
                f"- TTFT p50 at c1: {ttft_ms:.1f} ms; by the prefill time of {NAMES[system]}, + 10 % + 2 ms:"
                f" {bound_ms:.1f} ms"
            )
    for point in ("c1", "c8"):
        ours = figures.median(data, figures.LOCKSTEP, "output_tokens_per_s", point)
        plain = figures.median(data, figures.PLAIN, "output_tokens_per_s", point)
        bound = figures.throughput_bound(data, point)
        if ours is not None and plain is not None and bound is not None:
            lines.append(
                f"- tokens/s at {point}: {ours:.0f}, plain vLLM {plain:.0f} (ratio {ours / plain:.2f});"
                f" with all cores always busy the first round's processor time allows {bound:.0f}"
            )
    return "\n".join(lines)


def _failures(data: Data) -> str:
    cut_off = [
        f"{NAMES[sample['system']]}, round {sample['round']}: not through in time ({DEADLINE_S:g} s a load): "
        f"{', '.join(sample['unfinished'])}."
        for sample in data["samples"]
        if sample["unfinished"]
    ]
    not_started = [
        f"{NAMES[entry['system']]}, round {entry['round']}, did not start:\n\n```\n{entry['error']}\n```"
        for entry in data["failures"]
    ]
    return "\n\n".join([*cut_off, *not_started])


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
