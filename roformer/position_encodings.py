"""The encodings that RoPE is compared with, each the equation of its paper, on one encoder.

`RoFormerConfig.position_encoding` chooses. What it changes is one of three places:

=============== ======================== ====================================================
rope            queries and keys         Su et al. 2021, arXiv:2104.09864: `rotary`
learned         the sum of embeddings    Devlin et al. 2018, arXiv:1810.04805: a table, as BERT's
sinusoidal      the sum of embeddings    Vaswani et al. 2017, arXiv:1706.03762, section 3.5
transformer_xl  the scores of each layer Dai et al. 2019, arXiv:1901.02860, section 3.3
t5              the scores of all layers Raffel et al. 2019, arXiv:1910.10683, section 2.1
alibi           the scores of all layers Press et al. 2021, arXiv:2108.12409, section 3
none            nothing                  a bag of words, or in a decoder what causality tells
=============== ======================== ====================================================

Section 2 of the paper discusses all but rope and the last two (equations 3 to 10). Another one that
is added to the scores takes its name in `configuration_roformer.ADDED`, a class here and its line
in `score_bias`; everything else, tests included, goes by these.

Legend: B batch, L queries, S keys, K distances, E width, H heads, D head width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .configuration_roformer import RoFormerConfig
from .rotary import inverse_frequencies

BUCKETS = 32
"""T5's: rows of its table."""

FARTHEST = 128
"""T5's: the distance from which all share the last bucket."""


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """sin(p / 10000^(2i / E)) and its cosine, side by side (Vaswani et al., section 3.5).

    Args:
        positions: [...] integers; for Transformer-XL distances, which may be negative.
        width: E, even.

    Returns:
        [..., E], float32; the angles are float64.
    """
    angles = positions[..., None] * inverse_frequencies(width, device=positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class Distances(NamedTuple):
    """How far apart queries and keys are: m - n, the query's position minus the key's.

    Attributes:
        between: [1 or B, L, S] integers.
        reach: No distance is larger than this, either way.
    """

    between: Tensor
    reach: int


def distances(positions: Tensor, start: int, gaps: bool) -> Distances:
    """Of the tokens of a call to each other, or behind a cache to all tokens so far.

    Args:
        positions: [1 or B, L].
        start: Tokens in the cache; their positions are not kept, so behind it tokens are counted.
        gaps: Whether tokens may be further apart than there are tokens, and `reach` must know; it
            waits for the device.
    """
    if start:
        queries = torch.arange(start, start + positions.shape[-1], device=positions.device)[None]
        keys = torch.arange(start + positions.shape[-1], device=positions.device)[None]
        return Distances(queries[..., None] - keys[:, None], keys.shape[-1])
    between = positions[..., None] - positions[:, None]
    return Distances(between, int(between.abs().max()) if gaps else positions.shape[-1])


def t5_buckets(between: Tensor, causal: bool) -> Tensor:
    """The row of T5's table for each distance: exact when near, by the logarithm when far.

    An encoder has half of the rows for keys before the query and half for those after it.

    Args:
        between: m - n, any shape of integers.
        causal: Only keys before the query are seen, and have all rows.
    """
    number = BUCKETS if causal else BUCKETS // 2
    first = torch.zeros_like(between) if causal else (between < 0).long() * number
    far = between.clamp(min=0) if causal else between.abs()
    exact = number // 2
    # float32, and in this order of operations, as T5 does: at the borders the bucket depends on it
    logarithm = torch.log(far.float().clamp(min=1) / exact) / math.log(FARTHEST / exact)
    beyond = exact + (logarithm * (number - exact)).long()
    return first + torch.where(far < exact, far, beyond.clamp(max=number - 1))


class T5Bias(nn.Module):
    """A learned number for each head and bucket of distances, added to the scores of all layers.

    T5 itself does not divide q k by sqrt(D); here it is divided, as with every other encoding.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.causal = config.is_decoder
        self.relative_attention_bias = nn.Embedding(BUCKETS, config.num_attention_heads)

    def forward(self, found: Distances) -> Tensor:
        """[1 or B, H, L, S]."""
        return self.relative_attention_bias(t5_buckets(found.between, self.causal)).movedim(-1, 1)


class AlibiBias(nn.Module):
    """-slope |m - n|, a fixed slope for each head, added to the scores of all layers.

    The paper's is causal; for an encoder this is its symmetric form.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.slopes = alibi_slopes(config.num_attention_heads)

    def forward(self, found: Distances) -> Tensor:
        """[1 or B, H, L, S], float32."""
        slopes = torch.tensor(self.slopes).to(found.between.device, non_blocking=True)
        return -slopes[:, None, None] * found.between.abs()[:, None]


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / H) for h = 1 .. H; for other numbers than powers of two, those of the power below
    and then every second one of the power above.
    """  # noqa: D205 one sentence
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


class TransformerXLTerms(nn.Module):
    """The three of Transformer-XL's four terms that know positions or are no token's own.

    The score is (q + u) k + (q + v) W_kR R_{m-n}, all of it divided by sqrt(D): what is like what,
    which keys matter to everybody (u), which distances matter to this token, and which to everybody
    (v). R is the sinusoid of the distance; u, v and W_kR are learned by each layer.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        heads = (config.num_attention_heads, config.head_width)
        self.u = nn.Parameter(torch.empty(heads))
        self.v = nn.Parameter(torch.empty(heads))
        self.spread = config.initializer_range
        self.key_of_distance = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def reset(self) -> None:
        """Draw u and v; loading calls it where a checkpoint lacks them."""
        for bias in (self.u, self.v):
            nn.init.normal_(bias, std=self.spread)

    def forward(self, query: Tensor, found: Distances) -> tuple[Tensor, Tensor]:
        """Queries [B, L, H, D] to what meets the keys, [B, L, H, D], and scores [B, H, L, S].

        Every distance is multiplied once, K of them, and then read where it occurs.
        """
        reach = torch.arange(-found.reach, found.reach + 1, device=query.device)
        table = sinusoids(reach, self.key_of_distance.in_features).to(query.dtype)
        keys = self.key_of_distance(table).view(-1, *query.shape[-2:])  # [K, H, D]
        scores = torch.einsum("blhd,khd->bhlk", query + self.v, keys.to(query.dtype))
        places = (found.between + found.reach)[:, None].expand(*scores.shape[:3], -1)
        return query + self.u, scores.gather(-1, places)


def score_bias(config: RoFormerConfig) -> nn.Module | None:
    """What is added to the scores of all layers, or None."""
    if not config.biases_scores or config.position_encoding == "transformer_xl":  # by each layer
        return None
    kinds: dict[str, type[nn.Module]] = {"t5": T5Bias, "alibi": AlibiBias}
    return kinds[config.position_encoding](config)
