"""The position encodings that RoPE is compared with, chosen by `RoFormerConfig.position_encoding`.

=============== ============================ ===================== ====================
encoding        effect                       computed in           source
=============== ============================ ===================== ====================
rope            rotates queries and keys     `rotary`              Su et al. 2021
learned         added to the embeddings      RoFormerEmbeddings    Devlin et al. 2018
sinusoidal      added to the embeddings      RoFormerEmbeddings    Vaswani et al. 2017
transformer_xl  added to each layer's scores RoFormerSelfAttention Dai et al. 2019
t5              added to all layers' scores  T5Bias, as a mask     Raffel et al. 2019
alibi           added to all layers' scores  AlibiBias, as a mask  Press et al. 2021
none            no positions                 nowhere               a bag of words
=============== ============================ ===================== ====================

arXiv, in this order: 2104.09864, 1810.04805, 1706.03762 (3.5), 1901.02860 (3.3), 1910.10683 (2.1),
2108.12409 (3). Without positions a decoder still knows the causal order.

Scaling: the bias that all layers share (t5, alibi) is added after the product of query and key has
been divided by sqrt(D). Transformer-XL's bias is divided by sqrt(D) together with that product.

docs/guides/encodings.md says what to edit to add an encoding.

Legend: B batch, L queries, S keys, K differences, E size of the vectors, H heads, D head size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .configuration_roformer import RoFormerConfig
from .rotary import compute_inv_freq

T5_NUM_BUCKETS = 32
T5_MAX_DISTANCE = 128
"""From this distance on, all keys share the last bucket."""


def sinusoidal_embeddings(positions: Tensor, dim: int) -> Tensor:
    """Compute sin(p / 10000^(2i / E)) and cos of the same angle, side by side (Vaswani et al.).

    Args:
        positions: Integers of any shape and sign.
        dim: E, even.

    Returns:
        [..., E], float32; the angles are float64.
    """
    angles = positions[..., None] * compute_inv_freq(dim, device=positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class RelativePositions(NamedTuple):
    """Positions of queries relative to keys.

    Attributes:
        differences: m - n, signed, of query m and key n, [1 or B, L, S] integers.
        max_distance: Upper bound of |m - n|; only transformer_xl reads it, for its table.
    """

    differences: Tensor
    max_distance: int


def compute_relative_positions(
    config: RoFormerConfig,
    position_ids: Tensor,
    past_length: int | Tensor,
    positions_are_default: bool,
) -> RelativePositions | None:
    """Compute m - n of the tokens m of a call, with cached ones as keys n too.

    The cache has no positions of its tokens: with cached tokens, positions count from the start of
    the cache, whatever `position_ids`, [1 or B, L], are. `max_distance` is the number of tokens,
    which default positions do not exceed; only for transformer_xl with other positions is it
    computed from the differences, for which the host waits for the device.

    Returns:
        None for encodings without a position bias.
    """
    if not config.has_position_bias:
        return None
    length, past_length = position_ids.shape[-1], int(past_length)
    if past_length:
        total = past_length + length
        keys = torch.arange(total, device=position_ids.device)[None]
        return RelativePositions(keys[:, past_length:, None] - keys[:, None], total)
    differences = position_ids[..., None] - position_ids[:, None]
    if config.position_encoding == "transformer_xl" and not positions_are_default:
        return RelativePositions(differences, int(differences.abs().max()))
    return RelativePositions(differences, length)


def t5_buckets(differences: Tensor, is_causal: bool) -> Tensor:
    """Map m - n, of any shape, to rows of T5's table: one row each if near, logarithmic if far.

    A decoder uses all rows for keys before the query, an encoder half of them and the other half
    for keys after it.
    """
    num_buckets = T5_NUM_BUCKETS if is_causal else T5_NUM_BUCKETS // 2
    is_after = torch.zeros_like(differences) if is_causal else (differences < 0).long()
    distances = differences.clamp(min=0) if is_causal else differences.abs()
    num_exact = num_buckets // 2
    # float32 in T5's order of operations: the bucket at a boundary depends on the rounding
    ratio = torch.log(distances.float().clamp(min=1) / num_exact)
    ratio = ratio / math.log(T5_MAX_DISTANCE / num_exact)
    far = (num_exact + (ratio * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return is_after * num_buckets + torch.where(distances < num_exact, distances, far)


class T5Bias(nn.Module):
    """Learned bias for each head and bucket of distances, shared by all layers.

    Unlike in T5, the product of query and key is divided by sqrt(D), as for all encodings here.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.is_causal = config.is_decoder
        self.relative_attention_bias = nn.Embedding(T5_NUM_BUCKETS, config.num_attention_heads)

    def forward(self, positions: RelativePositions) -> Tensor:
        """Return the bias, [1 or B, H, L, S]."""
        buckets = t5_buckets(positions.differences, self.is_causal)
        return self.relative_attention_bias(buckets).movedim(-1, 1)


