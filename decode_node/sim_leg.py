"""Reads a decode leg's `kv_transfer_params` for the simulated engines."""

from vllm.v1.engine import EngineCoreRequest

from kv_transfer.params import parse_decode_leg
from lockstep.node.role import kv_transfer_params
from lockstep.sim.rows import Leg, Peer


def read_leg(request: EngineCoreRequest) -> Leg:
    """Of a request that the role has checked."""
    leg = parse_decode_leg(kv_transfer_params(request), request.request_id)
    peer = Peer(leg.peer.engine_id, leg.peer.side_channel_host, leg.peer.side_channel_port)
    return Leg(leg.token, leg.output_token_ids, leg.hand_off, peer)
