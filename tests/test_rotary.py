"""The rotation against the paper's matrices in float64, and the properties it is named for."""

import math

import pytest
import torch

from roformer.rotary import inverse_frequencies, rotate, rotation_table


def matrix_form(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Equations 14 and 15 written down: a block-diagonal float64 matrix for every position."""
    width = x.shape[-1]
    result = torch.empty_like(x, dtype=torch.float64)
    for row, m in enumerate(positions.tolist()):
        R = torch.zeros(width, width, dtype=torch.float64)  # noqa: N806
        for i in range(width // 2):
            angle = m * base ** (-2 * i / width)
            c, s = math.cos(angle), math.sin(angle)
            R[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, -s], [s, c]])
        result[:, row] = x[:, row].double() @ R.T
    return result


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return rotate(x, *rotation_table(positions, inverse_frequencies(x.shape[-1])))


@pytest.mark.parametrize("start", [0, 1000])
def test_rotation_is_the_papers_matrix_product(start):
    x = torch.randn(2, 9, 3, 16)
    positions = torch.arange(start, start + 9)
    torch.testing.assert_close(
        turned(x, positions).double(), matrix_form(x, positions), atol=1e-4, rtol=1e-4
    )


def test_compilers_and_eager_code_rotate_alike():
    x = torch.randn(2, 9, 3, 16)
    table = rotation_table(torch.arange(9), inverse_frequencies(16))
    exported = torch.export.export(Rotation(), (x, *table)).module()
    torch.testing.assert_close(exported(x, *table), rotate(x, *table))


class Rotation(torch.nn.Module):
    def forward(self, x, cos, sin):
        return rotate(x, cos, sin)


def test_known_numbers_of_transformers_own_table():
    q = torch.arange(2 * 12 * 16 * 64).reshape(2, 12, 16, 64).float() / 100
    row = turned(q.transpose(1, 2), torch.arange(16))[0, 1, 0, :8]
    expected = [-0.2012, 0.8897, 0.0263, 0.9401, 0.2074, 0.9463, 0.3481, 0.9343]
    torch.testing.assert_close(row, torch.tensor(expected), atol=1e-4, rtol=0)


def test_norms_are_preserved():
    x = torch.randn(1, 50, 2, 32)
    norms = turned(x, torch.arange(50) * 37).norm(dim=-1)
    torch.testing.assert_close(norms, x.norm(dim=-1))


def test_scores_depend_only_on_distance():
    q, k = torch.randn(2, 1, 1, 1, 64)
    scores = [
        (turned(q, torch.tensor([m])) * turned(k, torch.tensor([m - 5]))).sum()
        for m in (5, 77, 500, 2000)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(4), atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_rotated_in_float32(dtype):
    x = torch.randn(1, 512, 1, 64).to(dtype)
    exact = turned(x.float(), torch.arange(512))
    result = turned(x, torch.arange(512))
    assert result.dtype == dtype
    torch.testing.assert_close(result, exact.to(dtype), rtol=0, atol=0)


def test_gradient_is_the_rotation_backwards():
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    upstream = torch.randn(1, 6, 2, 8)
    turned(x, torch.arange(6)).backward(upstream)
    torch.testing.assert_close(x.grad, turned(upstream, -torch.arange(6)))


def test_odd_width_and_square_theta_are_refused_by_name():
    with pytest.raises(ValueError, match="head width must be even.*got 7"):
        inverse_frequencies(7)
    with pytest.raises(ValueError, match="theta must be one-dimensional"):
        rotation_table(torch.arange(3), torch.ones(2, 2))
