"""Rotary position embedding: the one place that knows how a position turns a vector.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.
Pairs are adjacent coordinates (x0, x1), (x2, x3), ..., as in the paper; GPT-NeoX and Llama pair
coordinate i with i + D/2, so their checkpoints do not load here unpermuted.
"""

import torch
from torch import Tensor


def inverse_frequencies(width: int, base: float = 10000.0) -> Tensor:
    """The angles theta_i by which one step of position turns pair i (equation 15).

    theta_i = base ** (-2 (i - 1) / d) for i = 1 .. d/2, d the head width.

    Args:
        width: Head width d, even.
        base: 10,000 in the paper.

    Returns:
        theta, [D/2], radians per token, float32 (computed in float64, rounded once).

    Raises:
        ValueError: `width` is odd, so that the last coordinate would have no partner.
    """
    if width % 2:
        raise ValueError(f"head width must be even to be rotated in pairs, got {width}")
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return (base**-exponents).float()


def rotation_table(positions: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle m * theta_i (equation 34).

    Angles are float32 whatever the model's dtype: bfloat16 holds only 513 of the first 1024
    integers, so positions would collide.

    Args:
        positions: Token positions m, [L] or [B, L], any integer dtype.
        theta: [D/2], radians per token, float32.

    Returns:
        cos, sin: Both float32, [..., L, D/2].

    Raises:
        ValueError: `theta` is not one-dimensional.
    """
    if theta.ndim != 1:
        raise ValueError(f"theta must be one-dimensional, [D/2], got shape {tuple(theta.shape)}")
    angles = positions[..., None].float() * theta.float()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair (x_2i, x_2i+1) of token m by the angle m * theta_i (equations 13 and 34).

    The pair is one complex number and the rotation one complex product, x * e^(i m theta), which a
    CPU does faster than the element-wise form. Compilers and exporters fuse real arithmetic and not
    complex, so under them the same numbers come from the element-wise form.

    Args:
        x: Queries, keys or values, [B, L, H, D], contiguous, any floating dtype.
        cos: From `rotation_table`, [L, D/2] or [B, L, D/2], float32.
        sin: Likewise.

    Returns:
        The rotated x, same shape and dtype; the arithmetic is float32.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one angle for all heads
    if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        even, odd = pairs.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return rotated.flatten(-2).to(x.dtype)
