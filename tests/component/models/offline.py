"""Runs vLLM offline in a process of its own, in float32 and without graphs, on pico's checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("greedy_vllm.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def continued_by_vllm(
    directory: Path, engines: list[dict[str, Any]], count: int, prompts: list[list[int]], deadline_s: float
) -> list[dict[str, Any]]:
    """Token ids and speculation counters of each engine, `count` tokens greedily after each prompt.

    `engines` has the further flags of each; they run one after the other.
    """
    finished = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(directory), *map(json.dumps, (engines, count, prompts))],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        check=False,
        timeout=deadline_s,
    )
    assert finished.returncode == 0, finished.stderr.decode()[-4000:]
    answers: list[dict[str, Any]] = json.loads(finished.stdout.decode().splitlines()[-1])
    return answers
