"""Conversion of attention weights between the two layouts of rotary pairs.

Interleaved (the paper): coordinates 2i and 2i + 1 of a head form a pair. Half-split (Llama,
GPT-NeoX): coordinates i and i + R/2 form a pair, where R is the number of rotated coordinates.
Both compute the same rotation if the rows of the query and key projections are permuted.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .configuration_roformer import RoFormerConfig
from .kernels import Linear


def half_split_permutation(head_dim: int, rotary_dim: int) -> Tensor:
    """Return the permutation p with half_split[j] = interleaved[p[j]] of one head, [D] int64.

    Only the first `rotary_dim` coordinates are rotated; the others keep their place.
    """
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return torch.cat((pairs, torch.arange(rotary_dim, head_dim)))


@torch.no_grad()
def convert_rope_layout(
    config: PreTrainedConfig, attention_blocks: Iterable[nn.Module], interleave: bool
) -> None:
    """Permute the weights of a model's `RoFormerAttention` modules in place.

    For `RoFormerPreTrainedModel.set_rope_interleave`, which has the same argument and errors; after
    an error nothing has been changed.
    """
    blocks: list[Any] = list(attention_blocks)
    _check_convertible(config, blocks)
    for block in blocks:
        attention = block.self
        if attention.has_rotary and attention.interleave != interleave:
            _permute_block(block, interleave)
        attention.interleave = interleave


def _permute_block(block: Any, interleave: bool) -> None:
    attention, config = block.self, block.self.config
    permutation = half_split_permutation(config.attention_head_size, config.rotary_dim)
    if interleave:
        permutation = permutation.argsort()
    rotated = [attention.query, attention.key]
    if config.rotary_value:
        rotated.append(attention.value)
        _permute_heads(block.output.dense.weight, permutation, dim=1)
    for linear in rotated:
        for parameter in linear.parameters():
            _permute_heads(parameter, permutation, dim=0)


def _permute_heads(parameter: Tensor, permutation: Tensor, dim: int) -> None:
    heads = parameter.unflatten(dim, (-1, len(permutation)))
    permuted = heads.index_select(dim + 1, permutation.to(parameter.device))
    parameter.copy_(permuted.flatten(dim, dim + 1))


def _check_convertible(config: PreTrainedConfig, blocks: list[Any]) -> None:
    if not isinstance(config, RoFormerConfig):
        raise ValueError(
            "set_rope_interleave must be called on a model with a RoFormerConfig of this package, "
            f"got a configuration of {type(config).__module__}; convert before composing models"
        )
    if config.linear_attention == "favor":
        raise ValueError(
            "set_rope_interleave must not be called with linear_attention favor, got a call: "
            "random features have no order; remove the call"
        )
    if config.position_encoding != "rope":
        raise ValueError(
            "set_rope_interleave must be called on a model with position_encoding rope, got "
            f"{config.position_encoding}; remove the call"
        )
    for block in blocks:
        for linear in (block.self.query, block.self.key, block.self.value, block.output.dense):
            # subclasses may store weights in another form
            if type(linear) not in (nn.Linear, Linear):
                raise ValueError(
                    "set_rope_interleave must be called on plain linear layers, got "
                    f"{type(linear).__name__}; merge adapters or convert before adding them"
                )
