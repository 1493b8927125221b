"""Kubernetes' API over real HTTP: EndpointSlices of one namespace, listed in pages and watched.

It refuses what the real one refuses: a wrong token (401), another namespace or resource than the service
account may read (403), a bad selector or version (400), a version that it has forgotten (410, as an answer or
as an event).
"""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NAMESPACE = "serving"
TOKEN = "a-token"
PAGE = 2
"""The real server may give fewer than were asked for, too."""

_SELECTOR = re.compile(r"([\w./-]+)==?([\w.-]*)")


def endpoint_slice(
    name: str,
    role: str,
    *endpoints: str,
    port: int,
    family: str = "IPv4",
    port_name: str = "grpc",
    **labels: str,
) -> dict[str, Any]:
    """One slice as the endpoint slice controller writes it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"component": role, **labels}},
        "addressType": family,
        "endpoints": [{"addresses": [address], "conditions": {"ready": False}} for address in endpoints]
        or None,
        "ports": [
            {"name": port_name, "port": port, "protocol": "TCP"},
            {"name": "http", "port": 1, "protocol": "TCP"},
        ],
    }


class FakeKubernetes:
    """Objects and their history; `gone_as_event` chooses how a forgotten version is refused in a watch."""

    def __init__(self) -> None:
        self.token = TOKEN
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.oldest = 100
        self.gone_as_event = True
        self.lists = 0
        self.watches = 0
        self.refused: list[int] = []
        self._history: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self._changed = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "FakeKubernetes":
        """Listen, on the same port as before after a stop."""
        route = "/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        app = Starlette(routes=[Route(route, self._collection)])
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        return self

    async def stop(self) -> None:
        """End all connections."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            self._wake()
            await self._task
            self._server = None

    def put(self, one: dict[str, Any]) -> None:
        """Add or replace an object."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        one = json.loads(json.dumps(one))
        one["metadata"]["resourceVersion"] = str(self.version)
        self.objects[name] = one
        self._record(kind, one)

    def delete(self, name: str) -> None:
        self.version += 1
        one = self.objects.pop(name)
        self._record(
            "DELETED", {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        )

    def forget(self) -> None:
        """Compact: no version before this one is known; watches that are open are ended."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()
        self._wake()

    def _record(self, kind: str, one: dict[str, Any]) -> None:
        self._history.append((self.version, {"type": kind, "object": one}, one["metadata"]["labels"]))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _collection(self, request: Request) -> Response:
        path, query = request.path_params, request.query_params
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return self._status(401, "Unauthorized", "Unauthorized")
        resource = f"{path['plural']}.{path['group']}"
        if path["namespace"] != NAMESPACE or resource != "endpointslices.discovery.k8s.io":
            text = (
                f'{resource} is forbidden: User "proxy" cannot list it in the namespace "{path["namespace"]}"'
            )
            return self._status(403, "Forbidden", text)
        selector: dict[str, str] = {}
        for part in filter(None, query.get("labelSelector", "").split(",")):
            match = _SELECTOR.fullmatch(part)
            if match is None:
                return self._status(400, "BadRequest", "unable to parse requirement")
            selector[match[1]] = match[2]
        if query.get("watch") in ("1", "true"):
            return self._watch(query, selector)
        return self._list(query, selector)

    def _list(self, query: Any, selector: dict[str, str]) -> Response:
        self.lists += 1
        found = [one for one in self.objects.values() if _matches(one["metadata"]["labels"], selector)]
        version, first = str(self.version), 0
        if query.get("continue"):
            version, _, offset = query["continue"].partition(":")
            first = int(offset)
            if int(version) < self.oldest:
                return self._status(410, "Expired", "The provided continue parameter is too old")
        page = found[first : first + min(PAGE, int(query.get("limit", PAGE)))]
        metadata = {"resourceVersion": version}
        if first + len(page) < len(found):
            metadata["continue"] = f"{version}:{first + len(page)}"
        return JSONResponse({"kind": "EndpointSliceList", "metadata": metadata, "items": page or None})

    def _watch(self, query: Any, selector: dict[str, str]) -> Response:
        self.watches += 1
        try:
            since = int(query["resourceVersion"])
        except (KeyError, ValueError):
            return self._status(400, "BadRequest", "invalid resource version")
        gone = {
            "code": 410,
            "reason": "Expired",
            "message": f"too old resource version: {since} ({self.oldest})",
        }
        if since < self.oldest:
            if not self.gone_as_event:
                return self._status(410, "Expired", str(gone["message"]))
            event = {"type": "ERROR", "object": {"kind": "Status", **gone}}
            return StreamingResponse(iter([json.dumps(event) + "\n"]), media_type="application/json")
        bookmarks = query.get("allowWatchBookmarks") == "true"
        deadline_s = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds", 1800))
        return StreamingResponse(
            self._events(since, selector, bookmarks, deadline_s), media_type="application/json"
        )

    async def _events(
        self, since: int, selector: dict[str, str], bookmarks: bool, deadline_s: float
    ) -> AsyncIterator[str]:
        if bookmarks and since >= self.oldest:
            metadata = {"resourceVersion": str(self.version if not self._history else since)}
            yield (
                json.dumps({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}})
                + "\n"
            )
        while self._server is not None and not self._server.should_exit and since >= self.oldest:
            changed = self._changed
            for version, event, labels in list(self._history):
                if version > since:
                    since = version
                    if _matches(labels, selector):
                        yield json.dumps(event) + "\n"
            try:
                async with asyncio.timeout_at(deadline_s):
                    await changed.wait()
            except TimeoutError:
                return

    def _status(self, code: int, reason: str, message: str) -> Response:
        self.refused.append(code)
        body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
        return JSONResponse(body, status_code=code)


def _matches(labels: dict[str, str], selector: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())
