"""A second client that is none of ours: NVIDIA's AIPerf, in an environment of its own."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load import PICO
from bench.proxy_peers import Peer, installed

AIPERF = Peer("aiperf", "0.13.0", ("aiperf", "profile"))


def serve(argv: Sequence[str], folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run it, and return what its `profile_export_aiperf.json` in `folder` says.

    Raises TimeoutError at the deadline, RuntimeError if it fails, as it does when no request was answered.
    """
    command = [*_command(), *argv, "--artifact-dir", str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as run:
        try:
            said, _ = run.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(run.pid, signal.SIGKILL)  # it is several processes
            raise TimeoutError(f"not through after {deadline_s:g} s") from error
    if run.returncode:
        raise RuntimeError(f"aiperf: {said[-1000:]}")
    result: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return result


def prepare() -> None:
    """Install it. Raises StartError where that cannot be done."""
    _command()


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """By the names of `load.Figures`; its inter-chunk latency is vLLM's ITL, its inter-token latency TPOT."""
    metrics = {"ttft": "time_to_first_token", "itl": "inter_chunk_latency", "tpot": "inter_token_latency"}
    return {
        **{
            f"{name}_p{percentile}_ms": result[metric][f"p{percentile}"]
            for name, metric in metrics.items()
            for percentile in (50, 99)
        },
        "output_tokens_per_s": result["output_token_throughput"]["avg"],
        "errors": sum(error["count"] for error in result["error_summary"]),
    }


def flags(
    url: str, concurrency: int, requests: int, input_tokens: int, output_tokens: int, seed: int
) -> list[str]:
    """Of `aiperf profile`; one process a service, since the client has no cores of its own."""
    argv = ["--url", url, "--model", "pico", "--tokenizer", str(PICO)]
    argv += ["--endpoint-type", "completions", "--streaming"]
    argv += ["--concurrency", str(concurrency), "--request-count", str(requests)]
    argv += ["--synthetic-input-tokens-mean", str(input_tokens), "--synthetic-input-tokens-stddev", "0"]
    argv += ["--output-tokens-mean", str(output_tokens), "--output-tokens-stddev", "0"]
    argv += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    argv += ["--random-seed", str(seed), "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry"]
    return [*argv, "--workers-max", "1", "--record-processors", "1", "--export-level", "summary"]


def _command() -> list[str]:
    return [str(installed(AIPERF) / AIPERF.command[0]), *AIPERF.command[1:]]
