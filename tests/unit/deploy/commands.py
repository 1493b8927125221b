"""Reads a container's command line as the service itself does, so that a renamed flag is found."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unit.deploy.rendered import ROOT

from decode_node.service import ROLE as DECODE
from lockstep.config import ServiceConfig
from lockstep.node import arguments as node_arguments
from prefill_node.service import ROLE as PREFILL
from proxy import arguments as proxy_arguments

_MODELS_OF_THE_IMAGE = "/opt/lockstep/"


def expand(argument: str, values: Mapping[str, str]) -> str:
    """What Kubernetes makes of $(NAME), compose of ${NAME:-default} and ${NAME:?text}, a shell of $NAME."""
    argument = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument)
    argument = re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda found: values.get(found[1], found[2]), argument)
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], argument)


def read(role: str, argv: Sequence[str]) -> tuple[ServiceConfig, Any]:
    """The service's configuration, and what vLLM's parser made of the rest; exits or raises if refused."""
    # What the image carries is in the checkout.
    argv = [argument.replace(_MODELS_OF_THE_IMAGE, f"{ROOT}/") for argument in argv]
    if role == "proxy":
        return proxy_arguments.load(argv)
    return node_arguments.load({"prefill": PREFILL, "decode": DECODE}[role], argv)
