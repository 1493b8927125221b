"""Training pico in small: the loss falls, and what is written has the names and types that vLLM reads."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

PICO = Path(__file__).resolve().parents[3] / "models" / "pico"
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    x: int\n" * 60


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """models/pico is a folder of scripts, not a package; threads that spin for each other slow this down."""
    monkeypatch.syspath_prepend(str(PICO))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def module(name: str) -> Any:
    return importlib.import_module(name)


def small() -> Any:
    """pico's shape in every kind of layer, at a tenth of its size."""
    config = module("pico_config").read_config(PICO / "config.json")
    return dataclasses.replace(
        config,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        head_dim=8,
        num_hidden_layers=2,
    )


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def test_loss_falls_in_three_steps() -> None:
    """Trunk and drafts; the line of each step and the held-out lines are reported."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    stream = module("pico_data").tokens([TEXT], tokenizer, at_most=4000)
    train = module("train")
    recipe = train.Recipe(steps=3, batch_tokens=256, window=64, long_window=128, bf16=False)
    model = module("pico_model").Pico(small())
    before = train.evaluate(model, stream, window=128, windows=2)
    lines: list[str] = []
    train.train(model, stream, stream, recipe, lines.append)
    after = train.evaluate(model, stream, window=128, windows=2)
    assert before.loss == pytest.approx(7.62, abs=0.1)  # ln 2048: it knows nothing
    assert after.loss < before.loss - 0.5
    assert [line.split(" loss ")[0] for line in lines if line.startswith("step")] == [
        "step 1/3 window 64",
        "step 2/3 window 64",
        "step 3/3 window 64",
    ]
    assert sum(line.startswith("held-out loss") for line in lines) == 3


def test_written_checkpoint_is_like_the_committed_one(tmp_path: Path) -> None:
    """Same tensor names, types and shapes, and the files beside them; the router alone is float32."""
    checkpoint = module("pico_checkpoint")
    model = module("pico_model").Pico(module("pico_config").read_config(PICO / "config.json"))
    checkpoint.save(model, PICO, tmp_path)
    assert stored(tmp_path / "model.safetensors") == stored(PICO / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", *checkpoint.COPIED}
    assert (tmp_path / "config.json").read_bytes() == (PICO / "config.json").read_bytes()


def test_committed_weights_know_their_text() -> None:
    """The network is the one that the weights were trained in: 2.3 nats a token on such text, and draft steps
    that agree with the trunk; any other wiring (norms, rotary, order of the MTP inputs) is far off.
    """
    model = module("pico_checkpoint").load(PICO)
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    source = Path(dataclasses.__file__).read_text()
    stream = module("pico_data").tokens([source], tokenizer, at_most=1025)
    held = module("train").evaluate(model, stream, window=512, windows=2)
    assert held.loss < 2.6
    assert min(held.agreement) > 0.6


def test_long_windows_come_last() -> None:
    """The last 15 % of the steps, whatever their number; the learning rate goes up, then down."""
    recipe = module("train").Recipe(steps=100)
    windows = [recipe.window_at(step) for step in range(100)]
    assert windows == [256] * 85 + [1024] * 15
    factors = [recipe.lr_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 3)
    assert max(factors) == factors[3] == 1.0
    assert factors[40:] == sorted(factors[40:], reverse=True)
    assert factors[-1] == 0.05


def test_orthogonal_update_keeps_directions() -> None:
    """All singular values come near 1, also of a tall matrix; the singular vectors stay."""
    torch.manual_seed(0)
    for shape in ((3, 16, 8), (3, 8, 16)):
        matrices = torch.randn(shape)
        result = module("pico_muon").orthogonal(matrices)
        assert result.shape == shape
        values = torch.linalg.svdvals(result)
        assert 0.5 < values.min() < values.max() < 1.3
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        nearest = u @ v
        cosine = (result * nearest).sum((1, 2)) / (result.norm(dim=(1, 2)) * nearest.norm(dim=(1, 2)))
        assert cosine.min() > 0.95


def test_balancing_lifts_the_idle_expert() -> None:
    """Its bias rises by the rate, the busy one's falls, and the count starts anew."""
    gate = module("pico_layers").Gate(small())
    gate.load += torch.tensor([0.0, 30.0] + [10.0] * 6)
    gate.balance(0.5)
    assert gate.e_score_correction_bias[:2].tolist() == [0.5, -0.5]
    assert gate.load.sum() == 0


def test_chat_pairs_are_made_of_docstrings() -> None:
    """In the chat template's form; a function without a docstring makes none."""
    source = 'def f(x):\n    """Double it.\n\n    More."""\n    return 2 * x\n\n\ndef g():\n    pass\n'
    assert list(module("pico_data").chat_pairs(source)) == [
        "<|user|>What does the function f do?<|assistant|>Double it.<|eos|>",
        "<|user|>Write a Python function f: Double it.<|assistant|>"
        'def f(x):\n    """Double it.\n\n    More."""\n    return 2 * x<|eos|>',
    ]
