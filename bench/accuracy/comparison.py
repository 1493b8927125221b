"""Whether two systems gave lm-eval the same: sample by sample, then the figures that it made of them."""

import math
from dataclasses import dataclass

from bench.accuracy.client import Result, Sample

LOGLIKELIHOOD_TOLERANCE = 1e-6
"""Relative, of a log-likelihood.

Not 0: which requests share a step, and where a prompt is cut into chunks, differ from run to run, and with
the number of rows the order in which a product of matrices is summed. Plain vLLM twice, same server and
data: one passage of two 2e-4 nats apart at -110,377, a relative 2e-9, and 192 of 192 short ones the same.
"""

SHORT_TOLERANCE_NATS = 1e-4
"""Of a log-likelihood near 0: what float32 rounds of logits of about 10, and room for a few tokens.

A token that was computed from anything but its own prompt is off by tenths of a nat and more.
"""

FIGURE_TOLERANCE = 1e-5
"""Relative, of a perplexity; shares of right answers come from whole numbers and have to be the same."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of lm-eval for both systems."""

    task: str
    metric: str
    plain: float
    lockstep: float

    @property
    def equal(self) -> bool:
        return math.isclose(self.plain, self.lockstep, rel_tol=FIGURE_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differences` says in a line each what is not equal; empty where all is.

    `furthest` is the largest distance between two log-likelihoods of one request, in nats, over all samples.
    """

    figures: list[Figure]
    loglikelihoods: int
    texts: int
    furthest: float
    differences: list[str]


def compare(plain: Result, lockstep: Result) -> Comparison:
    figures = [
        Figure(*key, plain.figures.get(key, math.nan), lockstep.figures.get(key, math.nan))
        for key in sorted(plain.figures.keys() | lockstep.figures.keys())
    ]
    differences = [
        f"{figure.task} {figure.metric}: {figure.plain!r} and {figure.lockstep!r}"
        for figure in figures
        if not figure.equal
    ]
    distances = [0.0]
    both = sorted(plain.samples.keys() & lockstep.samples.keys())
    for key in sorted(plain.samples.keys() ^ lockstep.samples.keys()):
        differences.append(f"{_name(key)}: only one system has it")
    for key in both:
        ours, theirs = lockstep.samples[key], plain.samples[key]
        distances += _distances(theirs, ours)
        found = difference(theirs, ours)
        if found:
            differences.append(f"{_name(key)}: {found}")
    return Comparison(
        figures,
        loglikelihoods=sum(len(plain.samples[key].loglikelihoods) for key in both),
        texts=sum(plain.samples[key].text is not None for key in both),
        furthest=max(distances),
        differences=differences,
    )


def difference(plain: Sample, lockstep: Sample) -> str:
    """What is not equal in two samples of one document; empty where all is."""
    if plain.prompt != lockstep.prompt:
        return "not the same prompt"
    if plain.text != lockstep.text:
        return f"plain continues {plain.text!r}, Lockstep {lockstep.text!r}"
    if plain.greedy != lockstep.greedy:
        return f"greedy's choice is {plain.greedy} and {lockstep.greedy}"
    if len(plain.loglikelihoods) != len(lockstep.loglikelihoods):
        return f"{len(plain.loglikelihoods)} log-likelihoods and {len(lockstep.loglikelihoods)}"
    close = [
        math.isclose(one, other, rel_tol=LOGLIKELIHOOD_TOLERANCE, abs_tol=SHORT_TOLERANCE_NATS)
        for one, other in zip(plain.loglikelihoods, lockstep.loglikelihoods, strict=True)
    ]
    return "" if all(close) else f"log-likelihoods {plain.loglikelihoods} and {lockstep.loglikelihoods}"


def _distances(plain: Sample, lockstep: Sample) -> list[float]:
    return [
        abs(one - other) for one, other in zip(plain.loglikelihoods, lockstep.loglikelihoods, strict=False)
    ]


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]} {key[1]}"


def markdown(comparison: Comparison) -> str:
    """The figures side by side, what was compared, and the first differences."""
    rows = ["| task | figure | plain vLLM | Lockstep | |", "|---|---|---|---|---|"]
    for figure in comparison.figures:
        verdict = "equal" if figure.equal else "**not equal**"
        rows.append(
            f"| {figure.task} | {figure.metric} | {figure.plain:.6f} | {figure.lockstep:.6f} | {verdict} |"
        )
    rows.append("")
    rows.append(
        f"{comparison.loglikelihoods} log-likelihoods, at most {comparison.furthest:.1e} nats apart;"
        f" {comparison.texts} generated texts; {len(comparison.differences)} differences."
    )
    return "\n".join([*rows, *(f"- {difference}" for difference in comparison.differences[:20])])
