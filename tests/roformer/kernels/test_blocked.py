"""Attention by blocks on a CPU: what the product written out gives, forward and backward."""

import pytest
import torch

from roformer.kernels import blocked
from roformer.kernels.blocked import blocked_attention


def inputs(dtype=torch.float64, queries=21, keys=21, heads=3, batch=2):
    torch.manual_seed(0)
    shapes = [(batch, length, heads, 8) for length in (queries, keys, keys)]
    # heads behind positions, as the model hands them over
    return [torch.randn(s).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def written_out(q, k, v, scaling):
    return torch.softmax(q @ k.transpose(-1, -2) * scaling, dim=-1) @ v


def results(attend, tensors, weigh):
    mixed = attend(*tensors)
    (mixed * weigh).sum().backward()
    return [mixed.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize(
    ("elements", "queries"),
    [(10**6, 256), (2 * 21 * 21, 256), (21 * 4, 4), (1, 1)],
    ids=["all at once", "two heads", "some queries", "one query"],
)
@pytest.mark.parametrize("keys", [21, 13])
def test_blocks_of_any_size_give_outputs_and_gradients(monkeypatch, elements, queries, keys):
    monkeypatch.setattr(blocked, "ELEMENTS", elements)
    monkeypatch.setattr(blocked, "LEAST_QUERIES", queries)
    weigh = torch.randn(2, 3, 21, 8, dtype=torch.float64)
    expected = results(lambda *x: written_out(*x, 0.3), inputs(keys=keys), weigh)
    found = results(lambda *x: blocked_attention(*x, 0.3, 0.0), inputs(keys=keys), weigh)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_precision_is_as_exact_as_the_product_written_out(dtype):
    weigh = torch.randn(2, 3, 700, 8)
    exact = results(lambda *x: written_out(*x, 0.3), inputs(queries=700, keys=700), weigh.double())
    errors = []
    for attend in (written_out, lambda *x: blocked_attention(*x, 0.0)):
        tensors = inputs(dtype, 700, 700)
        found = results(lambda *x: attend(*x, 0.3), tensors, weigh.to(dtype))  # noqa: B023
        errors.append([(a - b).norm() / b.norm() for a, b in zip(found, exact)])
    for theirs, own in zip(*errors):
        assert own < 1.5 * theirs + 1e-7


def test_dropout_is_the_same_in_both_passes(monkeypatch):
    """Written out with the very mask that was drawn: read off the output for unit vectors."""
    monkeypatch.setattr(blocked, "ELEMENTS", 8 * 8)
    monkeypatch.setattr(blocked, "LEAST_QUERIES", 1)
    q, k, _ = inputs(queries=8, keys=8, heads=1, batch=1)
    v = torch.eye(8, dtype=torch.float64)[None, None].requires_grad_()
    weigh = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    torch.manual_seed(3)
    found = results(lambda *x: blocked_attention(*x, 0.3, 0.25), (q, k, v), weigh)
    kept = (found[0] != 0) * 4 / 3
    assert 0.5 < kept.mean() < 1.3
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    expected = results(
        lambda q, k, v: (torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1) * kept) @ v,
        (q, k, v),
        weigh,
    )
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_a_document_of_no_tokens_is_no_work():
    empty = torch.zeros(1, 3, 0, 8, requires_grad=True)
    mixed = blocked_attention(empty, empty, empty, 0.3, 0.1)
    mixed.sum().backward()
    assert mixed.shape == empty.grad.shape == (1, 3, 0, 8)


def test_a_call_draws_its_own_mask_and_a_seed_repeats_it():
    tensors = inputs()
    torch.manual_seed(1)
    first, second = (blocked_attention(*tensors, 0.3, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, blocked_attention(*tensors, 0.3, 0.5))
    assert not torch.equal(first, second)


def test_nothing_of_the_size_of_all_scores_is_kept():
    saved = []

    def note(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        blocked_attention(*inputs(torch.float32, 300, 300), 0.3, 0.1)
    assert max(saved) == 2 * 3 * 300 * 8


def test_gradients_summed_over_many_blocks_are_as_exact_as_over_few(monkeypatch):
    weigh = torch.randn(2, 3, 700, 8)
    exact = results(lambda *x: written_out(*x, 0.3), inputs(queries=700, keys=700), weigh.double())
    errors = []
    for queries in (700, 4):
        monkeypatch.setattr(blocked, "ELEMENTS", 700 * queries)
        monkeypatch.setattr(blocked, "LEAST_QUERIES", queries)
        tensors = inputs(torch.bfloat16, 700, 700)
        found = results(lambda *x: blocked_attention(*x, 0.3, 0.0), tensors, weigh.bfloat16())
        errors.append([(a - b).norm() / b.norm() for a, b in zip(found, exact)])
    for few, many in zip(*errors):
        assert many < 1.2 * few
