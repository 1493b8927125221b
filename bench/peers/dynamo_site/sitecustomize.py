"""Gives each process of Dynamo's engines torchvision's operators; Python imports it at its start.

vLLM imports transformers' image code, and so torchvision, whose build in the package index finds its
operators with a CUDA torch only. Nothing here computes with images: that the two it asks for at import exist
is enough. vLLM also asks for a model's class in a process of its own, which has to find them too.
"""

from torch.library import Library

OPERATORS = Library("torchvision", "DEF")
"""Kept: the operators go with it."""

for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
