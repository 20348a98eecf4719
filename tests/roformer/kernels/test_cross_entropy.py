"""Cross-entropy of a vocabulary on a CPU: torch's loss and gradients, without copies of logits."""

import pytest
import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from roformer import RoFormerForCausalLM, RoFormerForMaskedLM
from roformer.kernels.cross_entropy import cross_entropy
from tiny import build, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chunk", [1, 350, 2**17])  # one row, a few, all of them
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_torch(monkeypatch, dtype, chunk, default):
    monkeypatch.setattr("roformer.kernels.cross_entropy.CHUNK_SIZE", chunk)
    logits = 8 * torch.randn(37, 101)
    logits[2], logits[3] = 1.0, logits[3] + 2**15  # a row of equal numbers, and one far from zero
    logits = logits.to(dtype).requires_grad_()
    labels = torch.randint(101, (37,)).masked_fill(torch.rand(37) < 0.4, 255).byte()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    loss = cross_entropy(logits, labels, ignore_index=255)
    (gradient,) = torch.autograd.grad(loss * 0.3, logits)
    torch.set_default_dtype(before)
    expected = F.cross_entropy(logits.double(), labels, ignore_index=255, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected * 0.3, logits)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    rtol = 1e-5 if dtype in (torch.float32, torch.float64) else 1e-2
    torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=1e-7)


def test_without_a_label_the_mean_is_nan_and_no_gradient_is():
    logits = torch.randn(4, 9, requires_grad=True)
    mean = cross_entropy(logits, torch.full((4,), -100), -100) / 0
    assert mean.isnan()
    mean.backward()
    assert not logits.grad.any()


@pytest.mark.parametrize("labels", [3, 5, 64])
def test_labels_of_another_number_of_rows_are_refused_as_by_torch(monkeypatch, labels):
    monkeypatch.setattr("roformer.kernels.cross_entropy.CHUNK_SIZE", 1)
    with pytest.raises(ValueError, match="batch_size"):
        cross_entropy(torch.randn(4, 9), torch.zeros(labels, dtype=torch.long), -100)


def test_second_derivatives():
    logits, labels = torch.randn(5, 7), torch.tensor([0, 6, -100, 3, 3])
    ours = torch.autograd.functional.hessian(lambda x: cross_entropy(x, labels, -100), logits)
    theirs = torch.autograd.functional.hessian(lambda x: F.cross_entropy(x, labels), logits)
    torch.testing.assert_close(ours, 4 * theirs)  # the sum and the mean of four


def test_only_the_logits_are_kept_for_the_backward_pass():
    kept = []
    logits = torch.randn(40, 500, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cross_entropy(logits, torch.arange(40), -100)
    assert [x.data_ptr() for x in kept if x.is_floating_point()] == [logits.data_ptr()]


@pytest.mark.parametrize(
    ("head", "loss_of"),
    [(RoFormerForMaskedLM, ForMaskedLMLoss), (RoFormerForCausalLM, ForCausalLMLoss)],
)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 2}, {"ignore_index": 7}])
def test_heads_have_the_loss_of_transformers_or_of_the_user(head, loss_of, options):
    model, ids = build(head, tiny_config()), torch.randint(5, 60, (3, 12))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, options.get("ignore_index", -100))
    output = model(ids, labels=labels, **options)
    torch.testing.assert_close(output.loss, loss_of(output.logits, labels, 60, **options))
    model.loss_function = lambda **kwargs: torch.tensor(7.0)
    assert model(ids, labels=labels).loss == 7
