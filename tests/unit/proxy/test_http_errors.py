"""Every error of the tree, as the client gets it from vLLM's own mapping."""

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError

from lockstep.errors import ERROR_CLASSES, InternalError, InvalidRequestError, NodeLostError, WrongLegError
from proxy import http_errors


@pytest.mark.parametrize("name", sorted(set(ERROR_CLASSES) - {"WrongLegError"}))
def test_status_of_each_class_is_what_it_declares(name: str) -> None:
    """No class is missed, and none is one that AsyncLLM.generate would turn into a bare 500."""
    cls = ERROR_CLASSES[name]
    error = http_errors.to_front_end(cls("Words."), "cmpl-1")
    body = create_error_response(error).error
    assert isinstance(error, VLLMClientError | GracefulHTTPError)
    assert (body.code, body.type) == (cls.http_status, cls.type)
    assert body.message.startswith("Words.")


def test_request_error_names_its_field_as_vllm_does() -> None:
    """The same class as vLLM's own refusals."""
    body = create_error_response(http_errors.to_front_end(InvalidRequestError("No.", "n"), "cmpl-1")).error
    assert (body.type, body.param) == ("BadRequestError", "n")


def test_service_error_names_the_request() -> None:
    """The cause is in the log only; the id is how to find it."""
    body = create_error_response(http_errors.to_front_end(NodeLostError("Gone."), "cmpl-7")).error
    assert body.message == "Gone. (request id: cmpl-7)"


def test_node_names_a_class_of_the_tree() -> None:
    """By the name that the wire carries."""
    error = http_errors.from_node("NodeLostError", "gone")
    assert (type(error), str(error)) == (NodeLostError, "gone")


@pytest.mark.parametrize("code", ["WrongLegError", "LockstepError", "SomethingNew", ""])
def test_other_codes_are_internal_errors(code: str) -> None:
    """A leg that is wrong was made here; what a newer node invents is not shown."""
    error = http_errors.from_node(code, "secret")
    assert type(error) is InternalError
    assert "secret" not in str(error)


def test_wrong_leg_is_never_the_clients_fault() -> None:
    """Not a 400 even if raised here."""
    error = http_errors.to_front_end(WrongLegError("x"), "cmpl-1")
    assert create_error_response(error).error.code == 500
