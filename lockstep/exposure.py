"""Which addresses only this machine reaches, and what a service needs before it listens on any other."""

import ipaddress

from lockstep.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether an address, or "localhost", is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(host: str, flag: str, *, guarded: bool, insecure_bind: bool, needs: str) -> None:
    """Raise ConfigError for a listener that others than this machine reach and that asks nobody who they are.

    `flag` set the address; `needs` says how the listener can be told to ask.
    """
    if guarded or insecure_bind or is_loopback(host):
        return
    raise ConfigError(
        f"{flag}: {host or 'every address'} can be reached from other machines; give {needs}, or "
        f"{flag} 127.0.0.1, or --insecure-bind where the network itself is trusted"
    )
