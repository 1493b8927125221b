"""Gives a draft head its first weights in closed form: the best linear guess of pico's next state.

From random weights a head takes several times as long to get there by gradients.
"""

import torch
from pico_eagle import AUX_LAYERS, Eagle3Head, EagleHead, Head, target_states
from pico_model import Pico
from torch import Tensor
from torch.nn import functional

SELF_ATTENTION = 1.2
"""Length of the query and key rows for EAGLE-3: a row's score on itself is then 8 times its square."""


def warm_start(head: Head, target: Pico, windows: Tensor) -> None:
    """Fit to `windows` [count, rows] of real tokens; the feed-forward starts at nothing."""
    head.layers[0].mlp.down_proj.weight.data.zero_()
    if isinstance(head, Eagle3Head):
        _start_eagle3(head, target, windows)
    elif isinstance(head, EagleHead):
        _start_eagle(head, target, windows)


def _start_eagle(head: EagleHead, target: Pico, windows: Tensor) -> None:
    """fc alone: from the token's embedding and the state before it, pico's state after it."""

    def rows(window: Tensor) -> tuple[Tensor, Tensor]:
        states = target_states(target, window)[-1]
        embedded = target.model.embed_tokens(window)
        return torch.cat([embedded[:, 1:], states[:, :-1]], dim=-1), states[:, 1:]

    head.fc.weight.data.copy_(_least_squares([rows(window[None]) for window in windows]))
    head.layers[0].self_attn.o_proj.weight.data.zero_()


def _start_eagle3(head: Eagle3Head, target: Pico, windows: Tensor) -> None:
    """fc from the states; the embedding, which only attention sees, through a row's attention to itself.

    The two value heads carry half as many numbers as an embedding has: the ones that count most.
    """

    def rows(window: Tensor) -> tuple[Tensor, Tensor]:
        seen = target_states(target, window)
        embedded = functional.rms_norm(target.model.embed_tokens(window), (window_size,))
        before = torch.cat([seen[number - 1] for number in AUX_LAYERS], dim=-1)
        return torch.cat([embedded[:, 1:], before[:, :-1]], dim=-1), seen[-2][:, 1:]

    window_size = head.norm.weight.shape[0]
    both = _least_squares([rows(window[None]) for window in windows])
    of_embedding, of_states = both[:, :window_size], both[:, window_size:]
    head.fc.weight.data.copy_(of_states)
    head.norm.weight.data.copy_(target.model.norm.weight.data)
    attention = head.layers[0].self_attn
    head_dim = attention.config.head_dim
    groups = attention.config.num_attention_heads // attention.config.num_key_value_heads
    carried = attention.v_proj.out_features
    left, strength, right = torch.linalg.svd(of_embedding)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.data.zero_()
    attention.v_proj.weight.data[:, :window_size] = strength[:carried, None] * right[:carried]
    by_head = left[:, :carried].unflatten(1, (-1, head_dim)).repeat_interleave(groups, dim=1) / groups
    attention.o_proj.weight.data.copy_(by_head.flatten(1))
    looks = torch.linalg.qr(torch.randn(window_size, carried)).Q.T * SELF_ATTENTION
    attention.k_proj.weight.data[:, :window_size] = looks
    same = looks.unflatten(0, (-1, head_dim)).repeat_interleave(groups, dim=0)
    attention.q_proj.weight.data[:, :window_size] = same.flatten(0, 1)


@torch.no_grad()
def _least_squares(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix, [outputs, inputs], that takes the inputs nearest to the outputs, a little damped."""
    square = sum(x.flatten(0, 1).T @ x.flatten(0, 1) for x, _ in pairs)
    product = sum(x.flatten(0, 1).T @ y.flatten(0, 1) for x, y in pairs)
    damping = 1e-5 * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square + damping, product).T
