"""What is refused by name, in configurations that vLLM resolved, in requests, and in docs/support.md."""

import json
import re
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from unit.proxy.nodes_for_tests import node
from vllm import PoolingParams, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import EmbedsInput, MultiModalInput, TokensInput
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest

from decode_node.service import ROLE as DECODE
from lockstep.errors import ConfigError, InvalidRequestError
from lockstep.node import support
from lockstep.node.role import Role
from prefill_node.service import ROLE as PREFILL
from proxy import arguments, refusals
from proxy.cluster import Cluster
from proxy.front_end import FrontEnd

ROOT = Path(__file__).resolve().parents[3]
PICO = ROOT / "models" / "pico"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
HEAD = {"model": str(ROOT / "models" / "pico_eagle"), "num_speculative_tokens": 2}
HEAD3 = {"method": "eagle3", "model": str(ROOT / "models" / "pico_eagle3"), "num_speculative_tokens": 2}


def resolved(model: Path = PICO, **flags: Any) -> VllmConfig:
    """What vLLM makes of the flags; it reads the model's config.json, no weights."""
    args = AsyncEngineArgs(model=str(model), enforce_eager=True, **flags)
    return args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def with_modules(directory: Path, modules: int) -> Path:
    """pico's configuration with another number of MTP modules."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PICO / name, directory / name)
    config = json.loads((PICO / "config.json").read_text()) | {"num_nextn_predict_layers": modules}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"speculative_config": MTP},
        {"speculative_config": MTP | {"method": "glm4_moe_mtp"}},
        {"speculative_config": {"model": str(PICO), "num_speculative_tokens": 2}},
    ],
)
def test_one_module_mtp_and_no_speculation_are_served(flags: dict[str, Any]) -> None:
    """vLLM's older names of MTP, and an MTP draft of no named method, resolve to the same."""
    support.check_supported(resolved(**flags))


@pytest.mark.parametrize(
    ("flags", "flag", "instead"),
    [
        (
            {"speculative_config": MTP | {"num_speculative_tokens_per_batch_size": [(1, 4, 2), (5, 8, 1)]}},
            "--speculative-config: num_speculative_tokens_per_batch_size",
            "give one num_speculative_tokens",
        ),
        (
            {"speculative_config": MTP | {"method": "ngram", "prompt_lookup_max": 3}},
            "--speculative-config: method 'ngram'",
            "give one of mtp, eagle, eagle3",
        ),
        (
            {"speculative_config": HEAD | {"method": "eagle", "parallel_drafting": True}},
            "--speculative-config: parallel_drafting",
            "leave it out",
        ),
        ({"enable_lora": True}, "--enable-lora", "merge the adapter"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds", "use text or tokens"),
        ({"runner": "pooling"}, "--runner", "--runner generate"),
    ],
)
def test_feature_that_vllm_would_run_is_refused(flags: dict[str, Any], flag: str, instead: str) -> None:
    """The message names the flag and what works instead; both roles say it."""
    config = resolved(**flags)
    for role in (PREFILL, DECODE):
        with pytest.raises(ConfigError, match=f"^{re.escape(flag)}.* not served.*{instead}"):
            role.check_config(config)


def test_eagle3_wants_a_model_that_gives_its_inner_states() -> None:
    """vLLM's GLM-4-MoE does not; the same weights by way of transformers do, as the refusal says."""
    with pytest.raises(ConfigError, match=r"eagle3 .* Glm4MoeForCausalLM .* add --model-impl transformers"):
        support.check_supported(resolved(speculative_config=HEAD3))
    support.check_supported(resolved(speculative_config=HEAD3, model_impl="transformers"))


def test_multi_module_mtp_is_refused_above_one_token(tmp_path: Path) -> None:
    """With K = 1 only the first module runs, so that is served; the message says so."""
    model = with_modules(tmp_path, 2)
    support.check_supported(resolved(model, speculative_config=MTP | {"num_speculative_tokens": 1}))
    with pytest.raises(ConfigError, match=r"2 MTP modules.*not served; give num_speculative_tokens 1"):
        support.check_supported(resolved(model, speculative_config=MTP))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"is_multimodal_model": True}, "MODEL: multimodal models are not served; give a model of text only"),
        ({"is_hybrid": True}, "MODEL: Mamba, hybrid and other state-space models are not served"),
        ({"has_inner_state": True}, "MODEL: Mamba"),
        ({"is_attention_free": True}, "MODEL: Mamba"),
        ({"is_encoder_decoder": True}, "MODEL: encoder-decoder models are not served; give a decoder-only"),
    ],
)
def test_kind_of_model_is_refused(changes: dict[str, bool], message: str) -> None:
    """As vLLM's ModelConfig tells the kinds apart."""
    kinds = ("is_multimodal_model", "is_hybrid", "has_inner_state", "is_attention_free", "is_encoder_decoder")
    model = dict.fromkeys(kinds, False) | {"runner_type": "generate", "enable_prompt_embeds": False} | changes
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        speculative_config=None,
        lora_config=None,
        use_v2_model_runner=False,
    )
    if not message:
        support.check_supported(config)
        return
    with pytest.raises(ConfigError, match=f"^{message}"):
        support.check_supported(config)


