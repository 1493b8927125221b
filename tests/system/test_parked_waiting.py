"""Decode ranks that only wait for KV cost little processor time, and go on as soon as it is there."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
from pico_reference import first_not_greedy
from system.harness import Stack, completion_body, wait_until
from system.processes import engines
from system.prompts import prompts

FROZEN_S = 3.0
MOST_OF_A_CORE = 0.3


@contextmanager
def _frozen(node_pid: int) -> Iterator[None]:
    """The node and its engines do nothing at all, as if prefill took very long."""
    node = psutil.Process(node_pid)
    processes = [node, *node.children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def test_ranks_that_wait_for_kv_leave_their_cores_alone(stack: Stack) -> None:
    """A request waits 3 s for its KV: its rank and the peer each take less than a third of a core.

    The answer is pico's. Without parking both ranks make rounds of dummies on a whole core each.
    """
    stack.wait_idle()
    (prompt,) = prompts([300], seed=71)
    body = completion_body(prompt, max_tokens=20, ignore_eos=True)
    ranks = [psutil.Process(pid) for pid in engines(stack.decode)]
    assert len(ranks) == 2

    def waiting() -> bool:
        return sum(stack.decode.metric("lockstep_requests_waiting").values()) == 1

    with ThreadPoolExecutor(1) as pool:
        with _frozen(stack.prefill.pid):
            answer = pool.submit(httpx.post, f"{stack.url}/v1/completions", json=body, timeout=60)
            wait_until(waiting, "decode waits for the KV", timeout_s=10)
            before = [sum(rank.cpu_times()[:2]) for rank in ranks]
            time.sleep(FROZEN_S)  # the measurement itself
            used = [sum(rank.cpu_times()[:2]) - start for rank, start in zip(ranks, before, strict=True)]
            assert waiting()
        token_ids = answer.result().json()["choices"][0]["token_ids"]
    assert max(used) / FROZEN_S < MOST_OF_A_CORE, used
    assert len(token_ids) == 20
    assert first_not_greedy(prompt, token_ids) is None
