"""Linear attention with rotary positions: the paper's equation 19, in time and memory O(L).

    out_m = sum_n (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_n phi(q_m)^T phi(k_n)

A score is a product of features, so the sums over n are made once for all queries m (Katharopoulos
et al. 2020, arXiv:2006.16236): M x D numbers a head, however long the text. phi is not negative, so
the denominator cannot vanish. The numerator is rotated; the denominator is not, for rotated
features may be negative and their sum may be zero. Weights can then be negative and need not sum to
1, as the paper says.

What is added to scores cannot be used here, Transformer-XL's terms, T5's and ALiBi's: the sum over
n leaves the query out only where the score is a product phi(q_m) phi(k_n); a summand b(m - n)
belongs to the pair, and every pair would have to be visited again.

Sums are at least float32 whatever the model's dtype: they grow with the length. There are no
probabilities, and so no dropout of them. Legend: B batch, L tokens, H heads, D head width, M
features, C tokens of a chunk.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from .configuration_roformer import RoFormerConfig
from .rotary import arithmetic, rotate

CHUNK = 64
"""Tokens of a decoder that look at each other directly; earlier ones are sums."""

NOTHING = -1e30
"""Offset where there are no keys: any other counts before it."""

LEAST = 1e-3
"""Added to relu, as in Performer: a token without any positive coordinate would see nothing."""


class Sums(NamedTuple):
    """What a query must know of all keys before it.

    Attributes:
        products: sum of R_n phi(k_n) v_n^T, [B, H, M, D].
        weights: sum of phi(k_n), [B, H, M].
        offset: Both are exp(-offset) times as large as written, [B, H]; 0 but for FAVOR+.
    """

    products: Tensor
    weights: Tensor
    offset: Tensor

    def on(self, offset: Tensor) -> "Sums":
        """The same sums with another offset, [B, H]."""
        factor = (self.offset - offset).exp()[..., None]
        return Sums(self.products * factor[..., None], self.weights * factor, offset)


class LinearCache(Cache):
    """The sums of each layer of a decoder, in place of its keys and values: O(1) a token."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sums: dict[int, Sums] = {}
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, padding included."""
        return self.tokens

    def reset(self) -> None:
        """No tokens."""
        self.sums, self.tokens = {}, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self._each(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.sums = {i: Sums(*(change(x) for x in sums)) for i, sums in self.sums.items()}

    def crop(self, *arguments: Any, **options: Any) -> None:
        """Not possible.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "past_key_values must be a cache of keys to be cropped, got the sums of linear "
            "attention; generate without an assistant"
        )


class Features(nn.Module):
    """phi: what makes queries and keys non-negative.

    elu: elu(x) + 1 (Katharopoulos et al.). relu: relu(x) + 0.001. favor: FAVOR+ of Performer
    (Choromanski et al. 2020, arXiv:2009.14794, lemma 1), exp(w x - |x|^2 / 2) for M orthogonal
    random w, whose product estimates softmax's exp(q k / sqrt(D)).

    The random vectors are a function of a seed, saved with the model, and of how often they were
    drawn: during training anew every `redraw_features` forward passes. Keys of one row and head are
    on one scale: those whose features are e^87 times smaller than the largest count for nothing.
    With gradient checkpointing, a draw between a forward and its backward pass makes gradients
    wrong.
    """

    vectors: Tensor
    seed: Tensor
    calls: Tensor

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.kind = config.linear_attention
        self.every = config.redraw_features
        self.width = config.head_width
        if self.kind == "favor":
            shape = (config.random_features, config.head_width)
            self.register_buffer("vectors", torch.empty(shape))
            self.register_buffer("seed", torch.zeros((), dtype=torch.long))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def reset(self) -> None:
        """A seed from torch's generator, and the first draw."""
        if self.kind == "favor":
            self.seed.copy_(torch.randint(2**31, ()))
            self.calls.zero_()
            self.draw()

    def draw(self) -> None:
        """The random vectors of now."""
        number = int(self.calls) // self.every if self.every else 0
        count, width = self.vectors.shape
        self.vectors.copy_(orthogonal(count, width, int(self.seed) + 7919 * number))

    @torch.compiler.disable
    def advance(self) -> None:
        """Count a forward pass of training, and draw anew when it is time."""
        self.calls += 1
        if self.every and int(self.calls) % self.every == 0:
            self.draw()

    def of_queries(self, query: Tensor) -> Tensor:
        """[B, L, H, D] to [B, L, H, M], float32, times what does not matter to a query."""
        if self.kind != "favor":
            return self._plain(query)
        powers = self._powers(query)
        return (powers - powers.amax(dim=-1, keepdim=True).detach()).exp()

    def of_keys(self, key: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, L, H, D] to [B, L, H, M], float32, times exp(-offset), and the offset [B, H].

        Args:
            key: Of all tokens.
            real: [B, L], False for padding, whose features are 0; None means all are real.
        """
        if self.kind == "favor":
            powers = self._powers(key)
            if real is not None:
                powers = powers.masked_fill(~real[..., None, None], -math.inf)
            offset = powers.amax(dim=(1, 3)).detach()  # the largest feature is 1
            offset = offset.clamp(min=NOTHING)
            return (powers - offset[:, None, :, None]).exp(), offset
        features = self._plain(key)
        if real is not None:
            features = features * real[..., None, None]
        return features, torch.zeros(key.shape[0], key.shape[2], device=key.device)

    def _plain(self, x: Tensor) -> Tensor:
        x = x.to(arithmetic(x.dtype))
        return F.elu(x) + 1 if self.kind == "elu" else F.relu(x) + LEAST

    def _powers(self, x: Tensor) -> Tensor:
        x = x.to(arithmetic(x.dtype)) * self.width**-0.25
        vectors = self.vectors.to(x.dtype)
        if self.training:  # they may be drawn anew before the backward pass
            vectors = vectors.clone()
        return x @ vectors.T - x.square().sum(-1, keepdim=True) / 2


def orthogonal(number: int, width: int, seed: int) -> Tensor:
    """Normally distributed vectors of which each D are orthogonal, [number, D] (Performer).

    Args:
        number: How many.
        width: D.
        seed: Decides them.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    # whatever the default dtype and device are
    same: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    blocks = []
    for _ in range(-(-number // width)):
        q, r = torch.linalg.qr(torch.randn(width, width, **same))
        blocks.append((q * r.diagonal().sign()).T)  # else one sign is commoner than the other
    lengths = torch.randn(number, width, **same).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:number] * lengths


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    table: Tensor | None,
    interleave: bool = True,
    real: Tensor | None = None,
    causal: bool = False,
    before: Sums | None = None,
) -> tuple[Tensor, Sums]:
    """The equation above.

    Args:
        query: [B, L, H, D]; keys and values alike.
        key: [B, L, H, D].
        value: [B, L, H, D].
        features: phi.
        table: Rotations of the M features, from `rotary.rotation_table`, or None for none.
        interleave: Pair adjacent features.
        real: [B, L], False for padding; None means all are real.
        causal: Token m sees tokens up to m.
        before: Sums over the tokens of earlier calls.

    Returns:
        [B, L, H, D] of the value's dtype; and the sums over all tokens so far.
    """
    with torch.autocast(query.device.type, enabled=False):
        if not causal:
            return _bidirectional(query, key, value, features, table, interleave, real)
        q = features.of_queries(query)
        k, offset = features.of_keys(key, real)
        if before is not None:  # both on one scale
            common = torch.maximum(offset, before.offset)
            k = k * (offset - common).exp()[:, None, :, None]
            offset, before = common, before.on(common)
        turned_q, turned_k = (_turned(x, table, interleave) for x in (q, k))
        v = value.to(arithmetic(value.dtype))
        return _causal(q, k, turned_q, turned_k, v, offset, before, value.dtype)


