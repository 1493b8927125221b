"""A request that plain vLLM and the stack answer, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Compare = Literal["all", "shape", "status"]


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `body` goes out as JSON, `raw` as it is; neither means an empty body.

    `compare` says how much of the two answers is equal: `all`; `shape`, everything but what was sampled, for
    requests with randomness in them; `status`, where the bodies have a reason to differ.
    """

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    raw: bytes | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    compare: Compare = "all"

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))


def streamed(case: Case, **stream_options: bool) -> Case:
    """The same request as a stream."""
    body = dict(case.body or {}) | {"stream": True}
    if stream_options:
        body["stream_options"] = stream_options
    return replace(case, name=f"{case.name}, streamed", body=body)


def forced_call(case: Case, **stream_options: bool) -> list[Case]:
    """A tool call that the request asks for: whole, and of its stream only the shape.

    vLLM's parsers read such a stream chunk by chunk, and what they pass on of arguments that are cut off or
    broken depends on where the chunks end (seen: a trailing "{}"). pico's arguments are of that kind.
    """
    return [case, replace(streamed(case, **stream_options), compare="shape")]


def both(cases: list[Case]) -> list[Case]:
    """Each case as it is and as a stream that ends with its usage."""
    return [made for case in cases for made in (case, streamed(case, include_usage=True))]
