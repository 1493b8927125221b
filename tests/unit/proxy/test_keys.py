"""API keys: how they are written, found, and read again."""

import hashlib
import os
from argparse import Namespace
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from proxy.admission.config import AdmissionConfig
from proxy.security import key_source
from proxy.security.key_source import KeySource, take
from proxy.security.keys import KeyRing, parse

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def test_lines_give_label_key_and_what_it_may() -> None:
    """Comments and empty lines are for people."""
    first, second, third = parse(
        f"""
        # of the web team
        web {KEY} max_requests=4 tokens_per_minute=60000   # a comment
        ops {OTHER} admin priority=-5
        batch sha256:{hashlib.sha256(b"sk-of-the-batch-jobs").hexdigest().upper()} priority=10
        """,
        "file",
    )
    assert (first.label, first.admin, first.max_requests, first.tokens_per_minute) == ("web", False, 4, 60000)
    assert (second.label, second.admin, second.max_requests, second.priority) == ("ops", True, None, -5)
    assert KeyRing([third]).find(b"sk-of-the-batch-jobs") is third
    assert first.priority == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("web", "give LABEL KEY"),
        ("we/b sk-0123456789abcdef", "a label is"),
        ("web short", "16 or more"),
        ("web sha256:abc", "64 hex digits"),
        (f"web {KEY} max_requests=0", "max_requests=N"),
        (f"web {KEY} limit=3", "max_requests=N"),
        (f"web {KEY} {OTHER}", "max_requests=N"),
    ],
)
def test_wrong_line_is_named_and_not_shown(line: str, message: str) -> None:
    """Logs and terminals are not the place for a key."""
    with pytest.raises(ConfigError, match=f"--api-key-file: line 2: .*{message}") as error:
        parse(f"ok {'x' * 20}\n{line}", "--api-key-file")
    assert "sk-" not in str(error.value)
    assert "short" not in str(error.value)


@pytest.mark.parametrize("lines", [f"a {KEY}\na {OTHER}", f"a {KEY}\nb {KEY}"])
def test_label_or_key_twice_is_refused(lines: str) -> None:
    """Whose request it is would be a guess."""
    with pytest.raises(ConfigError, match="twice"):
        KeyRing(parse(lines, "file"))


def test_only_the_whole_key_is_found() -> None:
    ring = KeyRing(parse(f"a {KEY}\nb {OTHER}", "file"))
    found = ring.find(OTHER.encode())
    assert found is not None
    assert found.label == "b"
    for shown in (b"", KEY[:-1].encode(), KEY.encode() + b" ", KEY.upper().encode(), b"\xff\xfe"):
        assert ring.find(shown) is None


def test_key_is_not_in_what_is_printed() -> None:
    """Neither it nor the digest that stands for it."""
    (key,) = parse(f"a {KEY}", "file")
    assert KEY not in repr(key)
    assert str(key.digest) not in repr(key)


def test_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is taken away without a restart; a file with a mistake changes nothing."""
    monkeypatch.setattr(key_source, "_LOOK_INTERVAL_S", 0.0)
    file = tmp_path / "keys"
    file.write_text(f"a {KEY}\n")
    source = KeySource((), str(file))
    assert source.ring().find(KEY.encode())
    file.write_text(f"b {OTHER} admin\n")
    assert source.ring().find(KEY.encode()) is None
    assert source.ring().find(OTHER.encode())
    file.write_text("b\n")
    assert source.ring().find(OTHER.encode())
    file.unlink()
    assert source.ring().find(OTHER.encode())


def test_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    """It does not mean that none are asked for."""
    file = tmp_path / "keys"
    file.write_text("# none\n")
    source = KeySource((), str(file))
    assert source.configured
    assert not source.ring()


def test_keys_of_the_environment_and_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own are taken from it, since its check would refuse all others."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"web {KEY}; ops {OTHER} admin")
    monkeypatch.setenv("VLLM_API_KEY", "short")
    args = Namespace(api_key=None)
    ring = take(AdmissionConfig(), args).ring()
    found = [ring.find(key) for key in (KEY.encode(), OTHER.encode(), b"short")]
    assert [key and (key.label, key.admin) for key in found] == [
        ("web", False),
        ("ops", True),
        ("vllm-1", True),
    ]
    assert "VLLM_API_KEY" not in os.environ


def test_flag_of_vllm_goes_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM (middleware/register.py)."""
    monkeypatch.setenv("VLLM_API_KEY", "of the variable")
    args = Namespace(api_key=["one", "two"])
    ring = take(AdmissionConfig(), args).ring()
    assert [bool(ring.find(key)) for key in (b"one", b"two", b"of the variable")] == [True, True, False]
    assert args.api_key is None
