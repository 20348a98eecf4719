"""Conversion of attention weights between the two layouts of rotary pairs.

Interleaved (the paper): coordinates 2i and 2i + 1 of a head form a pair. Half-split (Llama,
GPT-NeoX): coordinates i and i + R/2 form a pair, where R is the number of rotated coordinates.
Both compute the same rotation if the rows of the query and key projections are permuted.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .configuration_roformer import RoFormerConfig

ROTATED = (".attention.self.query.", ".attention.self.key.")
ROTATED_VALUE = ".attention.self.value."
READS_VALUE = ".attention.output.dense.weight"


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
    # half_split[j] = interleaved[permutation[j]] in each head; the rest keeps its place
    pairs = torch.arange(config.rotary_dim).view(-1, 2).T.flatten()
    rest = torch.arange(config.rotary_dim, config.attention_head_size)
    permutation = torch.cat((pairs, rest))
    if not config.rope_interleave:
        permutation = permutation.argsort()
    rotated = (*ROTATED, ROTATED_VALUE) if config.rotary_value else ROTATED
    converted = dict(state_dict)
    for name, weight in state_dict.items():
        if any(part in name for part in rotated):
            converted[name] = _permute_heads(weight, permutation, dim=0)
        elif config.rotary_value and name.endswith(READS_VALUE):
            converted[name] = _permute_heads(weight, permutation, dim=1)
    return converted


def _permute_heads(weight: Tensor, permutation: Tensor, dim: int) -> Tensor:
    heads = weight.unflatten(dim, (-1, len(permutation)))
    permuted = heads.index_select(dim + 1, permutation.to(weight.device))
    return permuted.flatten(dim, dim + 1)
