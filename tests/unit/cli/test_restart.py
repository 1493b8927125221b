"""When a process that died is started again."""

import pytest

from lockstep.cli.restart import RestartPolicy

POLICY = RestartPolicy(quick_s=30.0, max_quick_deaths=4, first_delay_s=0.5, max_delay_s=1.5)


@pytest.mark.parametrize(
    ("ready_for_s", "delay_s"),
    [
        ([3600.0], 0.5),
        ([1.0], 0.5),
        ([1.0, 1.0], 1.0),
        ([1.0, 0.0, 1.0], 1.5),
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 1.0, 1.0, 31.0, 1.0], 0.5),
        ([1.0, 1.0, 31.0, 1.0, 1.0, 1.0, 1.0], None),
    ],
    ids=["after long", "quick", "doubled", "capped", "gives up", "long run forgives", "counts from there"],
)
def test_delay(ready_for_s: list[float], delay_s: float | None) -> None:
    """The delay doubles with each quick death in a row up to its cap, and the last allowed one gives up."""
    assert POLICY.delay_s(ready_for_s) == delay_s
