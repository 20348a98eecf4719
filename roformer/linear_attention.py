"""Linear attention with rotary positions (Su et al. 2021, equation 19), in time and memory O(L).

    out_m = sum_n (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_n phi(q_m)^T phi(k_n)

The score of a pair of tokens is a product of their features, so the sums over the keys n are
computed once for all queries m (Katharopoulos et al. 2020, arXiv:2006.16236). phi is not
negative, so neither is the denominator. Only the numerator is rotated: rotated features may be
negative, and their sum may be zero. As the paper notes, weights can then be negative and need not
sum to 1.

Position biases (Transformer-XL, T5, ALiBi) cannot be combined with it: a summand b(m - n) depends
on the pair of tokens and does not factor into a product of features.

The sums grow with the length and are therefore at least float32. There are no attention
probabilities, and so no dropout of them.

Legend: B batch, L tokens, E hidden size, H heads, D head size, F features, C tokens of a chunk.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from .configuration_roformer import RoFormerConfig
from .kernels import Linear
from .rotary import apply_rotary, at_least_float32

CHUNK_LENGTH = 64
"""Causal attention computes scores within chunks of so many tokens, and sums between chunks."""

RELU_EPSILON = 1e-3
"""Added to relu, as in Performer, so that features are positive."""


class FeatureMap(nn.Module):
    """phi(x) = elu(x) + 1 (Katharopoulos et al.) or relu(x) + 0.001, coordinate by coordinate."""

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.kind = config.linear_attention

    def query_features(self, query: Tensor) -> Tensor:
        """Compute phi(q) up to a positive factor for each query, which cancels in the fraction.

        [B, L, H, D] to [B, L, H, F], at least float32.
        """
        return self._features(query)

    def key_features(self, key: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Compute phi(k) up to a positive factor for each row and head, which cancels likewise.

        Keys are [B, L, H, D], features [B, L, H, F]. The features of padding, where the [B, L] mask
        is False, are 0.
        """
        features = self._features(key)
        return features if padding_mask is None else features * padding_mask[..., None, None]

    def _features(self, x: Tensor) -> Tensor:
        x = x.to(at_least_float32(x.dtype))
        return F.elu(x) + 1 if self.kind == "elu" else F.relu(x) + RELU_EPSILON


