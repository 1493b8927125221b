"""Reads and writes a checkpoint directory that vLLM and transformers load."""

import shutil
from pathlib import Path

import torch
from pico_config import read_config
from pico_model import Pico
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def load(directory: Path) -> Pico:
    """The network in float32; raises RuntimeError when the tensors' names are not exactly its own."""
    model = Pico(read_config(directory / "config.json"))
    model.load_state_dict(load_file(directory / WEIGHTS))
    return model.float().eval()


def save(model: Pico, source: Path, directory: Path) -> None:
    """Write the weights beside `source`'s configuration and tokenizer, the router in fp32, all else bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(name, tensor) for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    for name in COPIED:
        if (source / name).resolve() != (directory / name).resolve():
            shutil.copyfile(source / name, directory / name)


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if ".mlp.gate." in name else torch.bfloat16
    return tensor.detach().to(dtype).contiguous()
