"""What Lockstep refuses by name: features of a node's configuration at start-up, and fields of a request.

docs/support.md has a row for each entry of both tables; a unit test compares them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import get_args

from vllm.config import VllmConfig
from vllm.config.speculative import MTPModelTypes
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.engine import EngineCoreRequest

from lockstep.errors import ConfigError, InvalidRequestError

SERVED_METHODS = ("mtp", "eagle", "eagle3")
"""Drafters that run on the target's hidden states; vLLM resolves every `*_mtp` name to "mtp"."""


def check_flags(args: AsyncEngineArgs) -> None:
    """Refuse a method that was given by name before vLLM resolves it: for some it wants further packages."""
    method = (args.speculative_config or {}).get("method")
    if method is not None and method not in SERVED_METHODS and method not in get_args(MTPModelTypes):
        raise ConfigError(_method_refused(method))


def check_supported(vllm_config: VllmConfig) -> None:
    """Look at what vLLM resolved; raises ConfigError for the first feature that is not served.

    The message names the flag and what works instead. Both roles are held to it: they run the same drafter.
    """
    for refuses in FEATURES.values():
        message = refuses(vllm_config)
        if message:
            raise ConfigError(message)


def check_request(request: EngineCoreRequest) -> None:
    """Raises InvalidRequestError naming the first field that is not served."""
    for field, why in REQUEST_FIELDS.items():
        # Absent is None, False or an empty list; a tensor has no truth value.
        value = getattr(request, field)
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise InvalidRequestError(why, field)


def _multi_module_mtp(vllm_config: VllmConfig) -> str:
    """NIXL would hold back prompt tokens on prefill (nixl/base_scheduler.py:379).

    vLLM's own test reads `num_nextn_predict_layers` (config/speculative.py:1982); some models have their
    number of modules under another name, which vLLM resolves to `n_predict`.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp" or speculative.draft_model_config is None:
        return ""
    draft = speculative.draft_model_config.hf_config
    modules = max(getattr(draft, name, None) or 1 for name in ("num_nextn_predict_layers", "n_predict"))
    if min(modules, speculative.num_speculative_tokens) <= 1:
        return ""
    return (
        f"--speculative-config: the model has {modules} MTP modules, and multi-module MTP is not served; "
        "give num_speculative_tokens 1, or a model with one MTP module"
    )


def _dynamic(vllm_config: VllmConfig) -> str:
    """K, and with it the width of a row, would follow the batch size; arrivals would get no padding."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens_per_batch_size is None:
        return ""
    return (
        "--speculative-config: num_speculative_tokens_per_batch_size (dynamic speculative decoding) is not "
        "served; give one num_speculative_tokens"
    )


def _parallel_drafting(vllm_config: VllmConfig) -> str:
    """All drafts would come from one pass over K mask tokens, which write KV that the push does not know."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.parallel_drafting:
        return ""
    return (
        "--speculative-config: parallel_drafting is not served; leave it out, and give a head made without it"
    )


def _eagle3_target(vllm_config: VllmConfig) -> str:
    """vLLM finds out when a worker has loaded the weights (gpu_model_runner.py:5234), and names no flag."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "eagle3":
        return ""
    target = get_model_cls(vllm_config.model_config)
    if supports_eagle3(target):
        return ""
    return (
        f"--speculative-config: eagle3 needs the inner hidden states of the model, which vLLM's "
        f"{target.__name__} does not give; add --model-impl transformers on both roles, "
        "or give method 'eagle'"
    )


def _method(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in SERVED_METHODS:
        return ""
    return _method_refused(speculative.method)


def _method_refused(method: str) -> str:
    served = ", ".join(SERVED_METHODS)
    return f"--speculative-config: method {method!r} is not served; give one of {served}, or none"


def _lora(vllm_config: VllmConfig) -> str:
    if vllm_config.lora_config is None:
        return ""
    return "--enable-lora: LoRA adapters are not served; merge the adapter into the model, remove this flag"


def _multimodal(vllm_config: VllmConfig) -> str:
    if not vllm_config.model_config.is_multimodal_model:
        return ""
    return "MODEL: multimodal models are not served; give a model of text only"


def _state_space(vllm_config: VllmConfig) -> str:
    """Their state is not in blocks: it exists for the end of the prompt only, and is held back by a token."""
    model = vllm_config.model_config
    if not (model.is_hybrid or model.has_inner_state or model.is_attention_free):
        return ""
    return "MODEL: Mamba, hybrid and other state-space models are not served; give one of attention only"


def _encoder_decoder(vllm_config: VllmConfig) -> str:
    if not vllm_config.model_config.is_encoder_decoder:
        return ""
    return "MODEL: encoder-decoder models are not served; give a decoder-only model"


def _pooling(vllm_config: VllmConfig) -> str:
    if vllm_config.model_config.runner_type == "generate":
        return ""
    return "--runner: pooling models are not served; give a model that generates, with --runner generate"


def _prompt_embeds(vllm_config: VllmConfig) -> str:
    if not vllm_config.model_config.enable_prompt_embeds:
        return ""
    return "--enable-prompt-embeds: prompts of embeddings are not served; use text or tokens, without it"


def _runner_v2(vllm_config: VllmConfig) -> str:
    """Carried tokens, the records of steps and the node's own checks are built for V1; V2 was never run."""
    if not vllm_config.use_v2_model_runner:
        return ""
    return "VLLM_USE_V2_MODEL_RUNNER: model runner V2 is not served; give 0, or leave it out"


FEATURES: Mapping[str, Callable[[VllmConfig], str]] = MappingProxyType(
    {
        "multi-module MTP": _multi_module_mtp,
        "dynamic speculative decoding": _dynamic,
        "other speculative methods": _method,
        "parallel drafting": _parallel_drafting,
        "EAGLE-3 on a model that does not give its inner states": _eagle3_target,
        "LoRA": _lora,
        "multimodal models": _multimodal,
        "Mamba, hybrid and state-space models": _state_space,
        "encoder-decoder models": _encoder_decoder,
        "pooling models": _pooling,
        "prompt embeddings": _prompt_embeds,
        "model runner V2": _runner_v2,
    }
)
"""By the name that docs/support.md has: the reason why a configuration is refused, "" when it is not."""

REQUEST_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "prompt_embeds": "Prompts of embeddings are not served; send text or token ids.",
        "mm_features": "Multimodal content is not served; send text only.",
        "lora_request": "LoRA adapters are not served; name the base model.",
        "pooling_params": "Pooling and embedding are not served; use a generation route.",
        "resumable": "Streaming input is not served; send the whole prompt at once.",
    }
)
"""Fields of EngineCoreRequest that must be empty, with what the client is told."""
