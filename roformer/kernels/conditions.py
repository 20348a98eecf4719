"""When the kernels of this folder may replace torch's operations, and the switch against it."""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

CAPTURING = "transformers.utils.output_capturing"
"""Module whose hooks record hidden states and attentions."""

_enabled = os.environ.get("ROFORMER_KERNELS", "1") != "0"


def set_kernels_enabled(enabled: bool) -> None:
    """Turn all kernels of this process on or off.

    Off, everything is computed by torch's own operations, and `attn_implementation` "auto" and
    "unpadded" mean "sdpa". Outputs of tokens, losses and gradients stay the same up to rounding;
    outputs at padding are no longer 0, and dropout draws other random numbers.
    """
    global _enabled
    _enabled = enabled


def kernels_enabled() -> bool:
    """Return whether kernels may be used."""
    return _enabled


def may_use_kernel(*tensors: Tensor | None, devices: tuple[str, ...] = ("cpu",)) -> bool:
    """Return whether kernels are on and all tensors are plain ones on such devices."""
    return _enabled and all(x is None or is_plain_on(x, *devices) for x in tensors)


def is_plain_on(x: Tensor, *devices: str) -> bool:
    """Return whether x is an ordinary dense tensor on such a device, untraced and untransformed.

    Excluded are subclasses (sharded, jagged, fake), sparse tensors and dual tensors of forward-mode
    differentiation.
    """
    if type(x) not in (Tensor, nn.Parameter) or is_traced():
        return False
    is_dense = x.device.type in devices and x.layout is torch.strided
    return is_dense and forward_ad.unpack_dual(x).tangent is None


def is_traced() -> bool:
    """Detect compilation, export and torch.func, under which only plain operations may be used.

    Choose operations by this, and ask `can_read_values` before reading a value: they differ under
    `torch.jit.trace` and ONNX export, which run on real values.
    """
    is_exporting = torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
    return torch.compiler.is_compiling() or is_exporting or _is_functorch_active()


def can_read_values(x: Tensor) -> bool:
    """Return whether the values of x can be read: not compiled, transformed, fake or on meta."""
    is_fake = x.is_meta or hasattr(x, "fake_mode")
    return not (torch.compiler.is_compiling() or is_fake or _is_functorch_active())


@cache
def bfloat16_is_emulated() -> bool:
    """Return whether torch emulates bfloat16 here, because the CPU has no instructions for it.

    Its products take several times as long as those of float32.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    instructions = ("avx512_bf16", "amx_bf16", "bf16")  # the last on Arm
    return bool(capabilities) and not any(capabilities.get(name) for name in instructions)


def has_hooks(model: nn.Module) -> bool:
    """Return whether a module of the model has a forward or backward hook or pre-hook.

    Not counted are the hooks that transformers leaves in the layers after the first call with
    `output_hidden_states` or `output_attentions`, which do nothing in others.
    """
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    hooks = (
        hook
        for module in model.modules()
        for name, registered in vars(module).items()  # torch has no public list of them
        if name.endswith(kinds)
        for hook in registered.values()
    )
    return any(getattr(hook, "__module__", None) != CAPTURING for hook in hooks)


def _is_functorch_active() -> bool:
    """Detect transforms of torch.func; True where this torch has no way to ask."""
    is_active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return is_active is None or is_active()
