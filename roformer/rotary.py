"""Rotary position embedding: the one place that knows how a position turns a vector.

Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.
Pairs are adjacent coordinates (x0, x1), (x2, x3), ..., as in the paper; Llama and GPT-NeoX pair
coordinate i with i + D/2, which is the same rotation of permuted coordinates (`half_split_order`).
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def inverse_frequencies(
    width: int, base: float = 10000.0, device: torch.device | None = None
) -> Tensor:
    """The angles theta_i by which one step of position turns pair i (equation 15).

    theta_i = base ** (-2 (i - 1) / d) for i = 1 .. d/2, d the head width.

    Args:
        width: Head width d, even.
        base: 10,000 in the paper.
        device: Where to compute.

    Returns:
        theta, [D/2], radians per token, float64 where the device has it.

    Raises:
        ValueError: `width` is odd, so that the last coordinate would have no partner.
    """
    if width % 2:
        raise ValueError(f"head width must be even to be rotated in pairs, got {width}")
    dtype = _exact(device)
    return base ** -(torch.arange(0, width, 2, device=device).to(dtype) / width)


def frequencies(
    config: PreTrainedConfig, lengths: Tensor | None, device: torch.device
) -> tuple[Tensor, float]:
    """The angles of a configuration's rope type, by transformers' own rules but for the default.

    Nothing is stored between calls: what depends on the length is computed for the lengths given.

    Args:
        config: A `RoFormerConfig`.
        lengths: [B, L], for each token the length of its row (or of its document in a packed row);
            only read where the frequencies depend on it (dynamic, longrope).
        device: Where to compute.

    Returns:
        theta [D/2], or [B, L, D/2] where it depends on the lengths, radians per token; and the
        factor on sine and cosine that yarn and longrope ask for.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return inverse_frequencies(config.rotated_width, rope["rope_theta"], device), 1.0
    rule = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    if lengths is None:
        return rule(config, device)
    if rope["rope_type"] == "dynamic":
        return rule(config, device, seq_len=lengths[..., None])
    border = rope["original_max_position_embeddings"]
    short, scaling = rule(config, device, seq_len=border)
    long, _ = rule(config, device, seq_len=border + 1)
    return torch.where((lengths > border)[..., None], long, short), scaling


def rotation_table(
    positions: Tensor, theta: Tensor, scaling: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Cosine and sine of every angle m * theta_i (equation 34).

    Angles are float64 and the results at least float32, whatever the model's dtype: bfloat16
    rounds the first 1024 integers to 513 values, so positions would collide, and a float32 angle at
    position 100,000 is off by up to 0.004.

    Args:
        positions: Token positions m, [..., L], any integer dtype.
        theta: [D/2] or [..., L, D/2], radians per token.
        scaling: Factor on both.
        dtype: Of the model; only float64 asks for more than float32.

    Returns:
        [..., L, D/2, 2], float32 or float64: cosine and sine side by side, one complex number
        e^(i m theta).
    """
    angles = positions[..., None].to(_exact(positions.device)) * theta
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return turns.to(arithmetic(dtype)) * scaling


def rotate(x: Tensor, table: Tensor, interleave: bool = True) -> Tensor:
    """Turn pair i of token m, (x_2i-1, x_2i) in the paper, by m * theta_i (equations 13 and 34).

    Args:
        x: Queries, keys or values, [B, L, H, D], any floating dtype.
        table: From `rotation_table`, [L, D'/2, 2] or [B, L, D'/2, 2]; with D' < D only the first D'
            coordinates are turned.
        interleave: Pair adjacent coordinates; False pairs i with i + D'/2.

    Returns:
        The rotated x, same shape and dtype; the arithmetic is float32, or float64 of a float64 x.
    """
    width = 2 * table.shape[-2]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], table, interleave), x[..., width:]), dim=-1)
    table = table.unsqueeze(-3)  # one angle for all heads
    dim, shape = (-1, (-1, 2)) if interleave else (-2, (2, -1))
    first, second = x.to(arithmetic(x.dtype)).unflatten(-1, shape).unbind(dim)
    cos, sin = table.unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=dim)
    return rotated.flatten(-2).to(x.dtype)


def half_split_order(width: int, rotated: int) -> Tensor:
    """Where each coordinate of the half-split layout stands in the interleaved one.

    Args:
        width: Head width D.
        rotated: Coordinates that are turned, D' <= D; the others stay in place.

    Returns:
        [D], a permutation p with half_split[j] = interleaved[p[j]].
    """
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    return torch.cat((pairs, torch.arange(rotated, width)))


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """In what a model of this dtype computes what must not be rounded to half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _exact(device: torch.device | None) -> torch.dtype:
    """The most exact dtype of a device: float64, which Apple's GPUs lack."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64
