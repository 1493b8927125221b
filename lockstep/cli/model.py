"""Finds the model that `lockstep up` serves and the name it is served under."""

from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.errors import ConfigError

PICO = Path("models") / "pico"

CHECKOUT = Path(lockstep.__file__).parent.parent
"""Where models/ is when the package is installed editable."""


@dataclass(frozen=True, slots=True)
class Model:
    """`path` is an absolute directory or a hub id, as vLLM's positional argument takes it."""

    path: str
    served_name: str
    local: bool


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
