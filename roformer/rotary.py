"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3).

A pair of coordinates of a query or key at position m is rotated by the angle m * theta_i. By
default the pairs are adjacent coordinates (x0, x1), (x2, x3), ..., as in the paper. Llama and
GPT-NeoX pair coordinate i with i + rotary_dim/2; `convert_rope_layout` translates weights between
the two. Both compute the same rotation if the rows of query and key projections are permuted.

Legend: B batch, L tokens, H heads, D head size, rotary_dim <= D rotated coordinates of a head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_roformer import RoFormerConfig
from .kernels.conditions import may_use_kernel


def compute_inv_freq(dim: int, base: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Compute the frequencies theta_i = base^(-2(i - 1) / dim), i = 1 .. dim/2 (equation 15).

    Args:
        dim: Number of rotated coordinates, even.
        base: 10,000 in the paper; configurations call it `rope_theta`.
        device: Device of the result.

    Returns:
        [dim/2], radians per token; float64, or float32 on devices without float64.

    Raises:
        ValueError: `dim` is odd.
    """
    if dim % 2:
        raise ValueError(f"dim must be even, because coordinates are rotated in pairs, got {dim}")
    exponents = torch.arange(0, dim, 2, device=device).to(_angle_dtype(device)) / dim
    return base**-exponents


def compute_rope_parameters(
    config: RoFormerConfig, seq_len: Tensor | None, device: torch.device
) -> tuple[Tensor, float]:
    """Compute the frequencies of the configuration's `rope_type`.

    All types but the default are computed by transformers. Nothing is cached between calls.

    Args:
        config: Configuration of the model.
        seq_len: [B, L], for the type dynamic: the span of positions of the row (or of the packed
            document) that each token belongs to; None for the others.
        device: Device of the result.

    Returns:
        inv_freq: [rotary_dim/2], or [B, L, rotary_dim/2] if it depends on the length; radians per
            token.
        attention_scaling: Factor on cos and sin; 1 except for yarn.
    """
    rope = config.rope_parameters or {}  # never None: for the type checker
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return compute_inv_freq(config.rotary_dim, rope["rope_theta"], device), 1.0
    compute = ROPE_INIT_FUNCTIONS[rope_type]
    return compute(config, device, seq_len=None if seq_len is None else seq_len[..., None])


def rotary_embeddings(
    position_ids: Tensor,
    inv_freq: Tensor,
    attention_scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of m * theta_i for every position m (equation 34).

    Angles are float64 and the results at least float32, whatever the model's dtype: bfloat16
    represents only 512 of the first 1024 integers, so positions would collide, and a float32 angle
    at position 100,000 is wrong by up to 0.004.

    Args:
        position_ids: Token positions m, [1 or B, L], any integer dtype.
        inv_freq: theta_i, [rotary_dim/2] or [..., L, rotary_dim/2], radians per token.
        attention_scaling: Factor on both results.
        dtype: Dtype of the model; the results are float64 if it is float64.

    Returns:
        cos, sin: [..., L, rotary_dim/2], float32 or float64.
    """
    angles = position_ids[..., None].to(_angle_dtype(position_ids.device)) * inv_freq
    dtype = at_least_float32(dtype)
    return angles.cos().to(dtype) * attention_scaling, angles.sin().to(dtype) * attention_scaling


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool = True) -> Tensor:
    """Rotate pair i of the token at position m by m * theta_i (equations 13 and 34).

    Args:
        x: Queries, keys or values, [B, L, H, D], any floating dtype.
        cos: From `rotary_embeddings`, [1 or B, L, rotary_dim/2]. If rotary_dim < D, only the first
            coordinates are rotated.
        sin: Same shape as `cos`.
        interleave: Pair adjacent coordinates; False pairs coordinate i with i + rotary_dim/2.

    Returns:
        Tensor of the shape and dtype of `x`; computed in float32, or float64 if `x` is float64.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = apply_rotary(x[..., :rotary_dim], cos, sin, interleave)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    # FSDP may have cast the arguments of a layer to half precision, which `torch.complex` lacks
    cos, sin = cos.to(at_least_float32(cos.dtype)), sin.to(at_least_float32(sin.dtype))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angles for all heads
    if interleave and may_use_kernel(x, cos, sin, devices=("cpu", "cuda")):
        # (x0 + 1j x1) exp(1j m theta), equation 12: a fifth of the time on a CPU, and a third of
        # the kernels on a GPU; compilers fuse the other form
        pairs = x.to(at_least_float32(x.dtype)).contiguous().unflatten(-1, (-1, 2))
        rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        return torch.view_as_real(rotated).flatten(-2).to(x.dtype)
    # [B, L, H, rotary_dim/2, 2] of adjacent pairs, or [B, L, H, 2, rotary_dim/2]
    shape, pair_dim = ((-1, 2), -1) if interleave else ((2, -1), -2)
    first, second = x.to(at_least_float32(x.dtype)).unflatten(-1, shape).unbind(pair_dim)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=pair_dim)
    return rotated.flatten(-2).to(x.dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for every other dtype.

    Used where a model in half precision must compute in float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def _angle_dtype(device: torch.device | None) -> torch.dtype:
    # MPS has no float64
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def convert_rope_layout(
    state_dict: Mapping[str, Tensor], config: RoFormerConfig
) -> dict[str, Tensor]:
    """Return weights for the other value of `config.rope_interleave`, with the same outputs.

    Applied again with the converted `rope_interleave`, it gives the first weights exactly.

    Args:
        state_dict: Weights of a RoFormer, with or without head; merge adapters first.
        config: Configuration of these weights, which stays as it is.

    Raises:
        ValueError: No coordinates are rotated, or only random features, which have no order.
    """
    if config.position_encoding != "rope" or config.linear_attention == "favor":
        found = f"{config.position_encoding}, {config.linear_attention}"
        raise ValueError(
            "position_encoding must be rope, and linear_attention not favor, to convert the layout "
            f"of rotary pairs, got {found}"
        )
    # half_split[j] = interleaved[permutation[j]], in each head; the rest keeps its place
    heads = torch.arange(config.hidden_size, device="cpu").view(-1, config.attention_head_size)
    rotated, rest = heads.tensor_split([config.rotary_dim], dim=1)
    pairs = rotated.unflatten(1, (-1, 2)).mT.flatten(1)
    permutation = torch.cat((pairs, rest), dim=1).flatten()
    if not config.rope_interleave:
        permutation = permutation.argsort()
    name_parts = [".attention.self.query.", ".attention.self.key."]
    if config.rotary_value:
        name_parts.append(".attention.self.value.")
    converted = dict(state_dict)
    for name, weight in state_dict.items():
        if any(part in name for part in name_parts):
            converted[name] = weight[permutation]
        elif config.rotary_value and name.endswith(".attention.output.dense.weight"):
            converted[name] = weight[:, permutation]
    return converted
