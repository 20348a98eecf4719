"""Who looks on: whether autograd functions of our own may compute, or plain operations must."""

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Whether what runs is compiled, exported or transformed, and must be plain operations."""
    exported = torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
    transformed = torch._C._are_functorch_transforms_active()
    forwards = forward_ad._current_level >= 0  # derivatives in forward mode
    return torch.compiler.is_compiling() or exported or transformed or forwards


def are_hidden(x: Tensor) -> bool:
    """Whether the values of x cannot be looked at: it is compiled, transformed, fake or on meta."""
    transformed = torch._C._are_functorch_transforms_active()
    empty = x.is_meta or isinstance(x, FakeTensor)
    return torch.compiler.is_compiling() or transformed or empty


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor on a CPU, and nothing traces what is done with it."""
    ordinary = type(x) in (Tensor, nn.Parameter)  # not sharded, jagged or fake
    on_cpu = x.device.type == "cpu" and x.layout is torch.strided  # not sparse
    return ordinary and on_cpu and not is_traced()
