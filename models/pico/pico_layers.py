"""The layers that pico is made of: norm, attention, feed-forward, router and mixture of experts."""

import torch
from pico_config import PicoConfig
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Normalises the last dimension in float32, whatever the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; the first half of each head is rotated."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.config = config
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv heads, rows, head_dim] of the rows `x` [batch, rows, hidden]."""
        k = self._rotate(self.k_norm(self._heads(self.k_proj(x))), positions)
        return k, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend causally among the rows of `x`, or, with `past`, each to itself and the past up to its row.

        The second is what a further draft step sees in a KV cache: rows of the first step, and its own. The
        past of several steps has several times the rows; of those after the first each row sees its own.
        """
        q = self._rotate(self.q_norm(self._heads(self.q_proj(x))), positions)
        k, v = self.keys_values(x, positions)
        if past is None:
            out = functional.scaled_dot_product_attention(
                q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
            )
        else:
            rows = x.shape[1]
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            seen = torch.ones(rows, rows, dtype=torch.bool)
            own = torch.eye(rows, dtype=torch.bool).repeat(1, k.shape[2] // rows - 1)
            mask = torch.cat([seen.tril(), own], dim=1)
            out = functional.scaled_dot_product_attention(
                q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, enable_gqa=True
            )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding over the first `partial_rotary_factor` of the head, in two halves (neox style)."""
        size = int(self.config.head_dim * self.config.partial_rotary_factor)
        frequencies = self.config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The router, in float32. The bias moves the choice of experts only, never their weights."""

    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)
        self.top_k = config.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and their weights, both [tokens, top_k]; counts the choices while training."""
        with torch.autocast("cpu", enabled=False):
            scores = functional.linear(x.float(), self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.load))
        return chosen, weights / weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balancing (arXiv 2408.15664): lift experts below the mean load."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class MoE(nn.Module):
    def __init__(self, config: PicoConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(hidden, intermediate) for _ in range(config.n_routed_experts))
        self.shared_experts = MLP(hidden, intermediate * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weights = self.gate(flat)
        out = self.shared_experts(flat).float()
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]).float() * weights[token, slot, None])
        return out.view_as(x)
