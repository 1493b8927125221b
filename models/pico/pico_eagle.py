"""The EAGLE and EAGLE-3 heads for pico in plain PyTorch, under the names that vLLM reads.

They follow vllm/model_executor/models/llama_eagle.py and llama_eagle3.py; embedding and lm_head are pico's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pico_config import PicoConfig
from pico_layers import MLP, Attention, RMSNorm
from pico_model import Pico
from torch import Tensor, nn

AUX_LAYERS = (1, 2, 4)
"""Whose outputs EAGLE-3 sees, counted from 1 as vLLM does; 4 is the last, before the final norm."""

DRAFT_STEPS = 3
"""Trained one after the other, each on the state of the one before."""


class HeadAttention(Attention):
    """Llama's: no norm of queries and keys, the whole head is rotated; rows of `inputs` values."""

    def __init__(self, config: PicoConfig, inputs: int) -> None:
        super().__init__(replace(config, partial_rotary_factor=1.0))
        self.q_proj = nn.Linear(inputs, self.q_proj.out_features, bias=False)
        self.k_proj = nn.Linear(inputs, self.k_proj.out_features, bias=False)
        self.v_proj = nn.Linear(inputs, self.v_proj.out_features, bias=False)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()


class HeadLayer(nn.Module):
    """What both heads' one layer has in common: attention over `inputs` values and a feed-forward."""

    def __init__(self, config: PicoConfig, inputs: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, inputs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, residual: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        residual = residual + self.self_attn(x, positions, past)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Head(nn.Module):
    """A draft head: its state_dict is the checkpoint."""

    layers: nn.ModuleList

    def start(self, seen: Sequence[Tensor]) -> Tensor:
        """The states that the first draft step takes, of what `target_states` gives."""
        raise NotImplementedError

    def inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer attends with, and what it adds to; of rows [batch, rows, hidden] each."""
        raise NotImplementedError

    def output(self, states: Tensor) -> Tensor:
        """What pico's lm_head takes, of the states that the next draft step takes."""
        raise NotImplementedError

    def initialise(self, std: float) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)

    def drafts(self, target: Pico, tokens: Tensor, seen: Sequence[Tensor]) -> list[Tensor]:
        """What pico's lm_head takes in each draft step, given the real tokens [batch, rows].

        Row p of step j, counted from 1, is for token p + j + 1. It takes token p + j, the state of row p of
        the step before, rotary position p + j - 1, and attends to the first step's rows up to p and to row p
        of each step since, which is what a KV cache holds there. Step j has j rows less than `tokens`.
        """
        embedded = target.model.embed_tokens(tokens)
        states = self.start(seen)
        attention = self.layers[0].self_attn
        kept: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(DRAFT_STEPS):
            rows = tokens.shape[1] - 1 - step
            positions = torch.arange(step, step + rows)
            x, residual = self.inputs(embedded[:, 1 + step :], states[:, :rows])
            keys = [k[:, :, :rows] for k, _ in kept]
            values = [v[:, :, :rows] for _, v in kept]
            past = (torch.cat(keys, dim=2), torch.cat(values, dim=2)) if kept else None
            kept.append(attention.keys_values(x, positions))
            states = self.layers[0](x, residual, positions, past)
            outputs.append(self.output(states))
        return outputs


class EagleHead(Head):
    """EAGLE: from pico's last state and the next token, the state that follows."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config, hidden)])
        self.initialise(config.initializer_range)

    def start(self, seen: Sequence[Tensor]) -> Tensor:
        return seen[-1]

    def inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, states], dim=-1)).float()
        return x, x

    def output(self, states: Tensor) -> Tensor:
        return states


class Eagle3Layer(HeadLayer):
    """Attends with the token's embedding beside the state, each normalised."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(Head):
    """EAGLE-3: starts from the states after three of pico's layers instead of the last one alone."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.initialise(config.initializer_range)

    def start(self, seen: Sequence[Tensor]) -> Tensor:
        return self.fc(torch.cat([seen[number - 1] for number in AUX_LAYERS], dim=-1)).float()

    def inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], dim=-1), states

    def output(self, states: Tensor) -> Tensor:
        return self.norm(states)


HEADS: dict[str, type[Head]] = {"eagle": EagleHead, "eagle3": Eagle3Head}
"""By vLLM's name of the method."""


@torch.no_grad()
def target_states(target: Pico, tokens: Tensor) -> list[Tensor]:
    """pico's states after each of its layers and, last, after the final norm; [batch, rows, hidden] each."""
    positions = torch.arange(tokens.shape[1])
    x = target.model.embed_tokens(tokens)
    seen = []
    for block in list(target.model.layers)[:-1]:
        x = block(x, positions)
        seen.append(x)
    return [*seen, target.model.norm(x)]
