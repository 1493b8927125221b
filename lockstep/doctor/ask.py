"""Asks nodes to describe themselves, all at once and with a deadline."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from lockstep.doctor.described import Described
from lockstep.doctor.findings import Finding, error
from lockstep.rpc.channel import connect
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub


async def describe_all(addresses: Sequence[str], timeout_s: float) -> tuple[list[Described], list[Finding]]:
    """The nodes that answered, in the order of the addresses, and a finding for each that did not."""
    answers = await asyncio.gather(*(_describe(address, timeout_s) for address in addresses))
    nodes = [answer for answer in answers if isinstance(answer, Described)]
    return nodes, [answer for answer in answers if isinstance(answer, Finding)]


async def _describe(address: str, timeout_s: float) -> Described | Finding:
    try:
        async with connect(address) as channel:
            description = await NodeStub(channel).Describe(pb.DescribeRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as failure:
        if failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = f"no answer within {timeout_s:g} s"
        else:
            reason = f"no answer: {failure.code().name.lower()}: {failure.details() or ''}"[:160]
        return Finding.of(
            f"node {address}",
            "answers",
            error(reason, "a running node's --host and --port, reachable from here"),
        )
    return Described(address, description)
