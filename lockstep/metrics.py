"""Reads the current values of a Prometheus metric back, so that a figure has one store and not two."""

from prometheus_client.metrics import MetricWrapperBase

Values = dict[tuple[str, ...], float]
"""By the values of the labels, in the order in which the metric declares them."""


def values(metric: MetricWrapperBase) -> Values:
    """The values of a counter or gauge; empty while it has labels and no value yet."""
    return _samples(metric, ("", "_total"))


def count_and_sum(metric: MetricWrapperBase) -> tuple[int, float]:
    """Number and sum of what a histogram without labels has observed."""
    return int(_samples(metric, ("_count",))[()]), _samples(metric, ("_sum",))[()]


def _samples(metric: MetricWrapperBase, suffixes: tuple[str, ...]) -> Values:
    return {
        tuple(sample.labels.values()): sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.removeprefix(family.name) in suffixes
    }
