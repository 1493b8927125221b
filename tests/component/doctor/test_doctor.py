"""`lockstep doctor` as a process, against real node servers and a small HTTP server in the proxy's place."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.cli.status_documents import document as status_document
from unit.cli.status_documents import node as listed
from unit.doctor.healthy import decode, prefill, rank

from lockstep.doctor.described import Described
from lockstep.health import bind
from lockstep.node.server import NodeService, start_server
from lockstep.node.sessions import SessionRegistry
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.status import StatusDocument
from prefill_node.service import ROLE

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
DEADLINE_S = 60.0


class State:
    """A node that only describes itself."""

    engine = None
    draining = False

    def __init__(self, description: pb.NodeDescription) -> None:
        self.description = description
        self.ready = True

    def loads(self) -> list[pb.RankLoad]:
        return []

    def status(self) -> pb.NodeStatus | None:
        return None


@asynccontextmanager
async def serving(*nodes: Described) -> AsyncIterator[list[str]]:
    """Each node on a port of its own; yields the addresses."""
    servers, addresses = [], []
    for node in nodes:
        with bind("127.0.0.1", 0, "--port") as free:
            port = free.getsockname()[1]
        service = NodeService(ROLE, State(node.description), SessionRegistry())
        server, _ = await start_server(service, "127.0.0.1", port)
        servers.append(server)
        addresses.append(f"127.0.0.1:{port}")
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(grace=0)


@contextmanager
def proxy(answer: StatusDocument) -> Iterator[str]:
    """Answers /lockstep/status with the document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(answer))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def run(*args: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        LOCKSTEP, "doctor", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode, out.decode(), err.decode()


def at(addresses: list[str]) -> list[str]:
    return [f"--node={address}" for address in addresses]


def wrong(out: str) -> list[dict[str, Any]]:
    return [finding for finding in json.loads(out)["findings"] if finding["level"] != "ok"]


async def test_healthy_nodes_without_a_proxy() -> None:
    """Asked over gRPC; tables within 100 columns, what is well included; code 0."""
    async with serving(prefill(), decode()) as addresses:
        code, out, err = await run(*at(addresses))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"prefill {addresses[0]}" in lines[0]
    assert any(line.split() == ["ok", "runner", "model", "runner", "V1"] for line in lines)
    assert any("decode_node.scheduler.LockstepScheduler" in line for line in lines)
    assert lines[-1].endswith(" ok, 0 warning, 0 error")
    assert max(map(len, lines)) <= 100


async def test_error_ends_with_code_1_and_names_flag_and_value() -> None:
    """As JSON: only that finding is not well."""
    broken = decode(ranks=[rank(0, "10.0.0.2"), rank(1, "10.0.0.2", max_num_batched_tokens=8)])
    async with serving(prefill(), broken) as addresses:
        code, out, _ = await run(*at(addresses), "--json")
    assert code == 1
    assert json.loads(out)["healthy"] is False
    assert wrong(out) == [
        {
            "where": f"decode {addresses[1]}",
            "check": "token budget",
            "level": "error",
            "text": "8 tokens a step, 4 rows need 12",
            "instead": "--max-num-batched-tokens 12",
        }
    ]


async def test_warnings_end_with_code_0() -> None:
    """Flags for comparison are on."""
    async with serving(prefill(), decode(engine={"arrival_padding": False})) as addresses:
        code, out, _ = await run(*at(addresses), "--json")
    assert code == 0
    assert [finding["check"] for finding in wrong(out)] == ["arrival padding"]


async def test_proxy_says_which_nodes_there_are() -> None:
    """And is judged itself."""
    async with serving(prefill(), decode()) as (prefill_address, decode_address):
        answer = status_document(
            [listed("prefill", prefill_address, []), listed("decode", decode_address, [])], version="0.2.0"
        )
        with proxy(replace(answer)) as url:
            code, out, _ = await run("--url", url, "--json")
    assert code == 1
    assert [(finding["where"], finding["check"]) for finding in wrong(out)] == [(f"proxy {url}", "version")]
    places = {finding["where"] for finding in json.loads(out)["findings"]}
    assert places >= {f"prefill {prefill_address}", f"decode {decode_address}"}


async def test_node_that_does_not_answer_is_an_error() -> None:
    """The others are judged all the same."""
    with bind("127.0.0.1", 0, "--port") as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    async with serving(prefill(), decode()) as addresses:
        code, out, _ = await run(*at([*addresses, nobody]), "--json")
    assert code == 1
    (finding,) = wrong(out)
    assert (finding["where"], finding["check"]) == (f"node {nobody}", "answers")
    assert finding["text"].startswith("no answer")


@pytest.mark.parametrize("args", [[], ["--json"]])
async def test_no_proxy_is_one_line_and_code_1(args: list[str]) -> None:
    """It says how to do without."""
    with bind("127.0.0.1", 0, "--port") as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, out, err = await run("--url", url, *args)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"lockstep doctor: no answer from {url}: ")
    assert "--node HOST:PORT" in err
