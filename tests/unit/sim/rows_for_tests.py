"""Rows of simulated ranks, as a test wants them."""

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from lockstep.sim.answers import Voice
from lockstep.sim.rows import Leg, Peer, Row

EOS = 1
VOICE = Voice(eos_token_id=EOS, special_token_ids=frozenset({0, EOS}), fallback_token_id=9, natural_end=64)


def row(
    name: str,
    prompt: list[int],
    carried: tuple[int, ...] = (),
    *,
    token: str = "t",
    peer: Peer | None = None,
    **params: object,
) -> Row:
    """An accepted request; `carried` are tokens of earlier attempts."""
    sampling = SamplingParams(**{"max_tokens": 8, **params})
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    script = VOICE.script(prompt, sampling)
    return Row(request, Leg(token, carried, False, peer), script, [*prompt, *carried], len(carried))
