"""Sends a case and reduces the answer to what has to be equal on both servers.

Left out, because two servers cannot agree on it: ids, times and the system fingerprint. Of a stream, the
places where it is cut into chunks are left out: a step gives between 1 and 1 + K tokens, and which of them
share a chunk depends on timing. A stream is reduced to

- the chunks put together: text, token ids, logprobs, tool calls, finish and stop reason, usage;
- its shape: for each choice the order of role, content, tool calls and finish, repeats counted once, then
  usage, then [DONE]; whether each chunk carries usage; the names of all fields that any chunk had;
- for typed events (/v1/responses, /v1/messages) the order of the types, repeats counted once.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
from system.differential.case import Case

_LEFT_OUT = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "system_fingerprint",
    "item_id",
    "call_id",
    "request_id",
    "sequence_number",
}
_JOINED = {
    "text",
    "content",
    "reasoning",
    "reasoning_content",
    "arguments",
    "partial_json",
    "delta",
    "thinking",
}
_SAMPLED = {"text", "content", "token_ids", "logprobs", "delta", "arguments"}

Answer = dict[str, Any]


async def answer_all(url: str, cases: Iterable[Case], concurrency: int) -> dict[str, Answer]:
    """The reduced answers by the case's name."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(case: Case) -> tuple[str, Answer]:
            async with slots:
                return case.name, await _answer(client, case)

        return dict(await asyncio.gather(*map(one, cases)))


async def _answer(client: httpx.AsyncClient, case: Case) -> Answer:
    content = json.dumps(case.body).encode() if case.body is not None else case.raw
    headers = {"Content-Type": "application/json", **case.headers}
    got = await client.request(case.method, case.path, content=content, headers=headers)
    kind = got.headers.get("content-type", "").split(";")[0]
    answer: Answer = {"status": got.status_code, "content_type": kind}
    if kind == "text/event-stream":
        answer |= reduce_stream(got.text)
    elif kind == "application/json":
        answer["body"] = _clean(got.json())
    else:
        answer["body"] = got.text
    if case.compare == "shape":
        return _blank(answer)
    if case.compare == "status":
        return {"status": got.status_code, "content_type": kind}
    return answer


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items() if k not in _LEFT_OUT}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _blank(value: Any, sampled: bool = False) -> Any:
    """The same structure without what was sampled: types in place of values, lengths kept."""
    if isinstance(value, dict):
        return {k: _blank(v, sampled or k in _SAMPLED) for k, v in value.items()}
    if isinstance(value, list):
        return [_blank(item, sampled) for item in value]
    return type(value).__name__ if sampled else value


def reduce_stream(text: str) -> Answer:
    """The events put together; raises AssertionError for anything that is not an event."""
    events, done = [], False
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        assert not done, f"after [DONE]: {block}"
        if lines["data"] == "[DONE]":
            done = True
            continue
        event = json.loads(lines["data"])
        assert lines.get("event", event.get("type")) == event.get("type")
        events.append(event)
    if len(events) == 1 and "error" in events[0]:
        return {"only_error": events[0]}
    fields = _stream_of_types(events) if "type" in events[0] else _stream_of_chunks(events)
    return {"done": done, **fields}


def _stream_of_types(events: list[dict[str, Any]]) -> Answer:
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == sorted(set(numbers)), numbers
    runs: list[dict[str, Any]] = []
    for event in map(_clean, events):
        if runs and runs[-1]["type"] == event["type"]:
            runs[-1] = _merge(runs[-1], event)
        else:
            runs.append(event)
    return {"events": runs}


def _stream_of_chunks(events: list[dict[str, Any]]) -> Answer:
    merged: dict[str, Any] = {}
    shapes: dict[str, list[str]] = {}
    fields: set[str] = set()
    for event in events:
        fields |= set(_names(event))
        for index, kind in _kinds(event):
            shape = shapes.setdefault(index, [])
            if shape[-1:] != [kind]:
                shape.append(kind)
        merged = _merge(merged, _clean(event))
    with_usage = [bool(event.get("usage")) for event in events]
    return {
        "merged": merged,
        "shapes": shapes,
        "fields": sorted(fields),
        "usage": "always" if all(with_usage) else "last" if with_usage[-1] else "never",
    }


def _names(value: Any, prefix: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            # Token texts are keys too, below these.
            if key not in ("top_logprobs", "prompt_logprobs"):
                yield from _names(inner, f"{prefix}.{key}")
        yield prefix
    elif isinstance(value, list):
        for item in value:
            yield from _names(item, prefix)
    else:
        yield prefix


def _kinds(event: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for choice in event.get("choices", ()):
        index, delta = str(choice["index"]), choice.get("delta", choice)
        for name in ("role", "reasoning", "content", "text", "tool_calls"):
            if delta.get(name):
                yield index, name
        if choice.get("finish_reason"):
            yield index, "finish"
    if not event.get("choices"):
        yield "last", "error" if "error" in event else "usage"


def _merge(old: Any, new: Any, name: str = "") -> Any:
    """Put two parts together: texts and lists one after the other, choices and tool calls by their index."""
    if new is None or old is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _merge(old.get(key), new.get(key), key) for key in {**old, **new}}
    if isinstance(old, list) and isinstance(new, list):
        if not all(isinstance(item, dict) and "index" in item for item in old + new):
            return old + new
        by_index = {item["index"]: item for item in old}
        for item in new:
            by_index[item["index"]] = _merge(by_index.get(item["index"]), item)
        return [by_index[index] for index in sorted(by_index)]
    return old + new if isinstance(old, str) and name in _JOINED else new