def test_runner_v2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both roles; the variable is named, since there is no flag. vLLM itself refuses V2 without Triton."""
    config = resolved()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    for role in (PREFILL, DECODE):
        with pytest.raises(ConfigError, match=r"^VLLM_USE_V2_MODEL_RUNNER: .* not served; give 0"):
            role.check_config(config)


def test_kinds_are_those_of_vllm() -> None:
    """A renamed property would otherwise be found by the first such model only."""
    model = resolved().model_config
    for kind in ("is_multimodal_model", "is_hybrid", "has_inner_state", "is_attention_free"):
        assert getattr(model, kind) is False
    assert not model.is_encoder_decoder
    assert model.runner_type == "generate"


@pytest.mark.parametrize("role", [PREFILL, DECODE], ids=lambda role: role.name)
@pytest.mark.parametrize("method", ["draft_model", "ngram", "medusa", "mlp_speculator", "suffix", "dflash"])
def test_method_given_by_name_is_refused_before_vllm_resolves_it(role: Role, method: str) -> None:
    """vLLM would want a draft model or another package first."""
    args = AsyncEngineArgs(model=str(PICO), speculative_config={"method": method})
    with pytest.raises(ConfigError, match=f"method '{method}' is not served; give one of mtp, eagle, eagle3"):
        role.apply_flags(args, role.config())


def request(**fields: Any) -> EngineCoreRequest:
    values = {
        "request_id": "r",
        "prompt_token_ids": [1],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(values | fields))


LORA = LoRARequest("adapter", 1, "/adapter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_embeds", torch.zeros(2, 4)),
        ("mm_features", [object()]),
        ("lora_request", LORA),
        ("pooling_params", PoolingParams()),
        ("resumable", True),
    ],
)
def test_node_refuses_a_field_by_its_name(field: str, value: Any) -> None:
    """Both roles, whatever else is wrong with the request; the error is the client's, not a wrong leg."""
    for role in (PREFILL, DECODE):
        with pytest.raises(InvalidRequestError, match="not served") as raised:
            role.check_request(request(**{field: value}))
        assert type(raised.value) is InvalidRequestError
        assert raised.value.param == field


def test_plain_request_has_no_refused_field() -> None:
    """An empty list of features is none."""
    support.check_request(request())
    support.check_request(request(mm_features=[]))


async def _stream() -> AsyncGenerator[str, None]:
    yield "a"


