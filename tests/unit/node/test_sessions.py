"""Requests belong to the proxy that sent them, and each proxy gets one frame a step."""

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from lockstep.errors import InvalidRequestError, NodeLostError
from lockstep.node import sessions
from lockstep.node.sessions import ProxySession, SessionRegistry
from lockstep.rpc import codec
from lockstep.rpc.generated import lockstep_pb2 as pb


def frames(session: ProxySession) -> list[pb.NodeFrame]:
    taken = []
    while not session._frames.empty():
        frame = session._frames.get_nowait()
        assert frame is not None
        taken.append(frame)
    return taken


def step(*outputs: tuple[str, list[int], FinishReason | None]) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(rid, tokens, finish_reason=reason) for rid, tokens, reason in outputs],
        timestamp=5.0,
    )


@pytest.fixture
def registry() -> SessionRegistry:
    return SessionRegistry()


async def test_one_frame_per_step_and_proxy(registry: SessionRegistry) -> None:
    """Three requests of two proxies in one step: two frames, each with its proxy's own outputs."""
    first, second = ProxySession("a"), ProxySession("b")
    for request_id, session in (("a1", first), ("b1", second), ("a2", first)):
        registry.claim(request_id, session)
    load = pb.RankLoad(rank=1, num_running=3)
    registry.deliver(step(("a1", [1], None), ("b1", [2, 3], None), ("a2", [4], None)), load)
    (mine,), (other,) = frames(first), frames(second)
    assert mine.step.rank == 1
    assert mine.step.load.num_running == 3
    outputs = codec.decode_outputs(mine.step.outputs)
    assert [(o.request_id, o.new_token_ids) for o in outputs.outputs] == [("a1", [1]), ("a2", [4])]
    assert outputs.timestamp == 5.0
    assert [o.request_id for o in codec.decode_outputs(other.step.outputs).outputs] == ["b1"]


async def test_outputs_of_unknown_requests_are_dropped(registry: SessionRegistry) -> None:
    """A late output of an aborted request must not reach anybody."""
    session = ProxySession("a")
    registry.open(session)
    registry.deliver(step(("gone", [1], None)), pb.RankLoad())
    assert frames(session) == []


async def test_finished_requests_free_their_id(registry: SessionRegistry) -> None:
    session = ProxySession("a")
    registry.claim("r", session)
    assert registry.num_requests == 1
    registry.deliver(step(("r", [1], FinishReason.LENGTH)), pb.RankLoad())
    assert registry.num_requests == 0
    registry.claim("r", session)


async def test_an_id_in_use_is_refused_to_any_proxy(registry: SessionRegistry) -> None:
    first, second = ProxySession("a"), ProxySession("b")
    registry.claim("r", first)
    for session in (first, second):
        with pytest.raises(InvalidRequestError, match="r is in use"):
            registry.claim("r", session)


async def test_a_proxy_cannot_release_what_is_not_its_own(registry: SessionRegistry) -> None:
    """An abort frame with somebody else's id does nothing."""
    first, second = ProxySession("a"), ProxySession("b")
    registry.claim("r", first)
    assert registry.release(["r"], second) == []
    assert registry.num_requests == 1


async def test_close_names_all_requests_of_the_proxy(registry: SessionRegistry) -> None:
    first, second = ProxySession("a"), ProxySession("b")
    registry.open(first)
    for request_id, session in (("a1", first), ("a2", first), ("b1", second)):
        registry.claim(request_id, session)
    assert sorted(registry.close(first)) == ["a1", "a2"]
    assert registry.num_requests == 1
    assert registry.num_sessions == 0


async def test_a_dead_group_fails_every_request(registry: SessionRegistry) -> None:
    session = ProxySession("a")
    registry.claim("r", session)
    registry.fail_all(NodeLostError("gone"))
    (frame,) = frames(session)
    assert (frame.error.request_id, frame.error.code) == ("r", "NodeLostError")
    assert registry.num_requests == 0


async def test_a_proxy_that_does_not_read_is_marked_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded, so it cannot take the node's memory; nothing more is sent to it."""
    monkeypatch.setattr(sessions, "MAX_QUEUED_FRAMES", 2)
    session = ProxySession("a")
    for _ in range(2):
        session.send(pb.NodeFrame())
    assert not session.stuck
    for _ in range(3):
        session.send(pb.NodeFrame())
    assert session.stuck
    assert session._frames.qsize() == 3
    assert await session.next_frame() is None


async def test_what_was_sent_before_the_end_goes_out() -> None:
    """The proxy's own stream has ended, and an error that it caused is still for it."""
    session = ProxySession("a")
    session.send(pb.NodeFrame())
    session.end()
    assert await session.next_frame() == pb.NodeFrame()
    assert await session.next_frame() is None
