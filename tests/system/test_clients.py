"""What people run against the endpoint: the openai client, aborts, and errors."""

import asyncio
import json

import httpx
from openai import AsyncOpenAI
from system.harness import Stack, complete_all, completion_body
from system.prompts import prompts

CITIES = ["Oslo", "Rome"]


def openai_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_openai_chat(stack: Stack) -> None:
    """Chat, streaming and not, gives one text, and usage that counts it."""
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    async with openai_client(stack.url) as client:
        whole = await client.chat.completions.create(
            model="pico", messages=messages, temperature=0, max_tokens=48
        )
        stream = await client.chat.completions.create(
            model="pico",
            messages=messages,
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, usage = [], None
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert whole.choices[0].message.content == "".join(pieces)
    assert whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens <= 48


async def test_openai_completions(stack: Stack) -> None:
    """Completions, streaming and not, give one text."""
    request = {"model": "pico", "prompt": "class Parser:\n", "temperature": 0, "max_tokens": 40}
    async with openai_client(stack.url) as client:
        whole = await client.completions.create(**request)
        stream = await client.completions.create(**request, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert whole.choices[0].text == "".join(pieces)
    assert whole.usage.completion_tokens == 40


async def test_openai_structured_output(stack: Stack) -> None:
    """A json_schema answer fits the schema, streamed and not alike."""
    message = {"role": "user", "content": "Where to?"}
    request = {"model": "pico", "messages": [message], "temperature": 0, "max_tokens": 80}
    # Between the parts of an object pico would put white space until its tokens are used up.
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": CITIES}}}
    async with openai_client(stack.url) as client:
        whole = await client.chat.completions.create(**request, response_format=wanted)
        stream = await client.chat.completions.create(**request, response_format=wanted, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text
    assert json.loads(text) in CITIES


async def test_openai_responses(stack: Stack) -> None:
    """The events of a streamed response add up to the response that is not streamed."""
    request = {"model": "pico", "input": "def add(a, b):\n", "temperature": 0, "max_output_tokens": 24}
    async with openai_client(stack.url) as client:
        whole = await client.responses.create(**request)
        stream = await client.responses.create(**request, stream=True)
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == "".join(deltas) != ""
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert whole.usage.output_tokens == events[-1].response.usage.output_tokens <= 24


async def test_openai_abort_in_mid_stream(stack: Stack) -> None:
    """A client that stops reading in mid-stream frees its blocks on both sides."""
    async with openai_client(stack.url) as client:
        stream = await client.completions.create(
            model="pico",
            prompt="import os\n",
            max_tokens=2000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
    # 2,000 tokens would take much longer than this.
    stack.wait_idle(timeout_s=5)


async def test_fifty_aborted_and_fifty_finished(stack: Stack) -> None:
    """100 requests at once, every other one dropped by its client at some point: no KV block stays held."""
    lengths = [20 + 7 * number for number in range(50)]
    finished = [completion_body(prompt, max_tokens=24) for prompt in prompts(lengths, seed=7)]
    dropped = [
        completion_body(prompt, max_tokens=400, ignore_eos=True, stream=True)
        for prompt in prompts(lengths, seed=8)
    ]

    async def drop(client: httpx.AsyncClient, body: dict[str, object], after_s: float) -> bool:
        """Whether the request was still running when its client left."""
        try:
            async with asyncio.timeout(after_s):
                async with client.stream("POST", "/v1/completions", json=body) as stream:
                    async for _ in stream.aiter_lines():
                        pass
        except TimeoutError:
            return True
        return False

    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        # From 5 ms to 2.5 s: while queued, in prefill, waiting for KV, and in mid-stream.
        drops = [drop(client, body, 0.005 + 0.05 * number) for number, body in enumerate(dropped)]
        results, answers = await asyncio.gather(
            asyncio.gather(*drops), complete_all(stack.url, finished, concurrency=8)
        )
    assert sum(results) == 50
    assert all(answer["choices"][0]["finish_reason"] for answer in answers)
    stack.wait_idle(timeout_s=10)


async def test_stop_string_ends_both_legs(stack: Stack) -> None:
    """A stop string found by the proxy's detokenizer ends the decode leg at once."""
    body = {
        "model": "pico",
        "prompt": "import os\n",
        "temperature": 0,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        answer = (await client.post("/v1/completions", json=body | {"stop": ["\n"]})).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "\n" not in answer["choices"][0]["text"]
    stack.wait_idle(timeout_s=5)


async def test_sampling_without_a_temperature(stack: Stack) -> None:
    """The OpenAI default of temperature 1 with top_p and top_k works, and gives varied answers."""
    body = {
        "model": "pico",
        "prompt": "def ",
        "max_tokens": 24,
        "top_p": 0.95,
        "top_k": 50,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) > 1


async def test_errors_have_openais_shape(stack: Stack) -> None:
    """A bad request is refused before anything is dispatched, with OpenAI's error body."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        unknown = await client.post("/v1/completions", json={"model": "nope", "prompt": "x"})
        long = await client.post("/v1/completions", json=completion_body([5] * 5000))
        forged = await client.post(
            "/v1/completions", json=completion_body([5, 6], kv_transfer_params={"do_remote_prefill": True})
        )
    assert unknown.status_code == 404
    assert long.status_code == forged.status_code == 400
    assert "kv_transfer_params" in forged.json()["error"]["message"]
    assert "4091" in long.json()["error"]["message"]  # 4096 - K * 2 batches in flight - 1
