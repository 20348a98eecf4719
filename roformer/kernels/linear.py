"""Linear layers on a CPU, by the library and dtype that are faster than torch's choice.

torch hands float32 products to MKL, which on AMD processors with AVX-512 takes up to twice as long
as oneDNN. bfloat16 products go to oneDNN anyway, and are left to torch where the CPU has
instructions for them. Where it has none they are computed in float32.
"""

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from .conditions import bfloat16_is_emulated, may_use_kernel

_onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""torch's operator for x W^T + b by oneDNN; None in builds without it."""


MIN_FLOAT32_ROWS = 32
"""Rows from which the conversion of the weight to float32 takes less time than it saves."""


class Linear(nn.Linear):
    """`nn.Linear`, the same results up to rounding.

    Tools that look for the exact type `nn.Linear`, as torch.ao.quantization, need
    `replace_by_torch_modules` first.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        weight, bias = self.weight, self.bias
        if _is_faster_in_float32(x, weight, bias):
            with torch.autocast("cpu", enabled=False):
                bias32 = None if bias is None else bias.float()
                return F.linear(x.float(), weight.float(), bias32).bfloat16()
        if not _is_faster(x, weight, bias):
            return super().forward(x)
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, weight, bias)
        ):
            # two-dimensional: a view made inside the function could not be modified in place
            output = _OneDNNLinear.apply(x.flatten(0, -2), weight, bias)
            return output.unflatten(0, x.shape[:-1])
        return _linear(x, weight, bias)


def replace_by_torch_modules(model: nn.Module) -> None:
    """Turn every `Linear` of a model into an `nn.Linear` in place; the weights are the same."""
    for module in model.modules():
        if type(module) is Linear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010 mypy rejects the assignment


def _is_faster_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if torch.is_autocast_enabled("cpu") and dtypes <= {torch.float32, torch.bfloat16}:
        dtypes = {torch.get_autocast_dtype("cpu")}
    if not x.ndim or dtypes != {torch.bfloat16} or not may_use_kernel(x, weight, bias):
        return False
    return bfloat16_is_emulated() and x.numel() >= MIN_FLOAT32_ROWS * x.shape[-1]


def _is_faster(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or x.ndim < 2:
        return False
    if torch.is_autocast_enabled("cpu") or not may_use_kernel(x, weight, bias):
        return False
    # torch reports wrong shapes, and is faster for a single row
    if x.shape[-1] != weight.shape[1] or x.numel() <= weight.shape[1]:
        return False
    is_contiguous = bias is None or bias.is_contiguous()
    return is_contiguous and bool(torch.backends.mkldnn.enabled) and _prefers_onednn()


@cache
def _prefers_onednn() -> bool:
    """Return whether this build has both libraries and the CPU is AMD's with AVX-512.

    avx512_bf16 without AMX: AMD from Zen 4 on, and of Intel only Cooper Lake (2020).
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_amd = capabilities.get("avx512_bf16", False) and not capabilities.get("amx_tile", False)
    return is_amd and _onednn_linear is not None and torch.backends.mkl.is_available()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn_linear(x, weight, bias, "none", [], "none")


class _OneDNNLinear(torch.autograd.Function):
    """x W^T + b and its gradients by oneDNN."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, in_features] to [n, out_features]."""
        return _linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep x and the weight."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, the weight and the bias."""
        x, weight = ctx.saved_tensors
        (grad_output,) = gradients
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _matmul(grad_output, weight)
        if ctx.needs_input_grad[1]:
            if weight.shape[0] > weight.shape[1]:  # the shorter side as rows is faster
                grad_weight = _matmul(x.t(), grad_output).t().contiguous()
            else:
                grad_weight = _matmul(grad_output.t(), x)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(dim=0)
        return grad_x, grad_weight, grad_bias


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """A @ b; by torch where the result is to be differentiated again."""
    return a @ b if torch.is_grad_enabled() else _linear(a, b.t(), None)


if _onednn_linear is not None:

    @register_flop_formula(_onednn_linear)  # torch counts its own operators only
    def _count_flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * prod(x_shape) * weight_shape[0]
