"""Turns a Llama model in a GGUF file into a Hugging Face directory that vLLM loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.cli.smollm2.gguf import GGUFError, GGUFFile
from lockstep.cli.smollm2.tokenizer import write_tokenizer

_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_THE_MODEL = {"token_embd": "embed_tokens", "output_norm": "norm"}


def convert(gguf: Path, directory: Path, advance: Callable[[int, int], None]) -> None:
    """Write model.safetensors (bfloat16), config.json, generation_config.json and the tokenizer.

    `advance(done, total)` is called after each tensor. Raises GGUFError for a file of another kind of model.
    """
    with GGUFFile(gguf) as file:
        architecture = file.metadata.get("general.architecture")
        if architecture != "llama":
            raise GGUFError(f"{gguf} holds a {architecture} model, not a Llama one")
        heads = {
            "attn_q": file.metadata["llama.attention.head_count"],
            "attn_k": file.metadata["llama.attention.head_count_kv"],
        }
        tensors: dict[str, NDArray[np.uint16]] = {}
        for done, (name, values) in enumerate(file.tensors(), start=1):
            part = name.removesuffix(".weight").rpartition(".")[2]
            if part in heads:
                values = unpermute(values, heads[part])
            tensors[hugging_face_name(name)] = bfloat16(values)
            advance(done, len(file))
        write_safetensors(tensors, directory / "model.safetensors")
        _write(directory / "config.json", model_config(file.metadata))
        generation = {"bos_token_id": _id(file, "bos"), "eos_token_id": _id(file, "eos")}
        _write(directory / "generation_config.json", generation)
        write_tokenizer(file.metadata, directory)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM; its output layer is the embedding, the file has no other."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the order of a q or k projection's rows that llama.cpp's converter makes for its rotary embedding.

    It takes the two halves of each head, which transformers rotates against each other, as pairs of
    neighbours (convert_hf_to_gguf.py, LlamaModel.permute).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; NumPy has no such type."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2")


def write_safetensors(tensors: dict[str, NDArray[np.uint16]], path: Path) -> None:
    """Bits of bfloat16 as a safetensors file: the length of a JSON header, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        offsets = [offset, offset := offset + bits.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.tobytes())


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; GGUFError for an unknown one."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in _OF_THE_MODEL:
        return f"model.{_OF_THE_MODEL[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _OF_A_LAYER:
        return f"model.layers.{parts[1]}.{_OF_A_LAYER[parts[2]]}.weight"
    raise GGUFError(f"tensor {name} has no place in a Llama model with tied embeddings")


def _id(file: GGUFFile, name: str) -> int:
    return int(file.metadata[f"tokenizer.ggml.{name}_token_id"])


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
