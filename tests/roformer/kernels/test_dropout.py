"""Dropout on a CPU: the distribution is torch's, the draws are a quarter."""

import math

import pytest
import torch

from roformer.kernels.dropout import Dropout, dropout


@pytest.mark.parametrize("probability", [0.003, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(probability):
    x = torch.ones(1000, 1003)
    with torch.device("meta"):  # the default device of a context is not asked for numbers
        y = dropout(x, probability, training=True)
    share, sigma = (y == 0).float().mean(), math.sqrt(probability * (1 - probability) / x.numel())
    assert abs(share - probability) < 3 * sigma + 1 / 65536
    assert y.max() == pytest.approx(1 / (1 - probability), rel=1e-4 / (1 - probability))
    assert y.mean() == pytest.approx(1, abs=4 * sigma / (1 - probability))


def test_numbers_of_one_draw_know_nothing_of_each_other():
    kept = (dropout(torch.ones(400_000), 0.5, training=True) > 0).view(-1, 4).double()
    assert (torch.corrcoef(kept.T) - torch.eye(4)).abs().max() < 4 / math.sqrt(len(kept))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_that_of_what_was_kept(dtype):
    x = torch.randn(7, 5, 3, dtype=dtype).transpose(0, 2).requires_grad_()  # 105, not in order
    y = dropout(x, 0.25, training=True)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    y.sum().backward()
    expected = torch.where(y == 0, 0.0, 4 / 3)
    torch.testing.assert_close(x.grad, expected.to(dtype))
    torch.testing.assert_close(y, x.detach() * x.grad)


def test_nothing_happens_where_nothing_is_dropped_and_all_where_all_is():
    x = torch.randn(4, 4)
    assert dropout(x, 0.1, training=False) is x
    assert dropout(x, 0.0, training=True) is x
    assert not dropout(x, 1.0, training=True).any()
    assert Dropout(0.5).eval()(x) is x


def test_a_gradient_of_the_gradient():
    x = torch.randn(40, requires_grad=True)
    y = dropout(x, 0.5, training=True).pow(3).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.sum().backward()
    kept = slope.detach() != 0
    torch.testing.assert_close(x.grad, torch.where(kept, 6 * 8 * x.detach(), 0.0))


def test_compilers_and_transforms_get_torchs_own():
    x = torch.ones(200, 200)
    compiled = torch.compile(lambda x: dropout(x, 0.5, training=True), backend="aot_eager")
    many = torch.func.vmap(lambda x: dropout(x, 0.5, training=True), randomness="different")
    for y in (compiled(x), many(x)):
        assert 0.45 < (y == 0).float().mean() < 0.55
