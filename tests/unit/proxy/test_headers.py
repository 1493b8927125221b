"""Headers that are refused before anything reads them."""

import pytest

from lockstep.errors import InvalidRequestError
from proxy.security.headers import check_request_id, problem


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"x-request-id", b"0b5e5a4e-8b0c-4f5b-9c59-1d3f3e6f7c11")],
        [(b"x-request-id", b"req_01/abc+def=~:@|.")],
        [(b"x-vllm-priority", b"-3")],
        [(b"accept", b"a"), (b"accept", b"b"), (b"cookie", b"a"), (b"cookie", b"b")],
    ],
)
def test_usual_headers_pass(headers: list[tuple[bytes, bytes]]) -> None:
    assert problem(headers) is None


@pytest.mark.parametrize(
    "value",
    [b"", b"x" * 129, b"two words", b"a\tb", b'quo"te', b"back\\slash", b"<b>", b"\xc3\xa4", b"a;b", b"a,b"],
)
def test_request_id_that_would_look_like_something_else_in_a_log(value: bytes) -> None:
    assert "X-Request-Id" in (problem([(b"x-request-id", value)]) or "")


@pytest.mark.parametrize("value", [b"high", b"1.5", b"", b"9" * 19, b"0x1"])
def test_priority_that_is_no_integer(value: bytes) -> None:
    """vLLM would take it for none."""
    assert "X-Vllm-Priority" in (problem([(b"x-vllm-priority", value)]) or "")


@pytest.mark.parametrize(
    "name",
    [b"authorization", b"x-api-key", b"host", b"content-length", b"x-request-id", b"x-data-parallel-rank"],
)
def test_header_that_must_have_one_meaning(name: bytes) -> None:
    assert "twice" in (problem([(name, b"1"), (b"accept", b"*/*"), (name, b"1")]) or "")


@pytest.mark.parametrize("request_id", ["cmpl-a\nINFO forged", "chatcmpl-\x1b[31m", "x" * 300, "chatcmpl-ä"])
def test_request_id_of_a_body(request_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        check_request_id(request_id)
