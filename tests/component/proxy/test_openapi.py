"""Requests made from the proxy's own OpenAPI document: each is an answer or a refusal, none is a fault."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from component.proxy.conftest import Start
from component.proxy.generated_requests import Generator
from component.proxy.stack import Stack

TEXT = "Some words to say."
CHAT = {"model": "pico", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "pico", "prompt": TEXT, "max_tokens": 8},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "pico", "input": TEXT, "max_output_tokens": 8},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "pico", "messages": CHAT["messages"]},
    "/tokenize": {"model": "pico", "prompt": TEXT},
    "/detokenize": {"model": "pico", "tokens": [5, 6, 7]},
}
"""A request to each route that generates or tokenizes, which works as it stands."""

AT_ONCE = 8
ANSWER_S = 60

BIN = str(Path(sys.executable).parent)
SCHEMATHESIS = shutil.which("schemathesis", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
RUN_S = 240


async def faults(stack: Stack, path: str, bodies: list[dict[str, Any]]) -> list[str]:
    """What was answered with a 5xx, in an event of a stream too."""
    found = []

    async def ask(body: dict[str, Any]) -> None:
        content = json.dumps(body)
        answer = await stack.http.post(
            path, content=content, headers={"Content-Type": "application/json"}, timeout=ANSWER_S
        )
        if answer.status_code >= 500 or '"code":500' in answer.text.replace(" ", ""):
            found.append(f"{path} {content[:1500]}\n  -> {answer.status_code} {answer.text[-500:]}")

    for first in range(0, len(bodies), AT_ONCE):
        await asyncio.gather(*(ask(body) for body in bodies[first : first + AT_ONCE]))
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value"), [("structured_outputs", 1), ("structured_outputs", ["x"]), ("stream_options", [3])]
)
async def test_value_that_vllms_validators_trip_over_is_refused(
    start: Start, path: str, field: str, value: Any
) -> None:
    """They use it before its type is checked. The refusal names the field, as for any other wrong type."""
    stack = await start()
    answer = await stack.http.post(path, json=BASES[path] | {field: value, "stream": True})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("stop", ["\ud83e"], "stop"),
        ("bad_words", ["\ud83e"], "bad_words"),
        ("vllm_xargs", {"\ud83e": "a"}, "extra_args"),
        ("vllm_xargs", {"a": 2**64}, "extra_args"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused(
    start: Start, field: str, value: Any, named: str
) -> None:
    """Half of a surrogate pair, which JSON can escape, and a number beyond 64 bits, which vLLM refuses."""
    stack = await start()
    body = BASES["/v1/completions"] | {field: value}
    answer = await stack.http.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert await still_serves(stack)


async def still_serves(stack: Stack) -> bool:
    """As before, with nothing left over."""
    answer = await stack.http.post("/v1/completions", json=BASES["/v1/completions"] | {"max_tokens": 30})
    return answer.json()["choices"][0]["text"] == TEXT and not stack.client.flow.num_in_flight


@pytest.mark.parametrize(
    "count",
    [pytest.param(25, id="few"), pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
async def test_no_generated_request_is_a_fault(start: Start, count: int) -> None:
    """Fields of every kind in requests that work otherwise: so many for each route."""
    stack = await start()
    document = (await stack.http.get("/openapi.json")).json()
    for path, base in BASES.items():
        generator = Generator(document, seed=1)
        assert not await faults(stack, path, [base])
        found = await faults(stack, path, [generator.changed(path, base) for _ in range(count)])
        assert not found, "\n".join(found)
    assert await still_serves(stack)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not on the PATH")
async def test_no_request_that_fits_or_nearly_fits_the_document_is_a_fault(
    start: Start, tmp_path: Path
) -> None:
    """Whatever the fields hold, it is an answer or a refusal; and the proxy answers as before afterwards.

    Left out is what vLLM answers with 501 for every model but a few, which the tool counts as a fault.
    """
    assert SCHEMATHESIS is not None
    stack = await start()
    url = str(stack.http.base_url)
    process = await asyncio.create_subprocess_exec(
        *(SCHEMATHESIS, "run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "coverage,fuzzing", "--max-examples", "15", "--max-time", "120", "--seed", "1"),
        *("--request-timeout", "20", "--continue-on-failure", "--no-shrink"),
        *("--exclude-path", "/v1/systemone"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, said.decode()
    assert await still_serves(stack)
