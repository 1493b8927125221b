"""When the accelerator has done the work that was launched so far."""

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
