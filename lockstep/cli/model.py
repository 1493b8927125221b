"""Finds the model that `lockstep up` serves and the name it is served under."""

import json
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.errors import ConfigError

MTP_DRAFT_TOKENS = 2
"""Of a model with MTP layers, unless told otherwise."""

_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""How config.json says that there are MTP layers, by family of models (vLLM config/speculative.py)."""

PICO = Path("models") / "pico"

CHECKOUT = Path(lockstep.__file__).parent.parent
"""Where models/ is when the package is installed editable."""


@dataclass(frozen=True, slots=True)
class Model:
    """`path` is an absolute directory or a hub id, as vLLM's positional argument takes it."""

    path: str
    served_name: str
    local: bool

    def default_draft_tokens(self) -> int:
        """K for a model that is here and has MTP layers, else 0: of a hub id nothing is known yet."""
        if not self.local:
            return 0
        config = json.loads((Path(self.path) / "config.json").read_text())
        config = config.get("text_config") or config
        return MTP_DRAFT_TOKENS if any(config.get(key) for key in _MTP_LAYERS) else 0


def resolve_model(given: str | None, served_name: str | None, checkout: Path = CHECKOUT) -> Model:
    """The model asked for, models/pico of the checkout when none was; raises ConfigError if it is not there.

    A local directory is served under its own name, a hub id under the whole id, as vLLM does.
    """
    if given is None:
        directory = _find_pico(checkout)
    elif (directory := Path(given)).is_dir():
        directory = directory.resolve()
    elif given.startswith((".", "/", "~")) or given.count("/") > 1:
        raise ConfigError(f"model directory {given} does not exist")
    else:
        return Model(path=given, served_name=served_name or given, local=False)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is no model directory: it has no config.json")
    return Model(path=str(directory), served_name=served_name or directory.name, local=True)


def _find_pico(checkout: Path) -> Path:
    places = (checkout / PICO, Path.cwd() / PICO)
    for place in places:
        if place.is_dir():
            return place.resolve()
    raise ConfigError(
        f"{PICO} is not here: it is part of the repository, not of the installed package. "
        "Run from a checkout or name a model: lockstep up MODEL"
    )
