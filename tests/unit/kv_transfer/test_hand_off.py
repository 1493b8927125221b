"""The hand-off's parts: its bytes, whose first token a step samples, and what several workers were told."""

import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kv_transfer.handoff import codec, runner, worker_meta
from kv_transfer.handoff import worker as handoff_worker
from kv_transfer.handoff.codec import HandOff, HandOffError
from kv_transfer.handoff.runner import HandOffRunnerMixin
from kv_transfer.handoff.sampling import FirstTokenTracker
from kv_transfer.handoff.worker import HandOffWorker
from kv_transfer.handoff.worker_meta import HandOffWorkerMetadata
from kv_transfer.notices import MAX_PAYLOAD_BYTES
from kv_transfer.step_queue import StepQueue
from lockstep.node.config import NodeConfig
from prefill_node.gpu_worker import PrefillGpuModelRunner, PrefillGpuWorker
from prefill_node.service import GPU_WORKER, ROLE

TOKEN = "a" * 32
LIMITS = {"num_drafts": 3, "vocab_size": 100}


@pytest.mark.parametrize("drafts", [(), (5,), (5, 0, 99)])
def test_codec_round_trip(drafts: tuple[int, ...]) -> None:
    """Also for fewer drafts than K: the rest is filled up with placeholders."""
    assert codec.decode(codec.encode(7, drafts), **LIMITS) == HandOff(7, drafts)


def test_largest_payload_fits_a_notice() -> None:
    """Whatever the ids."""
    assert len(codec.encode(2**32 - 1, [2**32 - 1] * codec.MAX_DRAFTS)) <= MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(("token", "drafts"), [(-1, []), (7, [-1]), (2**32, []), (7, [1] * 65)])
def test_nothing_else_is_encoded(token: int, drafts: list[int]) -> None:
    """vLLM pads rows with -1."""
    with pytest.raises(HandOffError):
        codec.encode(token, drafts)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "nothing was handed over"),
        (b"\x02" + codec.encode(7, [])[1:], "version 2"),
        (worker_meta.MISMATCH, "version 0"),
        (codec.encode(7, [])[:-1], "only 5 bytes"),
        (codec.encode(7, [5]) + b"\x00", "11 bytes for 1 drafts"),
        (codec.encode(7, [5])[:-1], "9 bytes for 1 drafts"),
        (codec.encode(7, [1, 2, 3, 4]), "4 drafts, more than 3"),
        (codec.encode(100, []), "vocabulary"),
        (codec.encode(7, [100]), "vocabulary"),
    ],
)
def test_codec_refuses(payload: bytes, why: str) -> None:
    """Each says what is wrong."""
    with pytest.raises(HandOffError, match=why):
        codec.decode(payload, **LIMITS)


def test_wire_format() -> None:
    """Version, number of drafts, then little-endian ids: what another version of the code has to read."""
    assert codec.encode(7, [8, 9]) == struct.pack("<BBIII", 1, 2, 7, 8, 9)


def request(request_id: str = "r", *, hand_off: bool = True, num_computed: int = 0) -> Any:
    params = {"lockstep_token": TOKEN} | ({"lockstep_hand_off": True} if hand_off else {})
    return SimpleNamespace(
        request_id=request_id, kv_transfer_params=params, num_computed_tokens=num_computed, num_tokens=10
    )


def step(**num_scheduled_tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=num_scheduled_tokens)


def test_first_token_is_sampled_by_the_step_that_completes_the_prompt() -> None:
    """Not by a chunk before it; one that speculates on prefill may schedule more than is left."""
    tracker, asked = FirstTokenTracker(), request()
    tracker.track(asked)
    assert tracker.step(step(r=6)) == {}
    asked.num_computed_tokens = 6
    assert tracker.step(step(r=4)) == tracker.step(step(r=7)) == {"r": TOKEN}
    tracker.forget("r")
    assert tracker.step(step(r=4)) == {}


def test_only_promised_first_tokens_are_followed() -> None:
    """And no requests that are not known."""
    tracker = FirstTokenTracker()
    tracker.track(request(hand_off=False))
    assert tracker.step(step(r=10, other=10)) == {}


def test_workers_that_were_told_the_same_agree() -> None:
    """vLLM aggregates what the workers of one engine report in a step."""
    joined = HandOffWorkerMetadata({"a": b"1", "b": b"2"}).aggregate(HandOffWorkerMetadata({"b": b"2"}))
    assert joined.payloads == {"a": b"1", "b": b"2"}


def test_workers_that_were_told_different_payloads_have_none() -> None:
    """No codec reads what is left of it."""
    joined = HandOffWorkerMetadata({"a": b"1"}).aggregate(HandOffWorkerMetadata({"a": b"2"}))
    assert joined.payloads == {"a": worker_meta.MISMATCH}


