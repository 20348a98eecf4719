"""Faster implementations of operations, with the same outputs of tokens up to rounding.

A kernel is here a function of torch's operators, or torch's own, that replaces a slower one.

What belongs here: attention, linear layers, dropout and cross-entropy for a CPU, attention within
the documents of a row, and the choice between kernels. What does not: anything that decides what is
computed. Equation 2 of the paper, `attention.softmax_attention`, is also eager attention, with
kernels on or off.

`ROFORMER_KERNELS=0` in the environment, or `set_kernels_enabled(False)`, turns all kernels off.
"""

from .attention import AUTO, UNPADDED
from .conditions import kernels_enabled, set_kernels_enabled
from .dropout import Dropout
from .linear import Linear, replace_by_torch_modules

__all__ = [
    "AUTO",
    "UNPADDED",
    "Dropout",
    "Linear",
    "kernels_enabled",
    "replace_by_torch_modules",
    "set_kernels_enabled",
]
