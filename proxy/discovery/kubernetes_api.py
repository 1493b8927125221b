"""The part of Kubernetes' API that this needs: list a collection by label, then watch it, over httpx."""

import json
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lockstep.errors import ConfigError
from proxy.discovery.addresses import join_host_port

Object = dict[str, Any]
"""One object of the API, as JSON."""

_PAGE = 500
_CALL_TIMEOUT_S = 10.0
_WATCH_S = 60
"""The server ends a watch after this; one that is silent for longer is of a broken connection."""
_WATCH_GRACE_S = 15.0


class ApiError(Exception):
    """The API server cannot be reached, or refuses; worth another try later."""


class GoneError(Exception):
    """The server has forgotten the resource version (410): list anew."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and how it is spoken to. The token is rotated, so it is read for each call."""

    url: str
    token_file: Path
    verify: ssl.SSLContext | bool
    """True: by the certificates that the system trusts."""
    namespace: str

    @classmethod
    def of_pod(cls, url: str, credentials_dir: Path, namespace: str) -> "Access":
        """What is not given, from what Kubernetes gives each pod. Raises ConfigError that names the flag."""
        if not url:
            try:
                host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            except KeyError:
                raise ConfigError("--k8s-api-url: this is no pod of Kubernetes; give the URL") from None
            url = f"https://{join_host_port(host, port)}"
        if not namespace:
            try:
                namespace = (credentials_dir / "namespace").read_text().strip()
            except OSError as error:
                raise ConfigError(f"--k8s-namespace: not given, and {error}") from error
        verify: ssl.SSLContext | bool = True
        ca_file = credentials_dir / "ca.crt"
        if ca_file.exists():
            try:
                verify = ssl.create_default_context(cafile=str(ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--k8s-credentials-dir: {ca_file}: {error}") from error
        return cls(url, credentials_dir / "token", verify, namespace)


@dataclass(slots=True)
class Listing:
    """The objects by name, and the version as of which they are so."""

    resource_version: str
    objects: dict[str, Object] = field(default_factory=dict)


class Collection:
    """One kind of object in one namespace, by label selector; to be used as a context manager."""

    def __init__(self, access: Access, group_version: str, plural: str, selector: str) -> None:
        self._access = access
        self._path = f"/apis/{group_version}/namespaces/{access.namespace}/{plural}"
        self._selector = selector
        # An HTTP proxy of the environment is for the world outside; the API server is inside.
        self._client = httpx.AsyncClient(
            base_url=access.url, verify=access.verify, timeout=_CALL_TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> "Collection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def list(self) -> Listing:
        """All objects, page by page. Raises ApiError; GoneError when it has to begin anew."""
        objects: dict[str, Object] = {}
        page: Object = {}
        token = ""
        while not page or token:
            given = {"continue": token} if token else {}
            try:
                answer = await self._client.get(
                    self._path,
                    params={"labelSelector": self._selector, "limit": _PAGE, **given},
                    headers=self._headers(),
                )
            except httpx.HTTPError as error:
                raise ApiError(f"{type(error).__name__}: {error}") from error
            page = _answer(answer.status_code, answer.content)
            objects |= {item["metadata"]["name"]: item for item in page.get("items") or ()}
            token = page["metadata"].get("continue") or ""
        return Listing(page["metadata"]["resourceVersion"], objects)

    async def watch(self, listing: Listing) -> AsyncIterator[None]:
        """Keep the listing up to date; yields after each change of an object.

        Ends when the server ends the watch, which it does now and then: watch again from where the listing
        is. Raises ApiError, or GoneError.
        """
        params = {
            "watch": "1",
            "labelSelector": self._selector,
            "resourceVersion": listing.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = httpx.Timeout(_CALL_TIMEOUT_S, read=_WATCH_S + _WATCH_GRACE_S)
        try:
            async with self._client.stream(
                "GET", self._path, params=params, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    _answer(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line and _apply(listing, _event(line)):
                        yield
        except httpx.HTTPError as error:
            raise ApiError(f"{type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        try:
            headers["Authorization"] = f"Bearer {self._access.token_file.read_text().strip()}"
        except FileNotFoundError:
            pass  # as behind `kubectl proxy`, which has its own
        except OSError as error:
            raise ApiError(f"the token cannot be read: {error}") from error
        return headers


def _event(line: str) -> Object:
    try:
        event: Object = json.loads(line)
    except ValueError as error:
        raise ApiError(f"not an event: {line[:80]!r}") from error
    return event


def _apply(listing: Listing, event: Object) -> bool:
    """Take one event over; returns whether an object has changed. Raises ApiError, GoneError."""
    kind, thing = event.get("type"), event.get("object") or {}
    if kind == "ERROR":
        raise _error(int(thing.get("code") or 0), thing)
    metadata = thing["metadata"]
    listing.resource_version = metadata["resourceVersion"]
    if kind == "BOOKMARK":
        return False
    if kind == "DELETED":
        listing.objects.pop(metadata["name"], None)
    else:
        listing.objects[metadata["name"]] = thing
    return True


def _answer(code: int, body: bytes) -> Object:
    """The JSON of an answer that is well. Raises ApiError, GoneError."""
    try:
        content: Object = json.loads(body)
    except ValueError:
        content = {}
    if code != httpx.codes.OK:
        raise _error(code, content)
    if "metadata" not in content:
        raise ApiError("the answer is not a list of the API")
    return content


def _error(code: int, status: Object) -> ApiError | GoneError:
    """Of a Status object, which the server answers an error with."""
    message = str(status.get("message") or "")[:200]
    return GoneError(message) if code == httpx.codes.GONE else ApiError(f"{code}: {message}")
