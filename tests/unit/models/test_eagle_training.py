"""The draft heads: training lowers the loss, a row sees nothing after it, the files are what vLLM reads."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pico_reference import PICO, network, script
from safetensors import safe_open
from tokenizers import Tokenizer

METHODS = ["eagle", "eagle3"]
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    x: int\n" * 60


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that spin for each other slow this down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def committed(method: str) -> Path:
    return PICO.with_name(f"pico_{method}")


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_pico_stays(method: str) -> None:
    """In three steps on a little text; pico's own weights are not touched."""
    torch.manual_seed(0)
    config = script("pico_config").read_config(PICO / "config.json")
    small = dataclasses.replace(
        config, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, head_dim=8
    )
    target = script("pico_model").Pico(small)
    head = script("pico_eagle").HEADS[method](small)
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    stream = script("pico_data").tokens([TEXT], tokenizer, at_most=4000)
    train_eagle = script("train_eagle")
    before = [parameter.clone() for parameter in target.parameters()]
    target.lm_head.weight.data.normal_(std=0.5)  # a target that prefers some tokens
    before[-1] = target.lm_head.weight.clone()

    @torch.no_grad()
    def loss() -> float:
        generator = torch.Generator().manual_seed(1)
        return float(train_eagle.loss(head, target, stream[None, :256], generator))

    first = loss()
    recipe = script("train").Recipe(steps=3, batch_tokens=256, window=64, long_window=128, bf16=False)
    lines: list[str] = []
    train_eagle.train(head, target, stream, stream, recipe, lines.append, warm_start_tokens=2048)
    assert loss() < first
    assert sum(line.startswith("held-out agreement") for line in lines) == 3
    assert all(map(torch.equal, before, target.parameters()))


@pytest.mark.parametrize("method", METHODS)
def test_a_row_sees_nothing_after_its_token(method: str) -> None:
    """Another last token leaves every row of every draft step as it was, but for the one that takes it."""
    head = script("pico_eagle_checkpoint").load(committed(method), method, PICO)
    states = script("pico_eagle").target_states
    tokens = torch.arange(40, 72)[None]
    other = torch.cat([tokens[:, :-1], tokens[:, :1]], dim=1)
    with torch.no_grad():
        steps, others = (head.drafts(network(), t, states(network(), t)) for t in (tokens, other))
    for step, changed in zip(steps, others, strict=True):
        assert torch.allclose(step[:, :-1], changed[:, :-1], atol=1e-5)
        assert not torch.allclose(step[:, -1], changed[:, -1], atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_written_files_are_like_the_committed_ones(method: str, tmp_path: Path) -> None:
    """Same tensor names, types and shapes, and the same configuration; none has pico's embedding or head."""
    config = script("pico_config").read_config(PICO / "config.json")
    head = script("pico_eagle").HEADS[method](config)
    script("pico_eagle_checkpoint").save(head, method, PICO, tmp_path)
    tensors = stored(tmp_path / "model.safetensors")
    assert tensors == stored(committed(method) / "model.safetensors")
    assert (tmp_path / "config.json").read_bytes() == (committed(method) / "config.json").read_bytes()
    assert not [name for name in tensors if "embed_tokens" in name or "lm_head" in name]


def test_eagle3_names_the_layers_it_was_trained_on() -> None:
    """vLLM takes three default layers otherwise, of which pico has only two different ones."""
    config = json.loads((committed("eagle3") / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]


@pytest.mark.parametrize(("method", "least"), [("eagle", 0.45), ("eagle3", 0.3)])
def test_committed_head_agrees_with_pico(method: str, least: float) -> None:
    """On such text each draft step often has pico's first choice; from the last token alone .17 is had."""
    head = script("pico_eagle_checkpoint").load(committed(method), method, PICO)
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    source = Path(dataclasses.__file__).read_text()
    stream = script("pico_data").tokens([source], tokenizer, at_most=1024)
    shares = script("train_eagle").agreement(head, network(), stream, window=512, windows=2)
    assert min(shares) > least
