"""What a call is refused, in one line that names the argument."""

import pytest
import torch
import transformers

from roformer import RoFormerModel

IDS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds must be given, got neither"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 5, 32)}, "exactly one .* got both"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor, got a list"),
        ({"input_ids": IDS[0]}, r"input_ids must have the shape \[any, any\], got \[5\]"),
        ({"inputs_embeds": torch.zeros(2, 5, 31)}, r"inputs_embeds .* \[any, any, 32\], got \[2"),
        ({"position_ids": torch.arange(4)}, r"position_ids must .* got \[4\]"),
        ({"input_ids": IDS + 60}, "input_ids must be at least 0 and below 60, got 60"),
        ({"input_ids": IDS - 1}, "input_ids must be at least 0 and below 60, got -1"),
        ({"token_type_ids": IDS + 2}, "token_type_ids must be at least 0 and below 2, got 2"),
        ({"attention_mask": torch.ones(2, 4)},
         r"attention_mask must have the shape \[2, 5\] or .*, got \[2, 4\]"),
        ({"attention_mask": torch.ones(2, 1, 4, 5)},
         r"attention_mask .* \[2 or 1, 1 or 2, 5 or 1, 5\], got \[2, 1, 4, 5\]"),
        ({"attention_mask": torch.ones(2, 3, 5, 5)}, r"attention_mask .*\[2, 3, 5, 5\]"),
        ({"attention_mask": torch.ones(2, 1, 5, 6)}, r"attention_mask .*\[2, 1, 5, 6\]"),
        ({"attention_mask": torch.full((2, 5), -1e9)}, "attention_mask must be 0 and 1"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2]] * 2)}, "attention_mask must be 0 and 1"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9, 10])},
         "cu_seq_lens_q must end a document where a row ends, got none at 5"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values must .* an encoder"),
        ({"encoder_hidden_states": torch.zeros(2, 9, 32)},
         "encoder_hidden_states must be None .* add_cross_attention"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused_by_name(arguments, message, config):
    if arguments and "inputs_embeds" not in arguments:
        arguments = {"input_ids": IDS} | arguments
    with pytest.raises(ValueError, match=message):
        RoFormerModel(config)(**arguments)


@pytest.mark.parametrize(
    "ends", [[0, 6, 4, 10], [0, 6, 40], [3, 6, 10], [4, 6], [0, 4], [[0, 4, 10]]]
)
def test_lengths_that_do_not_fit_are_refused_by_name(ends, config):
    with pytest.raises(ValueError, match="cu_seq_lens_q must"):
        RoFormerModel(config)(torch.zeros(1, 10).long(), cu_seq_lens_q=torch.tensor(ends))


def test_an_encoders_mask_of_another_length_is_refused(config):
    config.is_decoder = config.add_cross_attention = True
    encoder = {"encoder_hidden_states": torch.zeros(2, 9, 32)}
    with pytest.raises(ValueError, match="encoder_attention_mask must have the shape"):
        RoFormerModel(config)(IDS, **encoder, encoder_attention_mask=torch.ones(2, 3))