def _turned(x: Tensor, table: Tensor | None, interleave: bool) -> Tensor:
    return x if table is None else rotate(x, table, interleave)


def _bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    table: Tensor | None,
    interleave: bool,
    real: Tensor | None,
) -> tuple[Tensor, Sums]:
    k, offset = features.of_keys(key, real)
    v = value.to(arithmetic(value.dtype))
    products = torch.einsum("blhm,blhd->bhmd", _turned(k, table, interleave), v)
    sums = Sums(products, k.sum(dim=1), offset)
    q = features.of_queries(query)
    mixed = torch.einsum("blhm,bhmd->blhd", _turned(q, table, interleave), sums.products)
    return _divided(mixed, torch.einsum("blhm,bhm->blh", q, sums.weights)).to(value.dtype), sums


def _causal(
    q: Tensor,
    k: Tensor,
    turned_q: Tensor,
    turned_k: Tensor,
    v: Tensor,
    offset: Tensor,
    before: Sums | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Sums]:
    """Inside a chunk pair by pair, before it by sums: O(L C) instead of O(L^2)."""
    L = q.shape[1]  # noqa: N806
    chunk = min(CHUNK, L)
    q, k, turned_q, turned_k, v = (_chunks(x, chunk) for x in (q, k, turned_q, turned_k, v))
    added = torch.einsum("bclhm,bclhd->bchmd", turned_k, v)  # of each chunk
    weighed = k.sum(dim=2)
    products, earlier = _sums(added, None if before is None else before.products)
    weights, lighter = _sums(weighed, None if before is None else before.weights)
    inside = torch.einsum("bclhm,bcshm->bchls", turned_q, turned_k).tril()
    plain = torch.einsum("bclhm,bcshm->bchls", q, k).tril()
    mixed = torch.einsum("bchls,bcshd->bclhd", inside, v)
    mixed = mixed + torch.einsum("bclhm,bchmd->bclhd", turned_q, earlier)
    total = plain.sum(-1).transpose(-1, -2) + torch.einsum("bclhm,bchm->bclh", q, lighter)
    found = _divided(mixed, total).flatten(1, 2)[:, :L]
    return found.to(dtype), Sums(products[:, -1], weights[:, -1], offset)


def _sums(added: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of all chunks up to each, and of all before it, [B, chunks, ...].

    The latter are shifted and not subtracted: a large key would take the small ones before it
    along, and tell them of itself.
    """
    first = torch.zeros_like(added[:, :1]) if before is None else before[:, None]
    sums = torch.cat((first, added), dim=1).cumsum(dim=1)
    return sums[:, 1:], sums[:, :-1]


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, L, ...] to [B, chunks, size, ...], zeros after the end."""
    short = -x.shape[1] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, short)) if short else x
    return padded.unflatten(1, (-1, size))


def _divided(mixed: Tensor, total: Tensor) -> Tensor:
    """A token that sees nothing, padding in front for instance, has 0 of both and stays 0."""
    return mixed / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
