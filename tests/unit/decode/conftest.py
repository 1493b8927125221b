"""Puts the environment back that vLLM's CPU platform and a node's start write."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