class AlibiBias(nn.Module):
    """Fixed bias -slope |m - n| with one slope for each head, shared by all layers.

    The paper's is causal, an encoder's symmetric. No buffer: see `RoFormerModel._cos_sin`.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.slopes = alibi_slopes(config.num_attention_heads)

    def forward(self, positions: RelativePositions) -> Tensor:
        """Return the bias, [1 or B, H, L, S], float32."""
        slopes = torch.tensor(self.slopes).to(positions.differences.device, non_blocking=True)
        return -slopes[:, None, None] * positions.differences.abs()[:, None]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes 2^(-8h/H), h = 1 .. H.

    If H is not a power of two, the slopes of the power below come first, followed by every second
    slope of the power above.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]


class TransformerXLBias(nn.Module):
    """Position bias of Transformer-XL, learned by each layer.

    The score is ((q + u) k + (q + v) W_kR R_{m-n}) / sqrt(D), where R_{m-n}, here no rotation, is
    the sinusoidal embedding of m - n and W_kR is `key_of_distance`. u weighs keys by content, v
    weighs distances, both whatever the query is.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        shape = (config.num_attention_heads, config.attention_head_size)
        self.u = nn.Parameter(torch.empty(shape))
        self.v = nn.Parameter(torch.empty(shape))
        self.initializer_range = config.initializer_range
        self.key_of_distance = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def reset_parameters(self) -> None:
        """Initialise u and v; also called when a checkpoint lacks them."""
        for bias in (self.u, self.v):
            nn.init.normal_(bias, std=self.initializer_range)

    def forward(self, query: Tensor, positions: RelativePositions) -> tuple[Tensor, Tensor]:
        """Compute the query of the product with the keys, and the position bias.

        The bias is computed once for each of the K differences and then gathered.

        Returns:
            query: q + u, [B, L, H, D].
            position_bias: (q + v) W_kR R_{m-n}, not yet divided by sqrt(D), [B, H, L, S].
        """
        max_distance = positions.max_distance
        differences = torch.arange(-max_distance, max_distance + 1, device=query.device)
        table = sinusoidal_embeddings(differences, self.key_of_distance.in_features).to(query.dtype)
        keys = self.key_of_distance(table).view(-1, *query.shape[-2:])  # [K, H, D]
        bias = torch.einsum("blhd,khd->bhlk", query + self.v, keys.to(query.dtype))
        indices = (positions.differences + max_distance)[:, None].expand(*bias.shape[:3], -1)
        return query + self.u, bias.gather(-1, indices)


SHARED_BIASES: dict[str, type[nn.Module]] = {"t5": T5Bias, "alibi": AlibiBias}
"""The position biases that all layers share; those of transformer_xl belong to each layer."""


def build_position_bias(config: RoFormerConfig) -> nn.Module | None:
    """Return the module of the bias that all layers share, or None if the encoding has none."""
    bias = SHARED_BIASES.get(config.position_encoding)
    return None if bias is None else bias(config)
