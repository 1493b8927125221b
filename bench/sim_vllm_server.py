"""A simulated vLLM HTTP server for routers to stand in front of: completions in the simulation's time.

    python -m bench.sim_vllm_server --port PORT --prompt-tokens N [--sim-... figures]

It answers what a router asks of a vLLM server: /v1/completions (streamed or not), /v1/models, /health, and
more. Every prompt counts as so many tokens. An event looks like one of vLLM's, with the tokens of a step.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvicorn

from bench.sim_engine import Row, SimEngine
from lockstep.sim.config import SimFigures

WORDS = (" one", " two", " three")

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Server:
    """An ASGI application; requests get their steps by queues."""

    def __init__(self, figures: SimFigures, prompt_tokens: int, num_speculative_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._figures, self._num_speculative_tokens = figures, num_speculative_tokens
        self._queues: dict[str, asyncio.Queue[tuple[int, bool]]] = {}
        self._engine: SimEngine | None = None
        self._requests = 0

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send
    ) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/completions":
            await self._complete(await _body(receive), send)
        elif scope["path"] == "/v1/models":
            model = {"id": "pico", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
            await _answer(send, {"object": "list", "data": [model]})
        else:  # /health, /ping, /version, /server_info, ...
            await _answer(send, {"version": "0.32.0", "model_path": "pico", "served_model_name": "pico"})

    async def _complete(self, body: dict[str, Any], send: Send) -> None:
        if self._engine is None:
            self._engine = SimEngine(self._figures, self._num_speculative_tokens, 2048, self._step)
        self._requests += 1
        name = f"cmpl-{self._requests:016x}"
        steps = self._queues[name] = asyncio.Queue()
        self._engine.add(Row(name, self._prompt_tokens, int(body.get("max_tokens") or 16)))
        try:
            if body.get("stream"):
                await _stream(name, steps, send)
            else:
                await self._whole(name, steps, send)
        finally:
            del self._queues[name]
            self._engine.abort(name)

    async def _whole(self, name: str, steps: "asyncio.Queue[tuple[int, bool]]", send: Send) -> None:
        tokens, ended = 0, False
        while not ended:
            new, ended = await steps.get()
            tokens += new
        choice = {"index": 0, "text": WORDS[0] * tokens, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens}
        await _answer(
            send,
            {"id": name, "object": "text_completion", "model": "pico", "choices": [choice], "usage": usage},
        )

    def _step(self, rows: Sequence[Row]) -> None:
        for row in rows:
            queue = self._queues.get(row.name)
            if queue is not None:
                queue.put_nowait((row.new_tokens, not row.tokens_left))


async def _stream(name: str, steps: "asyncio.Queue[tuple[int, bool]]", send: Send) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
        }
    )
    head = f'data: {{"id":"{name}","object":"text_completion","created":{int(time.time())},"model":"pico",'
    head += '"choices":[{"index":0,"text":"'
    tail = '","logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
    ended = False
    while not ended:
        tokens, ended = await steps.get()
        event = head + "".join(WORDS[:tokens]) + tail % ('"length"' if ended else "null")
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _body(receive: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body: dict[str, Any] = json.loads(b"".join(parts))
    return body


async def _answer(send: Send, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sim_vllm_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--num-speculative-tokens", type=int, default=2)
    options, rest = parser.parse_known_args()
    figures, unknown = SimFigures.load(rest, "sim_vllm_server", "")
    if unknown:
        parser.error(f"unknown arguments {unknown}")
    app = Server(figures, options.prompt_tokens, options.num_speculative_tokens)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", lifespan="off", ws="none")


if __name__ == "__main__":
    main()