@pytest.mark.parametrize(
    ("field", "prompt", "params", "lora"),
    [
        ("pooling_params", "a", PoolingParams(), None),
        ("lora_request", "a", SamplingParams(), LORA),
        ("resumable", _stream(), SamplingParams(), None),
        ("prompt_embeds", {"type": "embeds"}, SamplingParams(), None),
        ("prompt_embeds", {"prompt_embeds": torch.zeros(2, 4)}, SamplingParams(), None),
        ("mm_features", {"type": "multimodal"}, SamplingParams(), None),
        ("mm_features", {"prompt": "a", "multi_modal_data": {"image": 1}}, SamplingParams(), None),
        ("resumable", request(resumable=True), SamplingParams(), None),
    ],
)
def test_proxy_refuses_what_would_become_that_field(field: str, prompt: Any, params: Any, lora: Any) -> None:
    """The field is named, in the words that a node would use."""
    with pytest.raises(InvalidRequestError) as raised:
        refusals.check(prompt, params, lora)
    assert raised.value.param == field
    assert str(raised.value) == support.REQUEST_FIELDS[field]


async def test_front_end_answers_400_before_it_registers_a_request() -> None:
    """In vLLM's own error class, so that the body is that of any bad value; the front end is not touched."""
    untouched: Any = None
    with pytest.raises(VLLMValidationError, match="Prompts of embeddings are not served") as raised:
        await FrontEnd.add_request(untouched, "r", {"type": "embeds"}, SamplingParams())
    assert raised.value.parameter == "prompt_embeds"


@pytest.mark.parametrize(
    "argv", [["--enable-lora"], ["--lora-modules", "a=/adapter"], ["--enable-prompt-embeds"]]
)
def test_proxy_does_not_start_with_a_flag_of_what_is_refused(argv: list[str]) -> None:
    """It would offer what no node serves."""
    with pytest.raises(ConfigError, match=f"{argv[0]}: .*not served; remove it"):
        arguments.load(["--prefill", "p:1", "--decode", "d:1", *argv])


@pytest.mark.parametrize("prompt", ["a", {"type": "token", "prompt_token_ids": [1]}, {"prompt": "a"}])
def test_proxy_takes_text_and_tokens(prompt: Any) -> None:
    """What the generation routes send."""
    refusals.check(prompt, SamplingParams(), None)


def test_types_of_inputs_are_those_of_vllm() -> None:
    """The names by which the proxy tells prompts apart."""
    names = [kind.__annotations__["type"] for kind in (EmbedsInput, MultiModalInput, TokensInput)]
    assert [get_args(name)[0] for name in names] == ["embeds", "multimodal", "token"]


@pytest.mark.parametrize(
    ("field", "prefill", "decode"),
    [
        ("num_speculative_tokens", 1, 2),
        ("speculative_method", "mtp", "eagle"),
        ("speculative_config", '{"model": "a"}', '{"model": "b"}'),
    ],
)
def test_proxy_pairs_no_nodes_of_another_drafter_or_k(field: str, prefill: object, decode: object) -> None:
    """Neither is used; the reason names the field and both values."""
    cluster = Cluster(["p"], ["d"])
    cluster.up(node("prefill", "p", **{field: prefill}))
    cluster.up(node("decode", "d", **{field: decode}))
    assert cluster.pair() is None
    assert f"{field} is {prefill!r}, but {decode!r} on decode node d" in cluster.not_ready_because()


def rows(heading: str) -> set[str]:
    """First cells of the table under a heading of docs/support.md."""
    section = (ROOT / "docs" / "support.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1].strip().strip("`") for line in section.splitlines() if line.startswith("|")]
    return set(cells[2:])


def test_page_has_a_row_for_each_refusal() -> None:
    """And no row for what is not refused. Pipeline parallelism is decode's own refusal (limits.py)."""
    assert rows("Refused at start-up") == set(support.FEATURES) | {"pipeline parallelism on decode"}
    assert rows("Refused in a request") == set(support.REQUEST_FIELDS)
    served = (ROOT / "docs" / "support.md").read_text().split("## Served")[1].split("## Refused")[0]
    assert all(method in served for method in support.SERVED_METHODS)
