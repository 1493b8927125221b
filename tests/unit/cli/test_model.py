"""Which model `lockstep up` serves, and under which name."""

import json
from pathlib import Path

import pytest

from lockstep.cli.model import resolve_model
from lockstep.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_local_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is passed on as an absolute path and served under its name."""
    monkeypatch.chdir(directory.parent)
    model = resolve_model("tiny", None)
    assert (model.path, model.served_name, model.local) == (str(directory), "tiny", True)


def test_served_name_is_kept(directory: Path) -> None:
    """--served-model-name wins over the directory's name."""
    assert resolve_model(str(directory), "mine").served_name == "mine"


def test_hub_id() -> None:
    """What is no directory and looks like a hub id goes to vLLM as it is."""
    model = resolve_model("org/model", None)
    assert (model.path, model.served_name, model.local) == ("org/model", "org/model", False)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "some/deep/path"])
def test_missing_directory(path: str) -> None:
    """A path that is not there is refused at once and not looked up in a hub."""
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(path, None)


def test_directory_without_config(tmp_path: Path) -> None:
    """A directory that holds no model is refused by name."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path), None)


def test_pico_from_the_working_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no model given, models/pico of the working directory is served if the package has no checkout."""
    (tmp_path / "models").mkdir()
    directory.rename(tmp_path / "models" / "pico")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(None, None, checkout=tmp_path / "site-packages").path == str(
        tmp_path / "models" / "pico"
    )


def test_pico_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout the message says what to do instead."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="lockstep up MODEL"):
        resolve_model(None, None, checkout=tmp_path / "site-packages")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 1}, 2),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 2),
    ],
)
def test_draft_tokens_follow_from_the_model(tmp_path: Path, config: dict[str, object], tokens: int) -> None:
    """Two where its configuration says that there is an MTP layer, none where it would not start."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_model(str(tmp_path), None).default_draft_tokens() == tokens


def test_nothing_is_drafted_for_an_unknown_model() -> None:
    """Of a hub id nothing is known before it is loaded."""
    assert resolve_model("some/model", None).default_draft_tokens() == 0