class RandomFeatureMap(FeatureMap):
    """FAVOR+ of Performer (Choromanski et al. 2020, arXiv:2009.14794, lemma 1).

    phi(x) = exp(w y - |y|^2 / 2) with y = x D^(-1/4), for F orthogonal random vectors w; products
    of features estimate exp(q k / sqrt(D)), the kernel function of softmax.

    The vectors are drawn with the initial weights and saved with them; Performer can draw them
    again in training. All keys of a row and head share one scale: keys whose features are e^87
    times smaller than the largest underflow to 0.
    """

    vectors: Tensor

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__(config)
        shape = (config.random_features, config.attention_head_size)
        self.register_buffer("vectors", torch.empty(shape))

    def reset_parameters(self) -> None:
        """Draw the vectors, with a seed from torch's default generator."""
        number, dim = self.vectors.shape
        vectors = orthogonal_vectors(number, dim, int(torch.randint(2**31, ())))
        initialization.copy_(self.vectors, vectors)  # not if they were loaded

    def query_features(self, query: Tensor) -> Tensor:
        """Compute phi(q), divided by the largest feature of each query."""
        exponents = self._exponents(query)
        return (exponents - exponents.amax(dim=-1, keepdim=True).detach()).exp()

    def key_features(self, key: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Compute phi(k), divided by the largest feature of each row and head."""
        exponents = self._exponents(key)
        if padding_mask is not None:
            exponents = exponents.masked_fill(~padding_mask[..., None, None], -math.inf)
        largest = exponents.amax(dim=(1, 3), keepdim=True).detach()
        # of a row that is all padding it is -inf, and the difference would be nan
        return (exponents - largest.clamp(min=torch.finfo(largest.dtype).min)).exp()

    def _exponents(self, x: Tensor) -> Tensor:
        x = x.to(at_least_float32(x.dtype)) * x.shape[-1] ** -0.25
        return x @ self.vectors.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def orthogonal_vectors(number: int, dim: int, seed: int) -> Tensor:
    """Draw normally distributed vectors of which every `dim` are orthogonal (Performer).

    Returns:
        [number, dim], float32, the same whatever torch's default dtype and device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    blocks = []
    for _ in range(math.ceil(number / dim)):
        q, r = torch.linalg.qr(torch.randn(dim, dim, **options))
        blocks.append((q * r.diagonal().sign()).T)  # otherwise the signs are not uniform
    norms = torch.randn(number, dim, **options).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:number] * norms


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    interleave: bool = True,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute equation 19.

    Args:
        query: [B, L, H, D].
        key: [B, L, H, D].
        value: [B, L, H, D].
        feature_map: phi.
        position_embeddings: cos and sin for F features, from `rotary.rotary_embeddings`; None for
            attention without positions.
        interleave: Pair adjacent features.
        padding_mask: [B, L] bool, False for padding; None means no padding.
        is_causal: Token m attends to the tokens up to m.

    Returns:
        [B, L, H, D], dtype of `value`.
    """
    with torch.autocast(query.device.type, enabled=False):
        q = feature_map.query_features(query)
        k = feature_map.key_features(key, padding_mask)
        v = value.to(at_least_float32(value.dtype))
        rotated_q, rotated_k = q, k
        if position_embeddings is not None:
            rotated_q = apply_rotary(q, *position_embeddings, interleave)
            rotated_k = apply_rotary(k, *position_embeddings, interleave)
        if is_causal:
            return _causal(q, k, rotated_q, rotated_k, v).to(value.dtype)
        kv, k_sum = torch.einsum("blhf,blhd->bhfd", rotated_k, v), k.sum(dim=1)
        numerator = torch.einsum("blhf,bhfd->blhd", rotated_q, kv)
        denominator = torch.einsum("blhf,bhf->blh", q, k_sum)
        return _divide(numerator, denominator).to(value.dtype)


def _causal(q: Tensor, k: Tensor, rotated_q: Tensor, rotated_k: Tensor, v: Tensor) -> Tensor:
    """Scores within chunks, sums over all chunks before: O(L C) instead of O(L^2).

    Returns the output, [B, L, H, D].
    """
    length = q.shape[1]
    chunk_length = min(CHUNK_LENGTH, length)
    tensors = (q, k, rotated_q, rotated_k, v)
    q, k, rotated_q, rotated_k, v = (_split_chunks(x, chunk_length) for x in tensors)
    kv_before = _sums_before(torch.einsum("bclhf,bclhd->bchfd", rotated_k, v))
    k_sum_before = _sums_before(k.sum(dim=2))
    rotated_scores = torch.einsum("bclhf,bcshf->bchls", rotated_q, rotated_k).tril()
    scores = torch.einsum("bclhf,bcshf->bchls", q, k).tril()
    numerator = torch.einsum("bchls,bcshd->bclhd", rotated_scores, v)
    numerator = numerator + torch.einsum("bclhf,bchfd->bclhd", rotated_q, kv_before)
    denominator = scores.sum(-1).transpose(-1, -2)
    denominator = denominator + torch.einsum("bclhf,bchf->bclh", q, k_sum_before)
    return _divide(numerator, denominator).flatten(1, 2)[:, :length]


def _sums_before(chunk_sums: Tensor) -> Tensor:
    """Return the sums over all chunks before each chunk, [B, chunks, ...].

    They are not computed by subtraction: a large key would cancel the small ones before it, and
    leak into the past.
    """
    first = torch.zeros_like(chunk_sums[:, :1])
    return torch.cat((first, chunk_sums[:, :-1]), dim=1).cumsum(dim=1)


def _split_chunks(x: Tensor, chunk_length: int) -> Tensor:
    """[B, L, ...] to [B, chunks, chunk_length, ...], padded with zeros at the end."""
    missing = -x.shape[1] % chunk_length
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
    return padded.unflatten(1, (-1, chunk_length))


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; a token that attends to nothing (padding on the left) has 0 / 0 and gets 0."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)[..., None]


class RoFormerLinearSelfAttention(nn.Module):
    """Self-attention with linear attention, in place of `RoFormerSelfAttention`.

    Its arguments are the same, except that `attention_mask` is the padding mask, [B, L] bool, and
    there is no cache. There are no attention probabilities to return.
    """

    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.attention_head_size
        self.is_causal = config.is_decoder
        is_random = config.linear_attention == "favor"
        self.features = RandomFeatureMap(config) if is_random else FeatureMap(config)
        self.query = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, L, E] to [B, L, E] and None."""
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.attention_head_size)
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(hidden_states).view(shape) for layer in layers)
        context = linear_attention(
            query,
            key,
            value,
            self.features,
            position_embeddings,
            interleave=self.config.rope_interleave,
            padding_mask=attention_mask,
            is_causal=self.is_causal,
        )
        return context.flatten(-2), None
