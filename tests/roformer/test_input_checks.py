"""What a call is refused, in one line that names the argument."""

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask

from roformer import RoFormerForSequenceClassification, RoFormerModel
from tiny import HEADS, POOLED, tiny_config

IDS = torch.arange(5, 15).view(2, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds must be given, got neit"),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, "exactly one .* got both"),
        ({"input_ids": [[1] * 5] * 2}, "input_ids must be a tensor, got a list"),
        ({"input_ids": IDS.float()}, "input_ids must be int32 or int64, got torch.float32"),
        ({"input_ids": IDS[0]}, r"input_ids must have the shape \[any, any\], got \[5\]"),
        ({"input_ids": IDS[:0]}, r"input_ids must hold at least one token, got shape \[0, 5\]"),
        ({"input_ids": IDS + 46}, "input_ids must be at least 0 and below 60, got 60"),
        ({"input_ids": IDS - 6}, "input_ids must be at least 0 and below 60, got -1"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 31)},
         r"inputs_embeds .* \[any, any, 32\], got \[2, 5, 31\]"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 0, 32)},
         "inputs_embeds must hold at least one token"),
        ({"token_type_ids": torch.zeros(2, 4).long()}, r"token_type_ids must .* got \[2, 4\]"),
        ({"token_type_ids": torch.full((2, 5), 2)}, "token_type_ids must be .* below 2, got 2"),
        ({"position_ids": torch.arange(4)}, r"position_ids must .* got \[4\]"),
        ({"position_ids": torch.rand(2, 5)}, "position_ids must be integers, got torch.float32"),
        ({"attention_mask": [[1] * 5] * 2}, "attention_mask must be a tensor, got a list"),
        ({"attention_mask": np.ones((2, 5))}, "attention_mask must be a tensor, got a ndarray"),
        ({"attention_mask": torch.ones(2, 4)},
         r"attention_mask must have the shape \[2, 5\] or .*, got \[2, 4\]"),
        ({"input_ids": IDS[:1], "attention_mask": torch.ones(1, 4)},
         r"attention_mask must have the shape \[1, 5\] or .*, got \[1, 4\]"),
        ({"attention_mask": torch.ones(2, 5, 5)}, r"attention_mask must .*\[2, 5, 5\]"),
        ({"attention_mask": torch.ones(2, 1, 4, 5)},
         r"attention_mask .* \[2 or 1, 1 or 2, 5 or 1, 5\], got \[2, 1, 4, 5\]"),
        ({"attention_mask": torch.ones(2, 3, 5, 5)}, r"attention_mask .*\[2, 3, 5, 5\]"),
        ({"attention_mask": torch.ones(2, 1, 5, 6)}, r"attention_mask .*\[2, 1, 5, 6\]"),
        ({"attention_mask": torch.full((2, 5), -1e9)}, "mask must be 0 and 1, got -1e.09"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2]] * 2)}, "must be 0 and 1, got 2; scores"),
        ({"attention_mask": torch.full((2, 1, 1, 5), -10000)}, "must be 0 and 1, got -10000"),
        ({"attention_mask": torch.ones(2, 1, 5, 5).tril()}, "attention_mask must be added to the"),
        ({"attention_mask": create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 5, 5, "cpu")},
         "attention_mask must be a tensor"),
        ({"encoder_hidden_states": torch.zeros(2, 9, 32)},
         "encoder_hidden_states must be None .* add_cross_attention"),
        ({"encoder_attention_mask": torch.ones(2, 5)},
         "encoder_attention_mask must be None without encoder_hidden_states"),
        *(({"input_ids": IDS.view(1, 10), "cu_seq_lens_q": torch.tensor(cu_seqlens)},
           "cu_seq_lens_q must")
          for cu_seqlens in ([0, 6, 4, 10], [0, 6, 40], [3, 6, 10], [4, 6], [0, 4], [[0, 4, 10]],
                             [0.0, 10.0])),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9, 10])},
         "cu_seq_lens_q must end a document where a row ends, got none at 5"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values must .* an encoder"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused_by_name(arguments, message, config):
    with pytest.raises(ValueError, match=message):
        RoFormerModel(config)(**({"input_ids": IDS} | arguments))


def test_a_mask_of_another_encoder_is_refused_by_name(config):
    config.is_decoder = config.add_cross_attention = True
    encoder = {"encoder_hidden_states": torch.zeros(2, 9, 32)}
    with pytest.raises(ValueError, match="encoder_attention_mask must have the shape"):
        RoFormerModel(config)(IDS, **encoder, encoder_attention_mask=torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "built", "edited"),
    [
        ("is_decoder", False, True),
        ("is_decoder", True, False),
        ("position_encoding", "rope", "alibi"),
        ("position_encoding", "none", "rope"),
        ("position_encoding", "t5", "none"),
        ("linear_attention", "elu", "relu"),
        ("rope_interleave", True, False),
        ("norm_type", "layer_norm", "rms_norm"),
        ("use_bias", True, False),
    ],
)
def test_a_field_that_the_layers_were_built_from_cannot_be_edited(name, built, edited):
    model = RoFormerModel(tiny_config(**{name: built}))
    setattr(model.config, name, edited)
    with pytest.raises(ValueError, match=f"{name} must stay {built} in a built model, got"):
        model(IDS)


@pytest.mark.parametrize("head", POOLED)
def test_packed_documents_are_refused_where_one_token_of_a_row_is_read(head, config):
    ids = IDS.view(1, -1) if head is RoFormerForSequenceClassification else IDS.view(1, 1, -1)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
        head(config)(ids, cu_seq_lens_q=torch.tensor([0, 3, ids.numel()]))


@pytest.mark.parametrize("head", [*HEADS, RoFormerModel])
def test_a_batch_in_place_of_its_tensors_is_refused_with_the_remedy(head, config):
    with pytest.raises(ValueError, match=r"input_ids must .* call model\(\*\*batch\)"):
        head(config)(transformers.BatchEncoding({"input_ids": IDS}))


def test_an_unknown_kernel_is_refused_with_the_names_of_all(config):
    with pytest.raises(ValueError, match="attn_implementation.* must be one of .*auto, unpadded"):
        RoFormerModel(config).set_attn_implementation("flash")
