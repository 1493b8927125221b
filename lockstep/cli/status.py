"""The `lockstep status` command: asks a proxy for its status document and prints it."""

import asyncio
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from lockstep.cli.status_table import status_tables
from lockstep.errors import ConfigError, InternalError, UnavailableError
from lockstep.status import STATUS_PATH, StatusDocument

PIPE_WIDTH = 100
"""Columns where there is no terminal that has a width of its own."""


def fetch(url: str, timeout_s: float, key_file: Path | None = None) -> bytes:
    """The document as the proxy at `url` sent it; `key_file` holds the key to show it, where it asks for one.

    Raises UnavailableError, in words for one line, and ConfigError for a file without a key.
    """
    return asyncio.run(_fetch(url.rstrip("/"), timeout_s, key_headers(key_file)))


def parse(body: bytes) -> StatusDocument:
    """Read a document; raises InternalError for one of a version that this command does not know."""
    try:
        return msgspec.json.decode(body, type=StatusDocument)
    except msgspec.DecodeError as error:
        raise InternalError(f"the answer is no status document of this version: {error}") from error


def console() -> Console:
    """Standard output, wide enough for the tables when it is a pipe or a file."""
    here = Console()
    return here if here.is_terminal else Console(width=PIPE_WIDTH)


def show(body: bytes, url: str, out: Console) -> None:
    """Print a document as tables. Raises InternalError as `parse` does."""
    for part in status_tables(parse(body), url.rstrip("/")):
        out.print(part, highlight=False)


def key_headers(key_file: Path | None) -> dict[str, str]:
    """What shows the key of a file; none without a file. Raises ConfigError for a file without a key."""
    if key_file is None:
        return {}
    try:
        key = key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file: cannot read a key from {key_file}: {error}") from error
    return {"Authorization": f"Bearer {key}"}


async def _fetch(url: str, timeout_s: float, headers: dict[str, str]) -> bytes:
    # Straight to the address: a proxy of the environment is for other places. Certificates only where needed.
    verify = url.startswith("https:")
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=None, trust_env=False, verify=verify) as client,
        ):
            answer = await client.get(url + STATUS_PATH, headers=headers)
    except TimeoutError:
        raise UnavailableError(f"no answer from {url} within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"no answer from {url}: {error or type(error).__name__}") from error
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise UnavailableError(f"{url} asks for the key of an admin; give --key-file")
    if answer.status_code != httpx.codes.OK:
        raise UnavailableError(f"{url}{STATUS_PATH} answers {answer.status_code}: is this a Lockstep proxy?")
    return answer.content
