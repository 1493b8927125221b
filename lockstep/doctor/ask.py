"""Asks nodes to describe themselves, all at once and with a deadline."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from lockstep.doctor.described import Described
from lockstep.doctor.findings import Finding, error
from lockstep.rpc.channel import connect
from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub


async def describe_all(
    addresses: Sequence[str], timeout_s: float, credentials: Credentials = NO_CREDENTIALS
) -> tuple[list[Described], list[Finding]]:
    """The nodes that answered, in the order of the addresses, and a finding for each that did not."""
    answers = await asyncio.gather(*(_describe(address, timeout_s, credentials) for address in addresses))
    nodes = [answer for answer in answers if isinstance(answer, Described)]
    return nodes, [answer for answer in answers if isinstance(answer, Finding)]


async def _describe(address: str, timeout_s: float, credentials: Credentials) -> Described | Finding:
    try:
        async with connect(address, credentials) as channel:
            description = await NodeStub(channel).Describe(
                pb.DescribeRequest(), timeout=timeout_s, metadata=credentials.metadata
            )
    except grpc.aio.AioRpcError as failure:
        fix = "a running node's --host and --port, reachable from here"
        if failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = f"no answer within {timeout_s:g} s"
        elif failure.code() == grpc.StatusCode.UNAUTHENTICATED:
            reason, fix = "it asks for a token, or for another one", "the node's LOCKSTEP_GRPC_TOKEN_FILE"
        else:
            reason = f"no answer: {failure.code().name.lower()}: {failure.details() or ''}"[:160]
        return Finding.of(
            f"node {address}",
            "answers",
            error(reason, fix),
        )
    return Described(address, description)
