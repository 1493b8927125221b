"""The figures of a simulated engine, as flags that come on top of the real node's own."""

from pydantic import Field

from lockstep.config import ServiceConfig


class SimFigures(ServiceConfig):
    """Flags of `lockstep sim` beside those of the node; ranks, K, rows and budget are vLLM's own flags."""

    sim_prefill_step_ms: float = Field(4.0, ge=0, description="fixed part of a prefill step's time")
    sim_prefill_us_per_token: float = Field(
        100.0, ge=0, description="what each computed prompt token adds to it; cached ones add nothing"
    )
    sim_decode_step_ms: float = Field(15.0, ge=0, description="fixed part of a decode step's time")
    sim_decode_us_per_row: float = Field(
        250.0, ge=0, description="what each row of the rank with the most of them adds to it"
    )
    sim_push_ms: float = Field(2.0, ge=0, description="fixed part of the time that a push of KV takes")
    sim_push_us_per_token: float = Field(1.0, ge=0, description="what each token of the prompt adds to it")
    sim_acceptance: float = Field(
        0.7, ge=0, le=1, description="chance of each draft token to be accepted when the one before it was"
    )
    sim_answer_tokens: int = Field(
        64, ge=1, description="where an answer ends by itself; ignore_eos and min_tokens put it off"
    )
    sim_kv_blocks: int = Field(
        4096, ge=2, description="KV blocks of a rank; --num-gpu-blocks-override, if given, wins"
    )
    sim_seed: int = Field(0, ge=0, description="of the draws for acceptance")

    def prefill_step_s(self, tokens: int) -> float:
        """Time of a step that computes so many prompt tokens on the rank with the most."""
        return (self.sim_prefill_step_ms + self.sim_prefill_us_per_token * tokens / 1e3) / 1e3

    def decode_step_s(self, rows: int) -> float:
        """Time of a step with so many rows on the rank with the most."""
        return (self.sim_decode_step_ms + self.sim_decode_us_per_row * rows / 1e3) / 1e3

    def push_s(self, tokens: int) -> float:
        """Time from the end of prefill until decode has the KV of so many tokens."""
        return (self.sim_push_ms + self.sim_push_us_per_token * tokens / 1e3) / 1e3
