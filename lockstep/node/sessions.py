"""Which proxy each request belongs to, and one outgoing queue of frames for each proxy."""

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from lockstep.errors import InvalidRequestError, LockstepError
from lockstep.node.announced import AnnouncedEngines
from lockstep.node.kv_events.blocks import KVBlocks
from lockstep.rpc import codec
from lockstep.rpc.generated import lockstep_pb2 as pb

logger = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 8192
"""A proxy that has not read so many frames is stuck: its session is closed, its requests are aborted."""


MAX_REMEMBERED_IDS = 8192
"""Ended requests of one session that an abort may still name; each is a few dozen bytes."""


class ProxySession:
    """One proxy's stream: the frames that wait for it and the ids of its requests."""

    def __init__(self, proxy_id: str) -> None:
        self.proxy_id = proxy_id
        self.request_ids: set[str] = set()
        self._finished: OrderedDict[str, None] = OrderedDict()
        self.stuck = False
        self._frames: asyncio.Queue[pb.NodeFrame | None] = asyncio.Queue()

    def note_finished(self, request_id: str) -> None:
        """Remember an id that ended by itself: its KV blocks may still wait for a decode rank."""
        self._finished[request_id] = None
        if len(self._finished) > MAX_REMEMBERED_IDS:
            self._finished.popitem(last=False)

    def take_finished(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the ids that ended by themselves in this session; each is given once."""
        return [rid for rid in request_ids if self._finished.pop(rid, rid) is None]

    def send(self, frame: pb.NodeFrame) -> None:
        """Queue a frame; never waits, since one proxy must not hold up the others."""
        if self.stuck:
            return
        if self._frames.qsize() >= MAX_QUEUED_FRAMES:
            logger.error("proxy %s does not read its stream; closing its session", self.proxy_id)
            self.stuck = True
            self.end()
        else:
            self._frames.put_nowait(frame)

    def end(self) -> None:
        """Have `next_frame` end, once what was queued before is out or, where the proxy is stuck, at once."""
        self._frames.put_nowait(None)

    async def next_frame(self) -> pb.NodeFrame | None:
        """Wait for the next one; None at the end."""
        frame = await self._frames.get()
        return None if self.stuck else frame

    def send_error(self, request_id: str, error: LockstepError) -> None:
        self.send(
            pb.NodeFrame(
                error=pb.RequestError(request_id=request_id, code=type(error).__name__, message=str(error))
            )
        )


class SessionRegistry:
    """All sessions of a node; used from the event loop only."""

    def __init__(self) -> None:
        self._sessions: set[ProxySession] = set()
        self._owner: dict[str, ProxySession] = {}
        self.kv_blocks = KVBlocks()
        self.decode_engines = AnnouncedEngines()
        self.empty_since_s = time.monotonic()
        """When the last request ended; of no use while there is one."""

    @property
    def num_requests(self) -> int:
        return len(self._owner)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, session: ProxySession) -> None:
        self._sessions.add(session)

    def close(self, session: ProxySession) -> list[str]:
        """Forget the session and return the ids of its requests, which the caller aborts."""
        self._sessions.discard(session)
        return self.release(list(session.request_ids), session)

    def claim(self, request_id: str, session: ProxySession) -> None:
        """Raises InvalidRequestError when the id is in use, by whichever proxy."""
        if request_id in self._owner:
            raise InvalidRequestError(f"request id {request_id} is in use", param="request_id")
        self._owner[request_id] = session
        session.request_ids.add(request_id)

    def release(self, request_ids: Iterable[str], session: ProxySession) -> list[str]:
        """Forget those of the ids that the session owns, and return them."""
        owned = [rid for rid in request_ids if self._owner.get(rid) is session]
        for request_id in owned:
            del self._owner[request_id]
            session.request_ids.discard(request_id)
        if owned and not self._owner:
            self.empty_since_s = time.monotonic()
        return owned

    def deliver(self, outputs: EngineCoreOutputs, load: pb.RankLoad) -> None:
        """Split one engine step by proxy: one frame each, whatever the number of requests in it."""
        by_session: dict[ProxySession, list[EngineCoreOutput]] = defaultdict(list)
        for output in outputs.outputs:
            session = self._owner.get(output.request_id)
            if session is None:
                continue  # aborted meanwhile, or the warm-up's
            by_session[session].append(output)
            if output.finished:
                self.release([output.request_id], session)
                session.note_finished(output.request_id)
        for session, mine in by_session.items():
            step = EngineCoreOutputs(
                engine_index=load.rank,
                outputs=mine,
                timestamp=outputs.timestamp or time.monotonic(),
                weight_version=outputs.weight_version,
            )
            frame = pb.StepOutputs(rank=load.rank, outputs=codec.encode_outputs(step), load=load)
            session.send(pb.NodeFrame(step=frame))

    def broadcast(self, frame: pb.NodeFrame) -> None:
        for session in self._sessions:
            session.send(frame)

    def fail_all(self, error: LockstepError) -> None:
        """Tell every proxy that its requests are lost."""
        for request_id, session in list(self._owner.items()):
            session.send_error(request_id, error)
            self.release([request_id], session)
