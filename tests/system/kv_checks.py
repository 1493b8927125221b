"""What holds around every scenario: KV bytes move, both pools are as before, a plain request works."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from system.harness import Stack, completion_body, wait_until

QUARANTINED = "lockstep_kv_quarantined_blocks"


def pushed_bytes(stack: Stack) -> float:
    """KV bytes that prefill has written to decode ranks."""
    return sum(stack.prefill.by_rank("lockstep_kv_pushed_bytes_total").values())


@contextmanager
def kv_moves_and_returns(stack: Stack) -> Iterator[None]:
    """Bytes were pushed meanwhile; afterwards both sides' usage is what it was, and the stack answers."""
    pushed_before, usage_before = pushed_bytes(stack), stack.kv_usage()
    yield
    stack.wait_idle()
    assert pushed_bytes(stack) > pushed_before
    plain_request(stack)
    wait_until(lambda: stack.kv_usage() == usage_before, "KV usage as before", timeout_s=20)
    assert not any(stack.decode.by_rank(QUARANTINED).values())


def plain_request(stack: Stack) -> None:
    """The shortest sign that the stack still serves."""
    body = completion_body([10, 11, 12, 13], max_tokens=4, ignore_eos=True)
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
