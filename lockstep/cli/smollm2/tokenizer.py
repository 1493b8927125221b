"""Makes the tokenizer files of a Hugging Face directory from a GGUF file's metadata."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

_CONTROL = 3
"""GGUF's type of a token that text never contains."""


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """tokenizer.json, and tokenizer_config.json with the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    # "smollm" in GGUF's metadata: each digit is a token of its own.
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""transformers' names, and GGUF's."""
