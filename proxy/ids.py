"""Mints the ids of legs: unique for each proxy start, request, choice and attempt."""

import itertools
import secrets


class LegIds:
    """Counts the choices of one proxy.

    Both legs of an attempt carry the same id, and nodes match it exactly. vLLM strips an ending of '-' and 8
    hex digits (nixl/utils.py::get_base_request_id); these ids end in '-t<attempt>', and t is no hex digit.
    """

    def __init__(self, proxy_id: str | None = None) -> None:
        self.proxy_id = proxy_id or secrets.token_hex(6)
        self._choices = itertools.count(1)

    def new(self) -> str:
        """The id of the first attempt of a new choice."""
        return leg_id(self.proxy_id, next(self._choices), 1)


def leg_id(proxy_id: str, choice: int, attempt: int) -> str:
    """The id of one attempt; `proxy_id` is hex."""
    return f"ls-{proxy_id}-{choice}-t{attempt}"
