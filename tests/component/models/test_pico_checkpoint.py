"""vLLM loads a checkpoint that models/pico wrote, and continues as the network it was written from."""

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from component.models.offline import continued_by_vllm

PICO = Path(__file__).resolve().parents[3] / "models" / "pico"
DEADLINE_S = 280
COUNT = 48
PROMPTS = [
    "def add(a, b):\n",
    "import os\n\nclass Foo:\n",
    "<|user|>What does the function dump do?<|assistant|>",
    "for i in range(10):\n    print(",
]

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 120)]


@torch.no_grad()
def continued(model: Any, prompt: list[int]) -> list[int]:
    """The network's own greedy continuation, each token from the whole sequence."""
    tokens = torch.tensor([prompt])
    for _ in range(COUNT):
        tokens = torch.cat([tokens, model.logits(model.states(tokens)[:, -1:]).argmax(-1)], dim=1)
    return list(tokens[0, len(prompt) :].tolist())


def test_vllm_continues_a_fresh_checkpoint_token_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three more steps of training from the committed weights, written, loaded by vLLM with K = 2: every
    token is the network's own, and most first drafts are accepted, so the MTP layer is the trained one too.
    """
    monkeypatch.syspath_prepend(str(PICO))
    checkpoint, data, train = (importlib.import_module(n) for n in ("pico_checkpoint", "pico_data", "train"))
    torch.set_num_threads(1)
    tokenizer = train.Tokenizer.from_file(str(PICO / "tokenizer.json"))
    source = Path(argparse.__file__).read_text()
    stream = data.tokens([source], tokenizer, at_most=20_000)
    recipe = train.Recipe(
        steps=3, batch_tokens=512, long_window=512, bf16=False, muon_lr=1e-3, adamw_lr=1e-4, balance_rate=1e-3
    )
    trained = checkpoint.load(PICO)
    train.train(trained, stream, stream, recipe, lambda line: None)
    checkpoint.save(trained, PICO, tmp_path)

    model = checkpoint.load(tmp_path)  # as stored: rounded to bf16
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    (answer,) = continued_by_vllm(tmp_path, [speculation], COUNT, prompts, DEADLINE_S)
    assert answer["token_ids"] == [continued(model, prompt) for prompt in prompts]
    assert not torch.equal(model.lm_head.weight, checkpoint.load(PICO).lm_head.weight)
    drafts, accepted = (
        answer["counters"][f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
    )
    assert accepted / drafts > 0.6, (accepted, drafts)
