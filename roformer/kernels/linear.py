"""Dense layers on a CPU, by the one of torch's two libraries that computes them faster.

torch hands float32 products to MKL, which on an AMD EPYC (Zen 5) takes about twice as long as
oneDNN, to which torch hands bfloat16. oneDNN also adds the bias, and applies an activation, while a
product is in the cache; torch's way through memory is longer. What it gains: results/bench-cpu.md,
under levers.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from .dispatch import is_plain

GELU = type(ACT2FN["gelu"])
"""The activation that oneDNN applies to a product."""

_FORWARD = nn.Linear.forward
"""Which somebody may replace."""


def dense(layer: nn.Module, x: Tensor, activation: nn.Module | None = None) -> Tensor:
    """activation(layer(x)), the same numbers up to rounding.

    Args:
        layer: An `nn.Linear`, or what somebody has put in its place.
        x: [..., inputs], any floating dtype.
        activation: Applied to the product, or None.

    Returns:
        [..., outputs], of the dtype of x.
    """
    if not (isinstance(layer, nn.Linear) and _suits(layer, x)):
        product = layer(x)
    elif torch.is_grad_enabled() and _learns(x, layer.weight, layer.bias):
        is_onednn = x.dtype == torch.bfloat16  # torch calls it too, with better gradients
        product = layer(x) if is_onednn else _learning(x, layer.weight, layer.bias)
    elif activation is not None and is_untouched(activation, GELU):
        return _product(x, layer.weight, layer.bias, "gelu")
    else:
        product = _product(x, layer.weight, layer.bias)
    return product if activation is None else activation(product)


def is_untouched(module: nn.Module, made: type) -> bool:
    """Whether a module is still what it was made as.

    Not with hooks, methods or modules of somebody else's (pruning, LoRA): what they make of it is
    not known here.
    """
    before = module._forward_pre_hooks or module._backward_pre_hooks
    hooked = before or module._forward_hooks or module._backward_hooks or _has_any_global_hook()
    return type(module) is made and "forward" not in vars(module) and not hooked


def _suits(layer: nn.Linear, x: Tensor) -> bool:
    """Whether oneDNN may compute this product, and faster; what is wrong with it torch says."""
    if not (is_plain(x) and is_untouched(layer, nn.Linear) and is_plain(layer.weight)):
        return False
    if nn.Linear.forward is not _FORWARD or not (layer.bias is None or layer.bias.is_contiguous()):
        return False
    same = x.dtype == layer.weight.dtype and x.shape[-1] == layer.in_features
    some_rows = x.dim() > 1 and x.numel() > layer.in_features  # of one row torch is faster
    if not (same and some_rows and x.dtype in _faster_dtypes()):
        return False
    # by what knows torch's operations alone
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    off = not torch._C._get_mkldnn_enabled()
    return not (watched or off or torch.is_autocast_enabled("cpu"))


@cache
def _faster_dtypes() -> frozenset[torch.dtype]:
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not has:
        return frozenset()
    # avx512_bf16 without AMX: AMD's from Zen 4 on, and of Intel's Cooper Lake (2020) alone
    is_amd = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    dtypes = {torch.float32} if is_amd and torch.backends.mkl.is_available() else set()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    return frozenset(dtypes)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """activation(x weight^T + bias)."""
    by_onednn = torch.ops.mkldnn._linear_pointwise.default
    return by_onednn(x, weight, bias, activation, [], "none")


def _learns(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _learning(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a backward pass."""
    # of two dimensions in any case: a view made within could not be changed in place afterwards
    return _Dense.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


class _Dense(torch.autograd.Function):
    """Three products by oneDNN; a gradient of the gradient is torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, inputs] by [outputs, inputs]."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """For x, the weight and the bias."""
        x, weight = ctx.saved_tensors
        slope = gradients[0]
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = _times(slope, weight)
        if ctx.needs_input_grad[1]:
            if weight.shape[0] > weight.shape[1]:  # the shorter side as rows is faster
                d_weight = _times(x.t(), slope).t().contiguous()
            else:
                d_weight = _times(slope.t(), x)
        if ctx.needs_input_grad[2]:
            d_bias = slope.sum(dim=0)
        return d_x, d_weight, d_bias


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product; torch's own where it is to be differentiated."""
    return a @ b if torch.is_grad_enabled() else _product(a, b.t(), None)
