"""A stock NIXL push pair: two plain vLLM servers, our scheduler in the decode one, and a router for them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from system.harness import PICO, START_TIMEOUT_S, completion_body, free_port, wait_until

SCHEDULER = "decode_node.scheduler.LockstepScheduler"
NUM_SPECULATIVE_TOKENS = 2
MAX_NUM_SEQS = 8
PREFILL_ENGINE_ID = "stock-prefill"


@dataclass(frozen=True)
class Pair:
    """Both servers, and where decode finds the prefill server's side channel."""

    prefill_url: str
    decode_url: str
    side_channel_port: int

    def legs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`kv_transfer_params` of both legs, as vLLM's docs/design/nixl_kv_push_connector.md has them.

        They go out at once: decode names prefill's place, not its answer.
        """
        prefill = {"do_remote_decode": True, "do_remote_prefill": False}
        decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": PREFILL_ENGINE_ID,
            "remote_host": "127.0.0.1",
            "remote_port": self.side_channel_port,
            "tp_size": 1,
        }
        return prefill, decode


class Router:
    """Sends both legs under one request id, which is how vLLM matches them, and returns decode's choice."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One attempt."""
        # vLLM strips an ending of '-' and 8 hex digits before it matches: this has none.
        request_id = f"pair-{uuid.uuid4().hex}"
        prefill_params, decode_params = self._pair.legs()
        decode_params["remote_request_id"] = f"cmpl-{request_id}-0"
        async with httpx.AsyncClient(timeout=120, headers={"X-Request-Id": request_id}) as client:
            prefill = completion_body(prompt, max_tokens=1, kv_transfer_params=prefill_params)
            decode = completion_body(
                prompt, max_tokens=max_tokens, ignore_eos=True, kv_transfer_params=decode_params
            )
            _, answer = await asyncio.gather(
                _post(client, self._pair.prefill_url, prefill), _post(client, self._pair.decode_url, decode)
            )
        return answer

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
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@contextmanager
def run_pair(directory: Path, max_model_len: int, decode_blocks: int) -> Iterator[Pair]:
    """Start both servers at once; stop them at the end."""
    prefill_channel, decode_channel = free_port(), free_port()
    prefill = ("--kv-transfer-config", _kv_transfer_config("kv_producer", PREFILL_ENGINE_ID))
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
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(_server(directory / f"{name}.log", channel, (*limit, *flags), env))
            for name, channel, flags, env in (
                ("prefill", prefill_channel, prefill, {}),
                ("decode", decode_channel, decode, ours),
            )
        ]
        for url, name in zip(urls, ("prefill", "decode"), strict=True):
            wait_until(lambda url=url: _up(url), f"the {name} server is up", START_TIMEOUT_S, 1.0)
        yield Pair(urls[0], urls[1], prefill_channel)


def _kv_transfer_config(role: str, engine_id: str) -> str:
    return json.dumps(
        {
            "kv_connector": "NixlPushConnector",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_buffer_device": "cpu",
        }
    )


@contextmanager
def _server(
    log_path: Path, side_channel_port: int, flags: tuple[str, ...], env: Mapping[str, str]
) -> Iterator[str]:
    port = free_port()
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": NUM_SPECULATIVE_TOKENS})
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(PICO)]
    command += ["--served-model-name", "pico", "--dtype", "float32", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--speculative-config", speculative, *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(side_channel_port) | env,
            start_new_session=True,
            cwd=log_path.parent,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        except AssertionError:
            sys.stderr.write(log_path.read_text()[-3000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _environment(side_channel_port: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
    }


def _up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
