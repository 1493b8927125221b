"""A stock NIXL push pair: two plain vLLM servers, our scheduler in the decode one, and a router for them."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from system.harness import completion_body, free_port
from system.servers import NUM_SPECULATIVE_TOKENS, start_vllm
from system.vllm_plugin import write_vllm_plugin

SCHEDULER = "decode_node.scheduler.LockstepScheduler"
MAX_NUM_SEQS = 8
LEASE_S = 240
"""Long, since nothing on decode's side notices a push that never comes."""

PROGRESS_PLUGIN = """
import sys


def register():
    from vllm.distributed.nixl_utils import NixlWrapper

    bindings = sys.modules[NixlWrapper.__module__].nixlBind

    class SleepingProgress(bindings.nixlAgentConfig):
        def __setattr__(self, name, value):
            super().__setattr__(name, 1000 if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = SleepingProgress
"""
"""NIXL's progress thread sleeps between two looks (µs), as on our nodes (kv_transfer/agent.py). Left to spin,
those of both engines starve them on two cores: a step was seen to take a minute."""


@dataclass(frozen=True)
class Pair:
    """Both servers."""

    prefill_url: str
    decode_url: str


class Router:
    """Sends the two legs of a request under one id, which is how vLLM matches them."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One attempt; returns decode's choice.

        Decode's parameters are those that prefill answers with. They name prefill's own request, so that
        decode's heartbeats keep its blocks while the request waits for a place (nixl/base_scheduler.py:199).
        """
        # vLLM strips an ending of '-' and 8 hex digits before it matches: this has none.
        headers = {"X-Request-Id": f"pair-{uuid.uuid4().hex}"}
        prefill_params = {"do_remote_decode": True, "do_remote_prefill": False}
        async with httpx.AsyncClient(timeout=LEASE_S, headers=headers) as client:
            prefill = completion_body(prompt, max_tokens=1, kv_transfer_params=prefill_params)
            answer = await _post(client, self._pair.prefill_url, prefill)
            decode_params = answer["kv_transfer_params"]
            decode = completion_body(
                prompt, max_tokens=max_tokens, ignore_eos=True, kv_transfer_params=decode_params
            )
            answer = await _post(client, self._pair.decode_url, decode)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def complete_to_the_end(self, prompt: list[int], max_tokens: int) -> list[dict[str, Any]]:
        """The attempts it took: what was generated so far becomes a part of the prompt of the next."""
        attempts: list[dict[str, Any]] = []
        generated: list[int] = []
        while True:
            choice = await self.complete([*prompt, *generated], max_tokens - len(generated))
            attempts.append(choice)
            generated += choice["token_ids"]
            if choice["finish_reason"] != "abort":
                return attempts


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@contextmanager
def run_pair(directory: Path, max_model_len: int, decode_blocks: int) -> Iterator[Pair]:
    """Start both servers at once; stop them at the end."""
    prefill = ("--kv-transfer-config", _kv_transfer_config("kv_producer", "stock-prefill"))
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [(1 + NUM_SPECULATIVE_TOKENS) * rows for rows in (1, 2, 4, MAX_NUM_SEQS)],
    }
    decode = (
        *("--kv-transfer-config", _kv_transfer_config("kv_consumer", "stock-decode")),
        *("--scheduler-cls", SCHEDULER, "--compilation-config", json.dumps(compilation)),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--num-gpu-blocks-override", str(decode_blocks)),
    )
    limit = ("--max-model-len", str(max_model_len))
    # Our platform gives decode the dispatch of full graphs and async scheduling on a machine without a GPU.
    ours = {"LOCKSTEP_CPU_PLATFORM": "1"}
    write_vllm_plugin(directory / "site", "sleeping_progress", PROGRESS_PLUGIN)
    plugin = {"PYTHONPATH": str(directory / "site")}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                start_vllm(directory / f"{name}.log", *limit, *flags, env=plugin | _side_channel() | env)
            )
            for name, flags, env in (("prefill", prefill, {}), ("decode", decode, ours))
        ]
        for server, name in zip(servers, ("prefill", "decode"), strict=True):
            server.wait_up(f"the {name} server is up")
        yield Pair(*(server.url for server in servers))


def _side_channel() -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


def _kv_transfer_config(role: str, engine_id: str) -> str:
    return json.dumps(
        {
            "kv_connector": "NixlPushConnector",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
    )
