"""When the accelerator has done what was launched so far, and copies that wait for it without the host."""

from collections.abc import Callable

import torch


def record_event(device_type: str) -> Callable[[], bool] | None:
    """A question to ask of the device later: has everything launched before this call finished?

    None on CPU, where work is done when its call returns. For the thread whose current stream runs the model.
    """
    if device_type == "cpu":
        return None
    event = torch.Event(device=device_type)
    event.record()
    return lambda: bool(event.query())


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queued behind what makes the tensor; to be read once `record_event`, called after this, says so.

    Only to pinned memory does a copy not keep the host waiting. On CPU it is a plain copy.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    copy.copy_(tensor, non_blocking=True)
    return copy
