"""Events that are put together give the very JSON that vLLM's models give."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
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
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from proxy import plain_events
from proxy.plain_events import CHAT, COMPLETION, REPLACED

Make = Callable[..., Any]

COMPLETION_FIELDS = {
    "index": 0,
    "logprobs": None,
    "finish_reason": None,
    "stop_reason": None,
    "prompt_token_ids": None,
    "token_ids": None,
}
CHAT_FIELDS = {"index": 1, "logprobs": None, "finish_reason": None, "token_ids": None}
TEXTS = [
    "",
    " one",
    'quote " and \\',
    "line\nbreak\t\r\b\f",
    "\x00\x1b\x7f",
    "é ü 日本 \U0001f600 \u2028 \ufffd",
]


def completion(event: Make, choice: Make, **changed: Any) -> Any:
    """As completion_stream_generator makes one."""
    fields = {**COMPLETION_FIELDS, **changed}
    return event(id="cmpl-1", object="text_completion", created=7, model="pico", choices=[choice(**fields)])


def chat(event: Make, choice: Make, delta: Any, **changed: Any) -> Any:
    """As chat_completion_stream_generator makes one."""
    fields = {**CHAT_FIELDS, "delta": delta, **changed}
    choices = [choice(**fields)]
    return event(id="chatcmpl-1", object="chat.completion.chunk", created=7, choices=choices, model="pico")


def dumped(event: Any) -> str:
    return str(event.model_dump_json(exclude_unset=True))


@pytest.mark.parametrize("text", TEXTS)
def test_plain_completion_events(text: str) -> None:
    """Whatever the text, and for each stream its own id; no model is made for it."""
    ours = completion(COMPLETION.make_event, COMPLETION.make_choice, text=text)
    assert not isinstance(ours, CompletionStreamResponse)
    assert dumped(ours) == dumped(
        completion(CompletionStreamResponse, CompletionResponseStreamChoice, text=text)
    )


@pytest.mark.parametrize("text", TEXTS)
def test_plain_chat_events(text: str) -> None:
    """With a delta of the stream's own, and with one that a parser made."""
    expected = dumped(
        chat(ChatCompletionStreamResponse, ChatCompletionResponseStreamChoice, DeltaMessage(content=text))
    )
    for make_delta in (REPLACED[chat_serving]["DeltaMessage"], DeltaMessage):
        ours = chat(CHAT.make_event, CHAT.make_choice, make_delta(content=text))
        assert not isinstance(ours, ChatCompletionStreamResponse)
        assert dumped(ours) == expected


def test_every_character_is_written_as_the_models_write_it() -> None:
    """All of the basic plane but surrogates, which no text has."""
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    ours = completion(COMPLETION.make_event, COMPLETION.make_choice, text=text)
    assert dumped(ours) == dumped(
        completion(CompletionStreamResponse, CompletionResponseStreamChoice, text=text)
    )


def test_two_streams_are_not_mixed_up() -> None:
    """The JSON that is kept is that of one stream."""
    for event_id, created, model, index in (("a", 1, "m", 0), ("b", 1, "m", 0), ("a", 2, "n", 3)):
        made = []
        for event, choice in (
            (COMPLETION.make_event, COMPLETION.make_choice),
            (CompletionStreamResponse, CompletionResponseStreamChoice),
        ):
            choices = [choice(**{**COMPLETION_FIELDS, "index": index}, text="x")]
            made.append(
                event(id=event_id, object="text_completion", created=created, model=model, choices=choices)
            )
        assert dumped(made[0]) == dumped(made[1])


@pytest.mark.parametrize(
    "changed",
    [
        {"finish_reason": "length"},
        {"finish_reason": "stop", "stop_reason": 5},
        {"token_ids": [1, 2]},
        {"prompt_token_ids": [1]},
        {"token_ids": []},
    ],
)
def test_completion_events_with_more_than_text(changed: dict[str, Any]) -> None:
    """They are vLLM's own."""
    ours = completion(COMPLETION.make_event, COMPLETION.make_choice, text="a", **changed)
    theirs = completion(CompletionStreamResponse, CompletionResponseStreamChoice, text="a", **changed)
    assert isinstance(ours, CompletionStreamResponse)
    assert dumped(ours) == dumped(theirs)


@pytest.mark.parametrize(
    ("delta", "changed"),
    [
        ({"role": "assistant", "content": ""}, {}),
        ({"reasoning": "hm"}, {}),
        ({"content": "a", "reasoning": "b"}, {}),
        ({"tool_calls": [DeltaToolCall(index=0)]}, {}),
        ({}, {}),
        ({"content": "a"}, {"finish_reason": "stop", "stop_reason": None}),
        ({"content": "a"}, {"token_ids": [4]}),
    ],
)
def test_chat_events_with_more_than_text(delta: dict[str, Any], changed: dict[str, Any]) -> None:
    """They are vLLM's own, whoever made the delta."""
    make_delta = REPLACED[chat_serving]["DeltaMessage"]
    ours = chat(CHAT.make_event, CHAT.make_choice, make_delta(**delta), **changed)
    theirs = chat(
        ChatCompletionStreamResponse, ChatCompletionResponseStreamChoice, DeltaMessage(**delta), **changed
    )
    assert dumped(ours) == dumped(theirs)


def test_what_is_set_later_is_in_the_event() -> None:
    """Usage with each event, and the fingerprint."""
    made = []
    for event in (
        completion(COMPLETION.make_event, COMPLETION.make_choice, text="a"),
        completion(CompletionStreamResponse, CompletionResponseStreamChoice, text="a"),
    ):
        event.usage = UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)
        event.system_fingerprint = "f"
        made.append(dumped(event))
    assert made[0] == made[1]
    assert '"total_tokens":3' in made[0]


def test_the_last_event_of_usage() -> None:
    """It has no choices."""
    fields = {"id": "a", "created": 1, "model": "m", "choices": []}
    assert dumped(COMPLETION.make_event(**fields)) == dumped(CompletionStreamResponse(**fields))


def test_vllms_streams_look_the_models_up_by_name() -> None:
    """The contract that `install` rests on: each name is read in the module where it is replaced."""
    streams = {
        completion_serving: completion_serving.OpenAIServingCompletion.completion_stream_generator,
        chat_serving: chat_serving.OpenAIServingChat.chat_completion_stream_generator,
    }
    for module, names in REPLACED.items():
        source = inspect.getsource(streams[module])
        assert all(f" {name}(" in source or f"={name}(" in source for name in names)
        assert "model_dump_json(exclude_unset=True)" in source


def test_install_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so where vLLM's streams have become others."""
    for module, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    plain_events.install()
    assert all(getattr(m, name) is made for m, names in REPLACED.items() for name, made in names.items())
    monkeypatch.delattr(chat_serving, "DeltaMessage")
    with pytest.raises(AttributeError, match="DeltaMessage"):
        plain_events.install()
