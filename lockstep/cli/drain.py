"""The `lockstep drain` command: asks nodes to drain and exit, and tells how far they are."""

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio

from lockstep.errors import ConfigError
from lockstep.rpc.channel import connect
from lockstep.rpc.credentials import CallerConfig, Credentials, of_caller
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub

Say = Callable[[str], None]

_SCHEME = "grpc://"
_ANSWER_S = 10.0
"""A node says at once that it drains, and then something each second."""


def drain_nodes(nodes: Sequence[str], timeout_s: float | None, say: Say, *, move: bool = False) -> bool:
    """Drain all at once; returns whether each of them did. `move`: what runs goes on elsewhere at once.

    Hosts of one group are to be drained together: each waits for the requests of the others. The nodes are
    shown the credentials that a proxy in this environment would show. Raises ConfigError.
    """
    credentials = of_caller(CallerConfig.load([], "lockstep drain", "")[0])
    addresses = [_address(node) for node in nodes]

    async def all_of_them() -> list[bool]:
        request = pb.DrainRequest(timeout_s=timeout_s, move=move)
        return await asyncio.gather(*(_drain(address, request, credentials, say) for address in addresses))

    return all(asyncio.run(all_of_them()))


def _address(node: str) -> str:
    address = node.removeprefix(_SCHEME).rstrip("/")
    if "/" in address or ":" not in address:
        raise ConfigError(f"{node}: give a node's gRPC address, HOST:PORT or {_SCHEME}HOST:PORT")
    return address


async def _drain(address: str, request: pb.DrainRequest, credentials: Credentials, say: Say) -> bool:
    drains = False
    try:
        async with connect(address, credentials) as channel:
            call = NodeStub(channel).Drain(request, metadata=credentials.metadata)
            while (progress := await asyncio.wait_for(call.read(), _ANSWER_S)) is not grpc.aio.EOF:
                drains = True
                say(f"{address}: {_in_words(progress)}")
                if progress.done:
                    return True
    except grpc.aio.AioRpcError as error:
        if drains:
            say(f"{address}: it is gone before it had drained: {error.code().name.lower()}")
        else:
            say(f"{address}: not drained: {error.code().name.lower()}: {error.details() or ''}"[:200])
        return False
    except TimeoutError:
        say(f"{address}: nothing heard for {_ANSWER_S:g} s")
        return False
    say(f"{address}: it hung up")
    return False


def _in_words(progress: pb.DrainProgress) -> str:
    if progress.done:
        moved = f"; {progress.num_moved} request(s) go on elsewhere" if progress.num_moved else ""
        return f"drained, it exits{moved}"
    waits_for = progress.waits_for or f"{progress.num_requests} request(s)"
    return f"waits for {waits_for}, {progress.left_s:.0f} s at most"
