"""Makes a refusal of what vLLM's own validators of a request body trip over: a value of the wrong type.

Those that see the body before its fields are checked (`model_validator(mode="before")`, as in
entrypoints/openai/completion/protocol.py:473) use values whose type nobody has looked at yet. The error is
Python's, and a plain vLLM server answers it with status 500.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

TRIPS = (AttributeError, LookupError)
"""What a validator raises by mistake; pydantic takes a ValueError for a refusal, and passes these on.

A TypeError it passes on too, but that vLLM makes a 400 of (serve/exception_handling/register.py:37).
"""

Errors = list[dict[str, Any]]
Validate = Callable[..., tuple[Any, Errors]]


def refuse_wrong_types(app: FastAPI) -> None:
    """Answer such a body as vLLM answers any other that does not fit: with the field's name."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            for field in route.dependant.body_params:
                field.validate = _guarded(field.validate, field.field_info.annotation)  # type: ignore[method-assign]


def _guarded(validate: Validate, annotation: Any) -> Validate:
    def guarded(value: Any, *args: Any, loc: tuple[int | str, ...] = (), **kwargs: Any) -> tuple[Any, Errors]:
        try:
            return validate(value, *args, loc=loc, **kwargs)
        except TRIPS as error:
            whole = {
                "type": "value_error",
                "loc": loc,
                "msg": f"A value has a wrong type: {error}",
                "input": value,
            }
            return None, list(_wrong_fields(annotation, value, loc)) or [whole]

    return guarded


def _wrong_fields(model: Any, body: Any, loc: tuple[int | str, ...]) -> Iterator[dict[str, Any]]:
    """What pydantic says of each field by itself."""
    if not (isinstance(model, type) and issubclass(model, BaseModel) and isinstance(body, dict)):
        return
    for key, adapter in _adapters(model).items():
        if key not in body:
            continue
        try:
            adapter.validate_python(body[key])
        except ValidationError as wrong:
            for error in wrong.errors(include_url=False):
                yield {**error, "loc": (*loc, key, *error["loc"])}
        except TRIPS as error:
            yield {"type": "value_error", "loc": (*loc, key), "msg": str(error), "input": body[key]}


@functools.cache
def _adapters(model: type[BaseModel]) -> dict[str, TypeAdapter[Any]]:
    """By the name in the body. Made once: it takes 20 ms for a chat request."""
    return {
        field.alias or name: TypeAdapter(field.rebuild_annotation())
        for name, field in model.model_fields.items()
    }
