"""Mints the ids of legs: unique for each proxy start, request, choice and attempt."""

import itertools
import secrets


class ChoiceIds:
    """Counts the choices of one proxy."""

    def __init__(self, proxy_id: str | None = None) -> None:
        self.proxy_id = proxy_id or secrets.token_hex(6)
        self._choices = itertools.count(1)

    def new(self) -> str:
        """The id of a new choice, with which the ids of its legs begin."""
        return choice_id(self.proxy_id, next(self._choices))


def choice_id(proxy_id: str, choice: int) -> str:
    """The id of one choice; `proxy_id` is hex."""
    return f"ls-{proxy_id}-{choice}"


def leg_id(choice: str, attempt: int) -> str:
    """The id of both legs of one attempt of a choice, which nodes match exactly.

    vLLM strips an ending of '-' and 8 hex digits (nixl/utils.py::get_base_request_id); these ids end in
    '-t<attempt>', and t is no hex digit.
    """
    return f"{choice}-t{attempt}"
