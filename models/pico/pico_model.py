"""The pico architecture in plain PyTorch: GLM-4-MoE with one MTP layer, under its checkpoint's names."""

from collections.abc import Iterator

import torch
from pico_config import PicoConfig
from pico_layers import MLP, Attention, Gate, MoE, RMSNorm
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, config: PicoConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def forward(self, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    """Only the norm is the MTP layer's own; the head is the target's."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPLayer(Block):
    """The layer after the last: from a state and the token that follows it, the state of one position on."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def inputs(self, embedded: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """Rows of the block; the embedding at position 0 is zeroed, as vLLM does (glm4_moe_mtp.py:105)."""
        embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1)).float()


class Trunk(nn.Module):
    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = [Block(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*blocks, MTPLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Pico(nn.Module):
    """Its state_dict is the checkpoint: one tensor per expert, the MTP layer after the last one."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)

    def states(self, tokens: Tensor) -> Tensor:
        """Trunk states after the final norm, [batch, rows, hidden], of `tokens` [batch, rows]."""
        positions = torch.arange(tokens.shape[1])
        x = self.model.embed_tokens(tokens)
        for block in list(self.model.layers)[:-1]:
            x = block(x, positions)
        return self.model.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states).float()

    def drafts(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of two draft steps, given the real tokens: row p of the first is for token p + 2.

        The first has rows - 1 rows, the second rows - 2, whose row p is for token p + 3. Row p of the first
        takes token p + 1 and the trunk's state at p, at rotary position p; row p of the second takes token
        p + 2 and the first's state at p (before shared_head.norm), at position p + 1.
        """
        layer = self.model.layers[-1]
        embedded = self.model.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1] - 1)
        x = layer.inputs(embedded[:, 1:], states[:, :-1], positions)
        past = layer.self_attn.keys_values(layer.input_layernorm(x)[:, :-1], positions[:-1])
        first = layer(x, positions)
        again = layer.inputs(embedded[:, 2:], first[:, :-1], positions[1:])
        second = layer(again, positions[1:], past)
        norm = layer.shared_head.norm
        return self.logits(norm(first)), self.logits(norm(second))

    def gates(self) -> Iterator[Gate]:
        return (module for module in self.modules() if isinstance(module, Gate))
