"""What a call is refused, in one line that names the argument."""

import pytest
import torch
import transformers

from roformer import RoFormerModel
from tiny import HEADS, POOLED, tiny_config

IDS = torch.arange(5, 15).view(2, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds must be given, got neit"),
        ({"inputs_embeds": torch.zeros(2, 5, 32)}, "exactly one .* got both"),
        ({"input_ids": [[1] * 5] * 2}, "input_ids must be a tensor, got a list"),
        ({"input_ids": IDS[0]}, r"input_ids must have the shape \[any, any\], got \[5\]"),
        ({"input_ids": IDS + 46}, "input_ids must be at least 0 and below 60, got 60"),
        ({"input_ids": IDS - 6}, "input_ids must be at least 0 and below 60, got -1"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 31)},
         r"inputs_embeds .* \[any, any, 32\], got \[2, 5, 31\]"),
        ({"token_type_ids": torch.zeros(2, 4).long()}, r"token_type_ids must .* got \[2, 4\]"),
        ({"token_type_ids": torch.full((2, 5), 2)}, "token_type_ids must be .* below 2, got 2"),
        ({"position_ids": torch.arange(4)}, r"position_ids must .* got \[4\]"),
        ({"position_ids": torch.rand(2, 5)}, "position_ids must be integers, got torch.float32"),
        ({"attention_mask": [[1] * 5] * 2}, "attention_mask must be a tensor, got a list"),
        ({"attention_mask": torch.ones(2, 4)},
         r"attention_mask must have the shape \[2, 5\], got \[2, 4\]"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2]] * 2)}, "must be 0 and 1, got 2; scores"),
        *(({"attention_mask": torch.ones(shape)}, "attention_mask must have the shape .* got")
          for shape in ((3, 1, 5, 5), (2, 3, 5, 5), (2, 1, 4, 5), (1, 1, 5, 7))),
        ({"encoder_hidden_states": torch.zeros(2, 9, 32)},
         "encoder_hidden_states must be None .* add_cross_attention"),
        ({"input_ids": IDS.float()}, "input_ids must be integers, got torch.float32"),
        *(({"input_ids": IDS.view(1, 10), "cu_seq_lens_q": torch.tensor(cu_seqlens)},
           "cu_seq_lens_q must")
          for cu_seqlens in ([0, 6, 4, 10], [0, 6, 40], [3, 6, 10], [0, 4], [[0, 4, 10]], [])),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9, 10])}, "cu_seq_lens_q must .* end of every row"),
        ({"cu_seq_lens_q": [0, 5, 10]}, "cu_seq_lens_q must be a tensor, got a list"),
        ({"is_causal": True}, "is_causal must be config.is_decoder"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused_by_name(arguments, message, config):
    with pytest.raises(ValueError, match=message):
        RoFormerModel(config)(**({"input_ids": IDS} | arguments))


@pytest.mark.parametrize("head", [*HEADS, RoFormerModel])
def test_a_batch_in_place_of_its_tensors_is_refused_with_the_remedy(head, config):
    with pytest.raises(ValueError, match=r"input_ids must .* call model\(\*\*batch\)"):
        head(config)(transformers.BatchEncoding({"input_ids": IDS}))


def test_the_mask_of_an_encoder_is_checked_like_the_models_own(config):
    config.is_decoder = config.add_cross_attention = True
    source = torch.zeros(2, 3, 32)
    for mask in (torch.tensor([[0.0, -1e4, 0.0]] * 2), torch.ones(2, 4)):
        with pytest.raises(ValueError, match="encoder_attention_mask must"):
            RoFormerModel(config)(IDS, encoder_hidden_states=source, encoder_attention_mask=mask)


@pytest.mark.parametrize("head", POOLED)
def test_a_head_on_one_token_of_a_row_refuses_packed_documents(head, config):
    ids = IDS if head is POOLED[0] else IDS[None]
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
        head(config)(ids, cu_seq_lens_q=torch.tensor([0, 3, 5, 10]))


@pytest.mark.parametrize("linear", [None, "elu"])
@pytest.mark.parametrize("head", POOLED)
def test_a_sequence_is_one_document_to_its_head_whatever_its_positions_are(head, linear):
    model = head(tiny_config(linear_attention=linear, output_hidden_states=True)).eval()
    rows = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1]] * 2)}
    if head is not POOLED[0]:  # a single choice
        rows = {name: x[:, None] for name, x in rows.items()}
    alone = model(**{k: x[:1] for k, x in rows.items()})
    both = model(**rows, output_hidden_states=None)  # as configured
    torch.testing.assert_close(alone.logits, both.logits[:1])
    assert len(both.hidden_states) == len(alone.hidden_states)
