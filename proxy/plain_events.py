"""Streamed events that hold nothing but text, without making and dumping vLLM's models for each of them.

vLLM's streams make two or three pydantic models an event and dump them, which is about a fifth of what a
streamed token costs the proxy. All events of a stream but the first and the last differ in their text only.
So vLLM's own JSON of one such event is kept for each stream, cut at its text, and the others are put
together from it; whatever holds more than text goes through vLLM's models as before.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

_MARK = "lockstep: here is the text"
_KEPT_STREAMS = 8192
"""A stream whose cut JSON was forgotten has it made anew at its next event."""

_EVENT_FIELDS = frozenset({"id", "object", "created", "model", "choices"})
"""Of an event that holds nothing but its choice."""

_encode_text = msgspec.json.Encoder().encode


class _PlainDelta:
    """A chat delta of content alone, as far as vLLM's stream reads it."""

    __slots__ = ("content",)
    role = None
    reasoning = None
    tool_calls = ()

    def __init__(self, content: str) -> None:
        self.content = content


class _PlainChoice:
    """A choice of text alone that has not ended."""

    __slots__ = ("delta", "fields", "text")
    finish_reason = None

    def __init__(self, fields: dict[str, Any], text: str, delta: Any) -> None:
        self.fields = fields
        self.text = text
        self.delta = delta


class _PlainEvent:
    """An event with one such choice. Whatever is set on it later makes it an event like others."""

    def __init__(self, kind: "_Kind", fields: dict[str, Any], choice: _PlainChoice) -> None:
        self._parts = (kind, fields, choice)

    def model_dump_json(self, *, exclude_unset: bool) -> str:
        """As the model gives it; vLLM's streams always leave out what was not set."""
        kind, fields, choice = self._parts
        if len(self.__dict__) > 1 or not exclude_unset:
            event = kind.whole(fields, choice)
            for name, value in self.__dict__.items():
                if name != "_parts":
                    setattr(event, name, value)
            return str(event.model_dump_json(exclude_unset=exclude_unset))
        head, tail = _cut(
            kind,
            fields["id"],
            fields["created"],
            fields["model"],
            choice.fields["index"],
            tuple(choice.fields),
        )
        return f"{head}{_encode_text(choice.text).decode()}{tail}"


class _Kind:
    """One route's models, and the shape of its plain events."""

    def __init__(self, object_name: str, event: Any, choice: Any, text_of: Callable[[Any], Any]) -> None:
        self.object_name = object_name
        self._event = event
        self._choice = choice
        self._text_of = text_of

    def make_choice(self, **fields: Any) -> Any:
        """In place of the choice's model."""
        # Nothing but an index and a text, or a delta, has a value.
        if tuple(fields.values()).count(None) == len(fields) - 2:
            text = self._text_of(fields)
            if text is not None:
                return _PlainChoice(fields, text, fields.get("delta"))
        return self._choice(**_whole_delta(fields))

    def make_event(self, **fields: Any) -> Any:
        """In place of the event's model."""
        choices = fields["choices"]
        if len(choices) == 1 and type(choices[0]) is _PlainChoice:
            if fields.keys() == _EVENT_FIELDS:
                return _PlainEvent(self, fields, choices[0])
            return self.whole(fields, choices[0])
        return self._event(**fields)

    def whole(self, fields: dict[str, Any], choice: _PlainChoice) -> Any:
        """The models that a plain event stands for."""
        return self._event(**{**fields, "choices": [self._choice(**_whole_delta(choice.fields))]})

    def example(self, names: tuple[str, ...], index: int, **fields: Any) -> str:
        """vLLM's JSON of an event whose text is the mark; `names` are the fields that its choice is given."""
        values: dict[str, Any] = dict.fromkeys(names)
        values |= {"index": index, **({"text": _MARK} if "text" in names else {})}
        if "delta" in names:
            values["delta"] = DeltaMessage(content=_MARK)
        event = self._event(object=self.object_name, choices=[self._choice(**values)], **fields)
        return str(event.model_dump_json(exclude_unset=True))


@functools.lru_cache(maxsize=_KEPT_STREAMS)
def _cut(
    kind: _Kind, event_id: str, created: int, model: str, index: int, names: tuple[str, ...]
) -> tuple[str, str]:
    """What comes before and after the text in an event of one stream."""
    example = kind.example(names, index, id=event_id, created=created, model=model)
    head, _, tail = example.rpartition(f'"{_MARK}"')
    return head, tail


def _whole_delta(fields: dict[str, Any]) -> dict[str, Any]:
    delta = fields.get("delta")
    return {**fields, "delta": DeltaMessage(content=delta.content)} if type(delta) is _PlainDelta else fields


def _delta_text(fields: dict[str, Any]) -> Any:
    delta: Any = fields.get("delta")
    if type(delta) is _PlainDelta:
        return delta.content
    # A parser's: of the class itself, since others have fields of their own.
    return delta.content if type(delta) is DeltaMessage and delta.model_fields_set == {"content"} else None


def _make_delta(**fields: Any) -> Any:
    """In place of the delta's model."""
    content = fields.get("content")
    return _PlainDelta(content) if len(fields) == 1 and type(content) is str else DeltaMessage(**fields)


COMPLETION = _Kind(
    "text_completion",
    CompletionStreamResponse,
    CompletionResponseStreamChoice,
    lambda fields: fields.get("text"),
)
CHAT = _Kind(
    "chat.completion.chunk",
    ChatCompletionStreamResponse,
    ChatCompletionResponseStreamChoice,
    _delta_text,
)

REPLACED: dict[ModuleType, dict[str, Any]] = {
    completion_serving: {
        "CompletionStreamResponse": COMPLETION.make_event,
        "CompletionResponseStreamChoice": COMPLETION.make_choice,
    },
    chat_serving: {
        "ChatCompletionStreamResponse": CHAT.make_event,
        "ChatCompletionResponseStreamChoice": CHAT.make_choice,
        "DeltaMessage": _make_delta,
    },
}
"""By module: names that its streams look up, and what they find there from `install` on."""


def install() -> None:
    """Have vLLM's streams make plain events; safe to run more than once."""
    for module, names in REPLACED.items():
        for name, made in names.items():
            if not hasattr(module, name):
                raise AttributeError(f"{module.__name__} has no {name}: its streams make other events by now")
            setattr(module, name, made)
