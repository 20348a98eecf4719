"""Rotary embeddings against the paper's matrices in float64, and their properties."""

import math

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roformer.rotary import (
    apply_rotary,
    compute_inv_freq,
    compute_rope_parameters,
    rotary_embeddings,
)
from tiny import ROPES, rope_config


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


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return apply_rotary(x, *rotary_embeddings(positions, compute_inv_freq(x.shape[-1])))


@pytest.mark.parametrize("start", [0, 1000, 1_000_000])
def test_rotation_is_the_papers_matrix_product(start):
    x = torch.randn(2, 9, 3, 16)
    positions = torch.arange(start, start + 9)
    exact = matrix_form(x, positions)
    torch.testing.assert_close(rotated(x, positions).double(), exact, atol=2e-6, rtol=0)


def test_scores_depend_only_on_distance():
    q, k = torch.randn(2, 1, 1, 1, 64)
    scores = [
        (rotated(q, torch.tensor([m])) * rotated(k, torch.tensor([m - 5]))).sum()
        for m in (5, 77, 500, 2000, 1_000_000)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_rotated_in_float32(dtype):
    x = torch.randn(1, 512, 1, 64).to(dtype)
    exact = rotated(x.float(), torch.arange(512))
    result = rotated(x, torch.arange(512))
    assert result.dtype == dtype
    torch.testing.assert_close(result, exact.to(dtype), rtol=0, atol=0)


def test_autocast_leaves_the_rotation_in_float32():
    x = torch.randn(1, 512, 1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotated(x, torch.arange(512))
    torch.testing.assert_close(inside, rotated(x, torch.arange(512)), rtol=0, atol=0)


def test_a_partial_rotation_leaves_the_other_coordinates():
    x = torch.randn(2, 9, 3, 16)
    result = apply_rotary(x, *rotary_embeddings(torch.arange(9), compute_inv_freq(4)))
    torch.testing.assert_close(result[..., 4:], x[..., 4:], atol=0, rtol=0)
    torch.testing.assert_close(result[..., :4], rotated(x[..., :4], torch.arange(9)))


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rope_types_have_transformers_frequencies(rope, share):
    if rope == "longrope" and share < 1:
        halves = {name: ROPES[rope][name][:4] for name in ("short_factor", "long_factor")}
        config = rope_config(rope, partial_rotary_factor=share, **halves)
    else:
        config = rope_config(rope, partial_rotary_factor=share)
    lengths = torch.tensor([[16] * 3, [17] * 3]) if config.has_dynamic_rope else None
    theta, scaling = compute_rope_parameters(config, lengths, torch.device("cpu"))
    for row, length in enumerate((16, 17)):
        expected, factor = ROPE_INIT_FUNCTIONS[rope](config, "cpu", seq_len=length)
        assert len(expected) == 8 * share
        ours = theta if lengths is None else theta[row, 1]
        torch.testing.assert_close(ours.float(), expected)
        assert scaling == factor
    table = rotary_embeddings(
        torch.arange(3)[None], theta[:1] if theta.ndim > 1 else theta, scaling
    )
    norms = torch.hypot(*table)
    torch.testing.assert_close(norms, torch.full_like(norms, scaling), atol=1e-5, rtol=0)
    assert (scaling > 1) == (rope in ("yarn", "longrope"))


def test_default_frequencies_follow_theta_and_share():
    config = rope_config("default", rope_theta=500.0, partial_rotary_factor=0.5)
    theta, scaling = compute_rope_parameters(config, None, torch.device("cpu"))
    expected = [500 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(theta, torch.tensor(expected, dtype=torch.float64))
    assert scaling == 1.0


def test_odd_width_is_refused_by_name():
    with pytest.raises(ValueError, match="dim must be even.*got 7"):
        compute_inv_freq(7)
