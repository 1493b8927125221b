"""Makes one KV load fail, by the nodes' own protocol: two legs whose tokens differ, as of two attempts.

Prefill pushes only to a registration that carries its own leg's token. It refuses this one and says so, and
the load fails on decode as after a prefill node has given a request up.
"""

import asyncio
import itertools
import time

import grpc.aio
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from bench.trace import Item
from kv_transfer.params import PrefillPeer, decode_leg_params, new_token, prefill_leg_params
from lockstep.rpc import codec
from lockstep.rpc.channel import PROTOCOL_VERSION, connect
from lockstep.rpc.generated import lockstep_pb2 as pb
from lockstep.rpc.generated.lockstep_pb2_grpc import NodeStub

DEADLINE_S = 120.0

_numbers = itertools.count()


class LoadBreaker:
    """Speaks to both nodes as a proxy does, with an id of its own for every request."""

    def __init__(self, prefill_address: str, decode_address: str) -> None:
        self._prefill_address = prefill_address
        self._decode_address = decode_address

    async def fail_load(self, item: Item) -> str:
        """Run the two legs; returns "<finish reason> <stop reason>" of decode's, or its error."""
        request_id = f"bench-failed-load-{next(_numbers)}"
        async with (
            asyncio.timeout(DEADLINE_S),
            connect(self._prefill_address) as prefill_channel,
            connect(self._decode_address) as decode_channel,
        ):
            prefill, decode = NodeStub(prefill_channel), NodeStub(decode_channel)
            rank = (await prefill.Describe(pb.DescribeRequest())).ranks[0]
            peer = PrefillPeer(
                rank.engine_id, rank.side_channel_host, rank.side_channel_port, rank.tensor_parallel_size
            )
            prefill_call, decode_call = await _open(prefill), await _open(decode)
            pushed = _leg(item, request_id, 1, prefill_leg_params(new_token()))
            await prefill_call.write(_add(pushed, 0))
            awaited = _leg(
                item, request_id, item.max_tokens, decode_leg_params(peer, request_id, new_token())
            )
            await decode_call.write(_add(awaited, item.rank))
            end = await _end(decode_call, request_id)
            # As the proxy does once decode has ended: what prefill still holds is given up.
            await prefill_call.write(pb.ProxyFrame(abort=pb.AbortRequests(request_ids=[request_id])))
            for call in (prefill_call, decode_call):
                await call.done_writing()
                # The node ends the stream when it has read all of it.
                while await call.read() is not grpc.aio.EOF:
                    pass
            return end


async def _open(stub: NodeStub) -> grpc.aio.StreamStreamCall:
    call = stub.Session()
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION, proxy_id=f"bench-{time.monotonic_ns()}")
    await call.write(pb.ProxyFrame(hello=hello))
    welcome = await call.read()
    if welcome is grpc.aio.EOF or welcome.WhichOneof("frame") != "welcome":
        raise RuntimeError(f"a node did not welcome the benchmark: {welcome}")
    return call


def _leg(item: Item, request_id: str, max_tokens: int, transfer: dict[str, object]) -> EngineCoreRequest:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": transfer}
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(item.prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _add(request: EngineCoreRequest, rank: int) -> pb.ProxyFrame:
    encoded = codec.encode_request(request)
    return pb.ProxyFrame(add=pb.AddRequest(request_id=request.request_id, rank=rank, request=encoded))


async def _end(call: grpc.aio.StreamStreamCall, request_id: str) -> str:
    while (frame := await call.read()) is not grpc.aio.EOF:
        if frame.WhichOneof("frame") == "error" and frame.error.request_id == request_id:
            return f"{frame.error.code} {frame.error.message}"
        if frame.WhichOneof("frame") != "step":
            continue
        for output in codec.decode_outputs(frame.step.outputs).outputs:
            if output.request_id == request_id and output.finish_reason is not None:
                return f"{output.finish_reason} {output.stop_reason or ''}".strip()
    raise RuntimeError("the decode node ended the benchmark's session")
