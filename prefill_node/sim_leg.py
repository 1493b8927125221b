"""Reads a prefill leg's `kv_transfer_params` for the simulated engines."""

from vllm.v1.engine import EngineCoreRequest

from kv_transfer.params import parse_prefill_leg
from lockstep.node.role import kv_transfer_params
from lockstep.sim.rows import Leg


def read_leg(request: EngineCoreRequest) -> Leg:
    """Of a request that the role has checked."""
    leg = parse_prefill_leg(kv_transfer_params(request))
    return Leg(leg.token, leg.output_token_ids, leg.hand_off)
