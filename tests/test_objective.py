"""The sparse loss against transformers' full one."""

import pytest
import torch
import transformers

import roformer
from conftest import TINY_MODEL
from train.objective import MaskedLanguageModel
from train.settings import InputError


@pytest.mark.parametrize(
    "model",
    [
        roformer.RoFormerForMaskedLM(roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL)),
        transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=60, **TINY_MODEL)),
    ],
    ids=["roformer", "bert"],
)
def test_sparse_loss_and_gradient_equal_the_dense_ones(model):
    torch.manual_seed(0)
    model.eval()
    ids = torch.randint(5, 60, (4, 20))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    labels = ids.masked_fill((torch.rand(4, 20) > 0.2) | (mask == 0), -100)
    dense = model(input_ids=ids, attention_mask=mask, labels=labels)
    expected = torch.autograd.grad(dense.loss, model.parameters())
    places = (labels.flatten() != -100).nonzero().flatten()
    targets = labels.flatten()[places]
    loss, right = MaskedLanguageModel(model)(ids, mask, places, targets)
    torch.testing.assert_close(loss / len(targets), dense.loss)
    assert right == (dense.logits.flatten(0, 1)[places].argmax(-1) == targets).sum()
    found = torch.autograd.grad(loss / len(targets), model.parameters())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_a_batch_with_nothing_to_predict_has_no_loss_and_no_gradient():
    model = roformer.RoFormerForMaskedLM(roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL))
    nothing = torch.zeros(0, dtype=torch.long)
    loss, _ = MaskedLanguageModel(model)(
        torch.randint(5, 60, (1, 4)), torch.ones(1, 4), nothing, nothing
    )
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_model_with_its_head_elsewhere_is_refused():
    config = transformers.RobertaConfig(vocab_size=60, **TINY_MODEL)
    with pytest.raises(InputError, match="masked-LM head under `cls`.*'roberta'"):
        MaskedLanguageModel(transformers.RobertaForMaskedLM(config))
