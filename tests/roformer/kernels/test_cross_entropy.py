"""Cross-entropy of a vocabulary on a CPU: torch's loss and gradients, without its copies."""

import pytest
import torch
from torch.nn import functional as F

from roformer import RoFormerForCausalLM, RoFormerForMaskedLM
from roformer.kernels.cross_entropy import argmax, cross_entropy
from tiny import build, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [1, 350, 2**17])  # one row, a few, all of them
def test_loss_and_gradients_are_those_of_torch(monkeypatch, dtype, chunk):
    monkeypatch.setattr("roformer.kernels.cross_entropy.CHUNK_SIZE", chunk)
    logits = (8 * torch.randn(37, 101)).to(dtype).requires_grad_()
    labels = torch.randint(101, (37,)).masked_fill(torch.rand(37) < 0.4, -1)
    loss = cross_entropy(logits, labels, ignore_index=-1)
    (gradient,) = torch.autograd.grad(loss * 0.3, logits)
    expected = F.cross_entropy(logits.double(), labels, ignore_index=-1, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected * 0.3, logits)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=0)
    rtol = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=1e-7)
    assert not gradient[labels == -1].any()
    assert torch.equal(argmax(logits), logits.float().argmax(dim=-1))


@pytest.mark.parametrize("labels", [3, 5, 64])
def test_labels_of_another_number_of_rows_are_refused_as_by_torch(monkeypatch, labels):
    monkeypatch.setattr("roformer.kernels.cross_entropy.CHUNK_SIZE", 1)
    with pytest.raises(ValueError, match="batch_size"):
        cross_entropy(torch.randn(4, 9), torch.zeros(labels, dtype=torch.long))


def test_second_derivatives():
    logits = torch.randn(5, 7, requires_grad=True)
    found = [
        torch.autograd.functional.hessian(lambda x, f=f: f(x, torch.arange(5)), logits)
        for f in (cross_entropy, lambda x, y: F.cross_entropy(x, y, reduction="sum"))
    ]
    torch.testing.assert_close(*found)


def test_only_the_logits_are_kept_for_the_backward_pass():
    kept = []
    logits = torch.randn(40, 500, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cross_entropy(logits, torch.arange(40))
    assert sorted(x.data_ptr() for x in kept if x.is_floating_point()) == [logits.data_ptr()]


@pytest.mark.parametrize("head", [RoFormerForMaskedLM, RoFormerForCausalLM])
def test_what_a_user_says_of_the_loss_is_obeyed(head):
    model, ids = build(head, tiny_config()), torch.randint(5, 60, (3, 12))
    whole = model(ids, labels=ids).loss
    in_two = model(ids, labels=ids, num_items_in_batch=torch.tensor(2)).loss
    torch.testing.assert_close(in_two, whole * (36 if head is RoFormerForMaskedLM else 33) / 2)
    ignored = model(ids, labels=ids, ignore_index=int(ids[1, 1])).loss
    assert ignored != whole
    model.loss_function = lambda **kwargs: torch.tensor(7.0)
    assert model(ids, labels=ids).loss == 7
