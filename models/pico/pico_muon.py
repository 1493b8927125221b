"""Muon for the hidden matrices: torch.optim.Muon's update, in float32 and one batch for each shape.

torch.optim.Muon (2.13) orthogonalises in bfloat16, one matrix after the other; on a CPU without bfloat16
units that takes 10 s a step for pico's 150 matrices, this 0.5 s.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic Newton-Schulz step, as torch.optim.Muon's default."""
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the step of a tall matrix grows by the root of rows / columns."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """A matrix without a gradient (an expert that no token chose) still moves by its momentum."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonal(torch.stack([self._direction(p, group) for p in parameters]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=group["lr"] * scale)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(state["momentum"], group["momentum"])


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices, [count, rows, columns], whose singular values are all about 1 (.7 to 1.2)."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
