"""When a prefill engine tells the tokens of a step: on a CPU before it computes the next one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from prefill_node import service
from prefill_node.config import PrefillConfig

PICO = str(Path(__file__).parents[3] / "models" / "pico")


def asynchronous(given: bool | None = None) -> bool | None:
    """`--async-scheduling` after the role has set its flags."""
    args = AsyncEngineArgs(model=PICO, async_scheduling=given)
    service.ROLE.apply_flags(args, PrefillConfig())
    return args.async_scheduling


def test_first_tokens_do_not_wait_for_the_next_step_on_a_cpu() -> None:
    """There a step is computed in the thread that schedules: two in flight run one after the other."""
    assert asynchronous() is False


def test_what_the_user_says_stays() -> None:
    assert asynchronous(True) is True


def test_vllm_decides_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(service, "current_platform", gpu)
    assert asynchronous() is None
