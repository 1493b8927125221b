"""Reads and writes the checkpoint directory of a draft head, for vLLM's methods "eagle" and "eagle3"."""

import json
from pathlib import Path
from typing import Any

import torch
from pico_config import PicoConfig, read_config
from pico_eagle import AUX_LAYERS, HEADS, Head
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def load(directory: Path, method: str, target: Path) -> Head:
    """The head in float32; `target` is pico's directory, whose sizes it has."""
    head = HEADS[method](read_config(target / "config.json"))
    head.load_state_dict(load_file(directory / WEIGHTS))
    return head.float().eval()


def save(head: Head, method: str, target: Path, directory: Path) -> None:
    """Write weights in bf16 and the configuration; no tokenizer, vLLM takes the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = configuration(method, read_config(target / "config.json"))
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def configuration(method: str, pico: PicoConfig) -> dict[str, Any]:
    """A Llama of one layer; vLLM puts "Eagle" or "Eagle3" before the architecture's name.

    Heads and head size are pico's: the head's KV has the layout of pico's layers and is moved with theirs.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": pico.vocab_size,
        "hidden_size": pico.hidden_size,
        "intermediate_size": pico.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": pico.num_attention_heads,
        "num_key_value_heads": pico.num_key_value_heads,
        "head_dim": pico.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": pico.rms_norm_eps,
        "max_position_embeddings": 4096,
        "rope_theta": pico.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if method == "eagle3":
        config |= {"draft_vocab_size": pico.vocab_size, "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}
    return config
