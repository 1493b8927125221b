"""A converted model is the one that was in the GGUF file: the same logits, and its tokenizer's rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.cli.gguf_for_tests import f32, write_gguf

from lockstep.cli.smollm2.convert import convert

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS, CONTEXT = 4, 2, 32, 48, 2, 64
TOKENS = ["<|end|>", "<|start|>", *"0123456789abcde", "Ġ", "ab", "Ġa", "12"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """As llama.cpp's converter does to q and k: row i of a head's first half, then row i of its second."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def original() -> Any:
    """A Llama with random weights that bfloat16 holds exactly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def converted(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory made of the original's GGUF file."""
    tensors = {}
    for name, parameter in original.state_dict().items():
        weight = parameter.numpy()
        if name == "lm_head.weight":
            continue
        path = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if path[0] != "layers":
            tensors[{"embed_tokens": "token_embd", "norm": "output_norm"}[path[0]] + ".weight"] = f32(weight)
            continue
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(path[2])
        tensors[f"blk.{path[1]}.{PARTS[path[2]]}.weight"] = f32(permute(weight, heads) if heads else weight)
    directory = tmp_path_factory.mktemp("model")
    write_gguf(directory / "m.gguf", METADATA, tensors)
    steps: list[tuple[int, int]] = []
    convert(directory / "m.gguf", directory, lambda done, total: steps.append((done, total)))
    assert steps == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]
    return directory


def test_the_same_logits(original: Any, converted: Path) -> None:
    """Every weight is in its place, the rows of q and k in transformers' order."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    tokens = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        expected, actual = original(tokens).logits, model(tokens).logits
    assert np.allclose(actual, expected, atol=1e-5)
    assert float(expected.std()) > 0.1  # not all zero


def test_the_tokenizer(converted: Path) -> None:
    """Merges apply, digits stay single although "1 2" is a merge, control tokens are found in text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer("<|start|>ab a12")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|start|>", "ab", "Ġa", "1", "2"]
    assert tokenizer.decode(ids) == "<|start|>ab a12"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|start|>",
        "<|end|>",
        "<|end|>",
    )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|start|>ab<|end|>"


def test_generation_ends_at_the_files_token(converted: Path) -> None:
    """vLLM takes the end of an answer from here."""
    assert json.loads((converted / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
