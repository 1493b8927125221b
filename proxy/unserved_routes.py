"""Routes of vLLM's pooling models: not served, with a 404 that says so."""

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request

PATHS = (
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
)
"""vLLM entrypoints/pooling/*/api_router.py; a plain server of a generating model has none of them either."""


def add_unserved(app: FastAPI) -> None:
    """Answer the pooling routes with vLLM's own error shape, and say why there is nothing here."""

    async def unserved(request: Request) -> None:
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            f"{request.url.path} is not served: this deployment generates text. Embeddings, scores and "
            "classes need a pooling model, which has no decode to separate from its prefill.",
        )

    for path in PATHS:
        app.add_api_route(path, unserved, methods=["GET", "POST"], include_in_schema=False)
