"""What a node tells a proxy of its prefix caches, over the wire."""

import grpc.aio
from component.node.test_server import Running, node

from lockstep.rpc.generated import lockstep_pb2 as pb

__all__ = ["node"]  # pytest finds the fixture by its name here


def changed(node: Running, stored: bytes, removed: bytes = b"", *, snapshot: bool = False) -> None:
    answer = {"number": 1, "snapshot": snapshot, "stored": stored, "removed": removed}
    node.registry.kv_blocks.take(1, answer, node.registry.broadcast)


async def told(call: grpc.aio.StreamStreamCall) -> pb.KVBlocks:
    frame = await call.read()
    assert frame.WhichOneof("frame") == "kv_blocks"
    return frame.kv_blocks


async def test_session_begins_with_a_snapshot_and_goes_on_with_changes(node: Running) -> None:
    """However late the proxy comes, it knows what was stored before."""
    changed(node, b"A" * 8 + b"B" * 8, snapshot=True)
    async with node.session() as call:
        first = await told(call)
        changed(node, b"C" * 8, b"A" * 8)
        second = await told(call)
    assert (first.rank, first.number, first.snapshot) == (1, 1, True)
    assert {first.stored[:8], first.stored[8:]} == {b"A" * 8, b"B" * 8}
    assert second == pb.KVBlocks(rank=1, number=2, stored=b"C" * 8, removed=b"A" * 8)


async def test_proxy_gets_a_snapshot_when_it_asks(node: Running) -> None:
    """As after a gap: it has the number of the last change, and the next one follows it."""
    async with node.session() as call:
        changed(node, b"A" * 8, snapshot=True)
        await told(call)
        await call.write(pb.ProxyFrame(kv_blocks=pb.KVBlocksRequest(rank=1)))
        assert await told(call) == pb.KVBlocks(rank=1, number=1, snapshot=True, stored=b"A" * 8)
        changed(node, b"B" * 8)
        assert (await told(call)).number == 2


async def test_node_that_tells_nothing_sends_nothing(node: Running) -> None:
    """Nor does it answer; the session goes on."""
    async with node.session() as call:
        await call.write(pb.ProxyFrame(kv_blocks=pb.KVBlocksRequest(rank=1)))
        await call.write(pb.ProxyFrame(abort=pb.AbortRequests(request_ids=["r1"])))
        node.registry.broadcast(pb.NodeFrame(load=pb.RankLoad(rank=1)))
        assert (await call.read()).load.rank == 1