class _Vllm:
    """In place of vLLM's runner."""

    def __init__(self, drafts: Any) -> None:
        self.input_batch = SimpleNamespace(req_id_to_index={"x": 0, "r": 1})
        self._draft_token_ids = drafts

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        sampled = torch.tensor([[4, -1, -1], [6, -1, -1]], dtype=torch.int32)
        return SimpleNamespace(sampled_token_ids=sampled)

    def sample_tokens(self, grammar_output: Any) -> str:
        self._draft_token_ids, drafts = None, self._draft_token_ids
        assert self._sample(None, None).sampled_token_ids.shape == (2, 3)
        self._draft_token_ids = drafts
        return "output"


class _Runner(HandOffRunnerMixin, _Vllm):
    pass


class _Worker(HandOffWorker):
    def __init__(self, awaited: dict[str, str]) -> None:
        self.awaited = awaited
        self.told: list[tuple[list[str], list[int]]] = []
        self.handed: list[tuple[list[str], list[list[int]]]] = []

    def first_tokens_awaited(self) -> dict[str, str]:
        return self.awaited

    def sampled(self, request_ids: list[str], token_ids: torch.Tensor) -> None:
        assert not self.handed, "the drafts were made first"
        self.told.append((request_ids, token_ids.tolist()))

    def hand_over(self, request_ids: list[str], token_ids: torch.Tensor) -> None:
        self.handed.append((request_ids, token_ids.tolist()))


def connect(monkeypatch: pytest.MonkeyPatch, awaited: dict[str, str]) -> _Worker:
    worker = _Worker(awaited)
    monkeypatch.setattr(runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: SimpleNamespace(connector_worker=worker))
    return worker


def test_runner_hands_over_what_it_sampled_and_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the request, whatever else was in the batch; its padding is not part of it."""
    worker = connect(monkeypatch, {"r": TOKEN})
    made = _Runner(torch.tensor([[1, 2], [8, 9]], dtype=torch.int32))
    assert made.sample_tokens(None) == "output"
    assert worker.told == [(["r"], [6])]
    assert worker.handed == [(["r"], [[6, 8, 9]])]


def test_runner_without_a_drafter_hands_over_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 0."""
    worker = connect(monkeypatch, {"r": TOKEN})
    _Runner(None).sample_tokens(None)
    assert worker.handed == [(["r"], [[6]])]


def test_runner_hands_over_nothing_that_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode rank, or a step that completes no prompt."""
    worker = connect(monkeypatch, {})
    assert _Runner(None).sample_tokens(None) == "output"
    assert worker.handed == worker.told == []


class _Device:
    """Has done what was launched once the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = False
        monkeypatch.setattr(handoff_worker, "record_event", lambda device_type: lambda: self.done)


def test_first_tokens_are_told_when_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told beside them is looked up within the step; nothing waits for the device there."""
    device, writer = _Device(monkeypatch), SimpleNamespace(lock=threading.Lock(), steps=StepQueue())
    made = HandOffWorker()
    made.device_type, made._writer, made._push_writer_wake = "x", writer, threading.Event()  # type: ignore[assignment]
    begun: list[list[str]] = []
    told: list[list[int]] = []

    def begin(request_ids: list[str]) -> Any:
        begun.append(request_ids)
        return told.append

    made.sampled(["a"], torch.tensor([1]))  # nobody asked to be told
    made.on_first_tokens(begin)
    made.sampled(["a", "b"], torch.tensor([6, 7], dtype=torch.int32))
    assert made._push_writer_wake.is_set()
    writer.steps.advance()
    assert (begun, told) == ([["a", "b"]], [])
    device.done = True
    writer.steps.advance()
    assert told == [[6, 7]]


def test_runner_leaves_other_connectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM server on our CPU platform with vLLM's own NIXL connector."""
    monkeypatch.setattr(runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(
        runner, "get_kv_transfer_group", lambda: SimpleNamespace(connector_worker=SimpleNamespace())
    )
    assert _Runner(None).sample_tokens(None) == "output"


def test_prefill_worker_on_cuda_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found as vLLM finds it (v1/worker/worker_base.py:285), unless the user chose one."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for given, expected in (("auto", GPU_WORKER), ("mine.Worker", "mine.Worker")):
        args = AsyncEngineArgs(model=str(Path(__file__).parents[3] / "models" / "pico"), worker_cls=given)
        ROLE.apply_flags(args, NodeConfig())
        assert args.worker_cls == expected
    assert resolve_obj_by_qualname(GPU_WORKER) is PrefillGpuWorker
    assert PrefillGpuModelRunner.__mro__[1:3] == (HandOffRunnerMixin, GPUModelRunner)
    made = PrefillGpuWorker.__new__(PrefillGpuWorker)
    vars(made).update(use_v2_model_runner=False, vllm_config="c", device="d")
    monkeypatch.setattr(GPUModelRunner, "__init__", lambda self, *args: None)
    assert type(made._make_model_runner()) is PrefillGpuModelRunner
