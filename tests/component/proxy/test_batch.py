"""`lockstep batch` against the real proxy: keys, limits and refusals are those of a client."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from component.proxy.conftest import Start

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
KEY = "sk-of-the-batch-1"
COMPLETION = {"model": "pico", "prompt": [5, 6, 7, 8], "max_tokens": 4}
CHAT = {"model": "pico", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def test_a_batch_of_every_url_with_a_key(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole answers of each kind, the refusal of one line, and a key that may have two requests at once."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"batch {KEY} max_requests=2")
    stack = await start()
    bodies = {
        "completion": ("/v1/completions", COMPLETION),
        "chat": ("/v1/chat/completions", CHAT),
        "response": ("/v1/responses", {"model": "pico", "input": "hello", "max_output_tokens": 4}),
        "message": ("/v1/messages", CHAT),
        "refused": ("/v1/completions", COMPLETION | {"kv_transfer_params": {"do_remote_prefill": True}}),
    }
    lines = [
        {"custom_id": id_, "method": "POST", "url": url, "body": body} for id_, (url, body) in bodies.items()
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = await asyncio.create_subprocess_exec(
        *(LOCKSTEP, "batch", tmp_path / "r.jsonl", "--url", str(stack.http.base_url)),
        env=os.environ | {"OPENAI_API_KEY": KEY},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, said.decode()
    answers, errors = (
        {line["custom_id"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}
        for path in (tmp_path / "r.output.jsonl", tmp_path / "r.errors.jsonl")
    )
    assert {id_: answer["body"]["object"] for id_, answer in answers.items() if id_ != "message"} == {
        "completion": "text_completion",
        "chat": "chat.completion",
        "response": "response",
    }
    assert answers["message"]["body"]["type"] == "message"
    assert errors.keys() == {"refused"}
    assert errors["refused"]["status_code"] == 400
    assert errors["refused"]["body"]["error"]["param"] == "kv_transfer_params"
