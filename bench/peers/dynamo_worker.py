"""Run as a program: `dynamo.vllm` beside a torch without CUDA; the arguments are its own.

It imports transformers' image code, and so torchvision, whose build in the package index finds its operators
with a CUDA torch only. Nothing here computes with images: that the two it asks for at import exist is enough.
"""

import runpy

from torch.library import Library

OPERATORS = Library("torchvision", "DEF")
"""Kept: the operators go with it."""

for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    # Without alter_sys: the engine's processes start with this file again, and need the operators too.
    runpy.run_module("dynamo.vllm", run_name="__main__")
