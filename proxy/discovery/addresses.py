"""The form of a node's address, as flags and files give it."""

import re

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s,/]+):(\d{1,5})")


def split_host_port(address: str) -> tuple[str, int]:
    """Host (without the brackets of an IPv6 address) and port. Raises ValueError for anything else."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def join_host_port(host: str, port: int | str) -> str:
    """The other way round."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_list(value: str) -> tuple[str, ...]:
    """The parts of A,B,C without the spaces around them; none of an empty value."""
    return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
