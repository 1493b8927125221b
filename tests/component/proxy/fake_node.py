"""A node over the wire: the real protocol on a real gRPC server, an echo instead of a model.

It refuses what the real node refuses (lockstep/node/server.py). Its answer is the prompt again, so a
crossed answer is seen, and decode gives it only once the prefill of the same id and token has "pushed": the
pairing is real. A leg that carries tokens of earlier attempts is refused unless these are the beginning of
that answer, and equal on both sides: a token that was lost or repeated is seen here.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc.aio
import msgspec
from component.proxy.fake_legs import (
    CACHED_TOKENS,
    CLOCK_SKEW_S,
    CONTEXT_LIMIT,
    EOS_TOKEN_ID,
    NOT_FOR_CLIENTS,
    TOKENS_A_STEP,
    Behaviour,
    Leg,
    Push,
    Wire,
    answer_to,
    check_tokens,
    end_with,
    first_events,
    logprobs,
    prompt_logprobs,
)
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats

from kv_transfer.params import parse_decode_leg, parse_prefill_leg
from lockstep.errors import DrainingError, InvalidRequestError, LockstepError, WrongLegError
from lockstep.rpc import codec
from lockstep.rpc.channel import PROTOCOL_VERSION, listen, make_server
from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated import lockstep_pb2_grpc


class FakeNode(lockstep_pb2_grpc.NodeServicer):
    """One prefill or decode node with `num_ranks` ranks."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        wire: Wire,
        model: str,
        num_ranks: int = 1,
        credentials: Credentials = NO_CREDENTIALS,
        **described: object,
    ) -> None:
        self.role = role
        self.wire = wire
        self.num_ranks = num_ranks
        self.model = model
        self.credentials = credentials
        self.described = described
        self.set = Behaviour()
        self.legs: list[Leg] = []
        self.aborted: list[str] = []
        self.refused: list[pb.RequestError] = []
        self.running: dict[str, Leg] = {}
        self.num_paused = 0
        self.sessions: list[asyncio.Queue[pb.NodeFrame | None]] = []
        self.port = 0
        self.starts = 0
        self.status: dict[str, Any] = {}
        self.kv_blocks: list[pb.KVBlocks] = []
        """Sent to each session that opens."""
        self.kv_blocks_asked: list[int] = []
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "FakeNode":
        """Listen, on the same port as before after a stop."""
        self.starts += 1
        self._server = make_server(self.credentials)
        lockstep_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        self.port = listen(self._server, f"127.0.0.1:{self.port}", self.credentials)
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Go away as a killed process does."""
        if self._server is not None:
            for leg in self.running.values():
                if leg.task is not None:
                    leg.task.cancel()
            self.running.clear()
            await self._server.stop(grace=None)
            self._server = None

    def hang_up(self) -> None:
        """End the streams; the node itself goes on and aborts what came in by them."""
        for leg in self.running.values():
            if leg.task is not None:
                leg.task.cancel()
        self.running.clear()
        for frames in self.sessions:
            frames.put_nowait(None)

    def drain(self) -> None:
        """Take no new requests, as on SIGTERM."""
        for frames in self.sessions:
            frames.put_nowait(pb.NodeFrame(draining=pb.Draining(deadline_s=30)))

    def tell(self, blocks: pb.KVBlocks) -> None:
        """Say what the prefix cache of a rank has, or what has changed in it."""
        self.tell_all(pb.NodeFrame(kv_blocks=blocks))

    def tell_all(self, frame: pb.NodeFrame) -> None:
        """Send a frame to each proxy."""
        for frames in self.sessions:
            frames.put_nowait(frame)

    def description(self) -> pb.NodeDescription:
        ranks = [
            pb.RankDescription(
                global_rank=rank,
                local_rank=rank,
                engine_id=f"{self.role}-{self.starts}_dp{rank}",
                side_channel_host="127.0.0.1",
                side_channel_port=5600 + rank,
                tensor_parallel_size=1,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                num_kv_blocks=100,
            )
            for rank in range(self.num_ranks)
        ]
        values: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION,
            "role": pb.ROLE_PREFILL if self.role == "prefill" else pb.ROLE_DECODE,
            "group_id": f"{self.role}-group",
            "instance_id": f"{self.role}-{self.port}-{self.starts}",
            "ready": self.set.ready,
            "model": self.model,
            "tokenizer": self.model,
            "tokenizer_hash": "t",
            "generation_config_hash": "g",
            "generation_config": "auto",
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "block_size": 16,
            "served_context_limit": CONTEXT_LIMIT,
            "max_model_len": CONTEXT_LIMIT + 5,
            "num_speculative_tokens": 2,
            "speculative_method": "mtp",
            "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}',
            "vllm_version": "0.32.0",
            "ranks": ranks,
        }
        return pb.NodeDescription(**{**values, **self.described})

    async def Describe(  # noqa: N802 - the protocol's name
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeDescription:
        return self.description()

    async def Status(  # noqa: N802 - the protocol's name
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.NodeStatus:
        if self.set.status_never:
            await asyncio.Event().wait()
        return pb.NodeStatus(instance_id=self.description().instance_id, age_s=0.5, **self.status)

    async def Session(  # noqa: N802 - the protocol's name
        self, frames: AsyncIterator[pb.ProxyFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.NodeFrame]:
        hello = await anext(aiter(frames))
        if hello.WhichOneof("frame") != "hello" or not hello.hello.proxy_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be Hello")
        if hello.hello.protocol_version != PROTOCOL_VERSION:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another protocol version")
        out: asyncio.Queue[pb.NodeFrame | None] = asyncio.Queue()
        self.sessions.append(out)
        out.put_nowait(pb.NodeFrame(welcome=pb.Welcome(instance_id=self.description().instance_id)))
        for blocks in self.kv_blocks:
            out.put_nowait(pb.NodeFrame(kv_blocks=blocks))
        reader = asyncio.create_task(self._read(frames, out))
        try:
            while (frame := await out.get()) is not None:
                yield frame
        finally:
            self.sessions.remove(out)
            reader.cancel()

    async def _read(
        self, frames: AsyncIterator[pb.ProxyFrame], out: asyncio.Queue[pb.NodeFrame | None]
    ) -> None:
        async for frame in frames:
            if frame.WhichOneof("frame") == "add":
                try:
                    self._add(frame.add, out)
                except LockstepError as error:
                    self._refuse(frame.add.request_id, error, out)
            elif frame.WhichOneof("frame") == "decode_engines":
                for rank in self.description().ranks:
                    self.wire.announced[rank.engine_id].update(frame.decode_engines.engine_ids)
            elif frame.WhichOneof("frame") == "kv_blocks":
                self.kv_blocks_asked.append(frame.kv_blocks.rank)
            else:
                for request_id in frame.abort.request_ids:
                    self.aborted.append(request_id)
                    if self.set.ignores_aborts:
                        continue
                    leg = self.running.pop(request_id, None)
                    if leg is not None and leg.task is not None:
                        leg.task.cancel()

    def _refuse(self, request_id: str, error: LockstepError, out: asyncio.Queue[pb.NodeFrame | None]) -> None:
        refusal = pb.RequestError(request_id=request_id, code=type(error).__name__, message=str(error))
        self.refused.append(refusal)
        out.put_nowait(pb.NodeFrame(error=refusal))

    def _add(self, add: pb.AddRequest, out: asyncio.Queue[pb.NodeFrame | None]) -> None:
        request = codec.decode_request(add.request)
        if request.request_id != add.request_id:
            raise InvalidRequestError("the request inside has another id")
        if add.rank >= self.num_ranks:
            raise InvalidRequestError(f"rank {add.rank} of {self.num_ranks}")
        if any(leg.request.request_id == request.request_id for leg in self.legs):
            raise InvalidRequestError("request id is in use")
        push, carried, hand_off = self._push(request, add.rank)
        if self.set.fail_first:
            self.set.fail_first -= 1
            raise self.set.fail_with
        leg = Leg(request, add.rank, carried, hand_off)
        check_tokens(self.role, leg)
        self.wire.check(push, request, carried, hand_off)
        self.legs.append(leg)
        self.running[request.request_id] = leg
        run = self._prefill if self.role == "prefill" else self._decode
        leg.task = asyncio.create_task(run(leg, push, out))

    def _push(self, request: EngineCoreRequest, rank: int) -> tuple[Push, tuple[int, ...], bool]:
        assert request.sampling_params is not None
        params = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
        try:
            if self.role == "prefill":
                sent = parse_prefill_leg(params)
                engine_id = self.description().ranks[rank].engine_id
                return (engine_id, request.request_id, sent.token), sent.output_token_ids, sent.hand_off
            leg = parse_decode_leg(params, request.request_id)
        except ValueError as error:
            raise WrongLegError(str(error)) from error
        return (leg.peer.engine_id, request.request_id, leg.token), leg.output_token_ids, leg.hand_off

    async def _pause(self) -> None:
        """Wait until the test sets the `go` that it had given by now."""
        self.num_paused += 1
        try:
            await self.set.go.wait()
        finally:
            self.num_paused -= 1

    async def _prefill(self, leg: Leg, push: Push, out: asyncio.Queue[pb.NodeFrame | None]) -> None:
        params, prompt = leg.request.sampling_params, leg.request.prompt_token_ids
        assert params is not None
        assert prompt is not None
        events, cached = first_events(), min(CACHED_TOKENS, len(prompt) - 1)
        await asyncio.sleep(self.set.delay_s)
        if self.set.pause_after_tokens == 0:
            await self._pause()
        output = EngineCoreOutput(
            leg.request.request_id,
            # Without a hand-off the client must not see it.
            [answer_to(leg.request)[len(leg.carried)] if leg.hand_off else NOT_FOR_CLIENTS],
            finish_reason=FinishReason.LENGTH if self.set.finish_with is None else self.set.finish_with,
            events=events,
            prefill_stats=None
            if leg.carried
            else PrefillStats(len(prompt), len(prompt) - cached, cached, cached),
            new_prompt_logprobs_tensors=prompt_logprobs(prompt, params.prompt_logprobs),
        )
        output.new_logprobs = logprobs(output.new_token_ids, params)
        nothing_else = params.logprobs is None and params.prompt_logprobs is None
        if leg.hand_off and self.set.tells_early and nothing_else:
            early = msgspec.structs.replace(output, finish_reason=None, events=first_events())
            self._step(out, leg.rank, early)
            if self.set.pause_after_tokens == 1:
                await self._pause()
        if self.set.ends:
            end_with(output, self.set.ends.pop(0)[1])
        self._finish(leg)
        self._step(out, leg.rank, output)
        if output.finish_reason is FinishReason.LENGTH:
            self.wire.pushed[push].set()

    async def _decode(self, leg: Leg, push: Push, out: asyncio.Queue[pb.NodeFrame | None]) -> None:
        end = self.set.ends.pop(0) if self.set.ends else None
        await self.wire.pushed[push].wait()
        if self.description().ranks[leg.rank].engine_id not in self.wire.announced[push[0]]:
            self._finish(leg)
            self._refuse(
                leg.request.request_id, InvalidRequestError("prefill does not know this engine"), out
            )
            return
        await asyncio.sleep(self.set.delay_s)
        answer = answer_to(leg.request)
        first = len(leg.carried) + leg.hand_off
        if first >= len(answer):
            self._finish(leg)  # prefill's token was the last
        for start in range(first, len(answer), TOKENS_A_STEP):
            if self.set.pause_after_tokens is not None and start >= self.set.pause_after_tokens:
                await self._pause()
            tokens = answer[start : start + TOKENS_A_STEP]
            output = EngineCoreOutput(
                leg.request.request_id,
                tokens,
                prefill_stats=PrefillStats(len(leg.request.prompt_token_ids or ())),
                events=first_events() if start == first else None,
                new_logprobs=logprobs(tokens, leg.request.sampling_params),
            )
            if start + TOKENS_A_STEP >= len(answer):
                output.finish_reason = (
                    FinishReason.STOP if tokens[-1] == EOS_TOKEN_ID else FinishReason.LENGTH
                )
            if self.set.finish_with is not None:
                end_with(output, self.set.finish_with)
            elif end is not None and start - first >= end[0]:
                end_with(output, end[1])
            if output.finish_reason is not None:
                self._finish(leg)
            self._step(out, leg.rank, output)
            if output.finish_reason is not None:
                return
            await asyncio.sleep(self.set.step_s)

    def _finish(self, leg: Leg) -> None:
        self.running.pop(leg.request.request_id, None)

    def _step(self, out: asyncio.Queue[pb.NodeFrame | None], rank: int, output: EngineCoreOutput) -> None:
        outputs = EngineCoreOutputs(
            engine_index=rank, outputs=[output], timestamp=time.monotonic() + CLOCK_SKEW_S
        )
        on_rank = sum(leg.rank == rank for leg in self.running.values())
        load = pb.RankLoad(rank=rank, num_running=on_rank)
        step = pb.StepOutputs(rank=rank, outputs=codec.encode_outputs(outputs), load=load)
        out.put_nowait(pb.NodeFrame(step=step))


def draining() -> DrainingError:
    """What a real node answers while it shuts down."""
    return DrainingError("this node is shutting down")
