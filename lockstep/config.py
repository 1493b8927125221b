"""Service configuration: frozen, validated at load, from flags over environment over defaults.

A service declares one `ServiceConfig` subclass. Each field is a flag (`--side-channel-port`; of a bool, one
without a value) and an environment variable (`LOCKSTEP_SIDE_CHANNEL_PORT`). Secrets are variables only: every
user of a machine can read command lines. What the flags leave over goes to vLLM's own parser. One environment
serves all services: each reads its own variables out of it, and one that no service knows is refused.
"""

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from lockstep.errors import ConfigError

ENV_PREFIX = "LOCKSTEP_"

SHARED_ENVIRONMENT = frozenset(
    {"LOCKSTEP_CPU_PLATFORM", "LOCKSTEP_CPU_CORES", "LOCKSTEP_STATE_DIR", "LOCKSTEP_KEY_FILE"}
)
"""Variables that are no field of a service: the CPU platform plugin and the `lockstep` command read them."""

_CONFIG_MODULES = (
    "lockstep.node.config",
    "lockstep.sim.config",
    "prefill_node.config",
    "decode_node.config",
    "proxy.config",
)
"""Where the services declare their fields, by name: nothing here depends on a service, and none of them is
loaded by this beyond the module of its flags."""


class ServiceConfig(BaseSettings):
    """Base of the services' configuration; instances are frozen and handed down, never global."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", cli_parse_args=False, env_ignore_empty=True
    )

    @classmethod
    def load(cls, argv: Sequence[str], prog: str, description: str) -> tuple[Self, list[str]]:
        """Read the configuration and return it with the arguments that are not ours.

        Raises ConfigError for a bad value, and for a LOCKSTEP_ variable that no service reads.
        """
        given, rest = cls.parser(prog, description).parse_known_args(argv)
        _refuse_unknown(os.environ)
        try:
            return cls(**vars(given)), rest
        except ValidationError as error:
            raise ConfigError(cls._explain(error)) from error

    @classmethod
    def parser(cls, prog: str, description: str) -> argparse.ArgumentParser:
        """The parser of this service's own flags; flags that were not given are absent from its result."""
        parser = argparse.ArgumentParser(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        group = parser.add_argument_group("Lockstep")
        for name, field in cls.model_fields.items():
            if name in cls._secrets():
                continue
            text = field.description or ""
            if field.annotation is bool:
                group.add_argument(_flag(name), dest=name, action="store_true", help=text)
                continue
            default = "" if field.is_required() else f" (default: {field.default})"
            group.add_argument(_flag(name), dest=name, metavar=name.upper(), help=text + default)
        return parser

    def masked(self) -> dict[str, Any]:
        """All values for the one line printed at start, secrets masked."""
        return {
            name: "***" if isinstance(value, SecretStr) else value
            for name, value in self.model_dump(mode="python").items()
        }

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        lines = []
        for item in error.errors():
            name = str(item["loc"][0]) if item["loc"] else "configuration"
            if name in cls._secrets():
                lines.append(f"{ENV_PREFIX}{name.upper()}: {item['msg']}")
            else:
                lines.append(f"{_flag(name)}: {item['msg']} (got {item.get('input')!r})")
        return "; ".join(lines)

    @classmethod
    def _secrets(cls) -> frozenset[str]:
        secret = (SecretStr, SecretStr | None)
        return frozenset(name for name, field in cls.model_fields.items() if field.annotation in secret)


def known_variables() -> frozenset[str]:
    """Every LOCKSTEP_ variable that some service, the CPU platform plugin or `lockstep up` reads."""
    for module in _CONFIG_MODULES:
        importlib.import_module(module)
    fields = {name for service in _subclasses(ServiceConfig) for name in service.model_fields}
    return SHARED_ENVIRONMENT | {ENV_PREFIX + name.upper() for name in fields}


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    given = sorted(variable for variable in environment if variable.startswith(ENV_PREFIX))
    # Without a variable of ours there is nothing to look up.
    unknown = set(given) - known_variables() if given else set()
    if unknown:
        raise ConfigError(f"environment variable {min(unknown)} is not one that Lockstep reads; remove it")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _subclasses(cls: type[ServiceConfig]) -> list[type[ServiceConfig]]:
    return [leaf for sub in cls.__subclasses__() for leaf in (sub, *_subclasses(sub))]
