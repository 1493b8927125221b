"""The part of config.json that shapes the network."""

import json
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PicoConfig:
    """The fields of config.json that shape the network; the names are Hugging Face's (glm4_moe)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    initializer_range: float


def read_config(path: Path) -> PicoConfig:
    """Raises KeyError for a field that is not there, ValueError for a variant that this network is not."""
    values = json.loads(path.read_text())
    built = {
        "use_qk_norm": True,
        "attention_bias": False,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    }
    for name, value in built.items():
        if values[name] != value:
            raise ValueError(f"{path.name}: {name} is {values[name]!r}, this network has {value!r}")
    return PicoConfig(**{field.name: values[field.name] for field in fields(PicoConfig)})
