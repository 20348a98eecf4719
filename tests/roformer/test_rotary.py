"""Rotary embeddings against the paper's matrices in float64, and their properties."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from roformer import rotary
from roformer.rotary import apply_rotary, compute_inv_freq, rotary_embeddings
from tiny import ROPES, rope_config, rotation_matrices


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return apply_rotary(x, *rotary_embeddings(positions, compute_inv_freq(x.shape[-1])))


@pytest.mark.parametrize("start", [0, 1000, 1_000_000])
def test_rotation_is_the_papers_matrix_product(start):
    x = torch.randn(2, 9, 3, 16)
    positions = torch.arange(start, start + 9)
    exact = torch.einsum("lmn,blhn->blhm", rotation_matrices(positions, 16), x.double())
    torch.testing.assert_close(rotated(x, positions).double(), exact, atol=2e-6, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_of_low_precision_and_under_autocast_is_rotated_in_float32(dtype, autocast):
    x = torch.randn(1, 512, 1, 64).to(dtype)
    exact = rotated(x.float(), torch.arange(512))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = rotated(x, torch.arange(512))
    torch.testing.assert_close(result, exact.to(dtype), rtol=0, atol=0)


def test_cos_and_sin_may_have_been_cast():
    x, angles = torch.randn(1, 9, 1, 64), rotary_embeddings(torch.arange(9), compute_inv_freq(64))
    result = apply_rotary(x, *(part.bfloat16() for part in angles), interleave=True)
    torch.testing.assert_close(result, apply_rotary(x, *angles, interleave=True), atol=0.05, rtol=0)


def test_a_partial_rotation_leaves_the_other_coordinates():
    x = torch.randn(2, 9, 3, 16)
    result = apply_rotary(x, *rotary_embeddings(torch.arange(9), compute_inv_freq(4)))
    torch.testing.assert_close(result[..., 4:], x[..., 4:], atol=0, rtol=0)
    torch.testing.assert_close(result[..., :4], rotated(x[..., :4], torch.arange(9)))


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rope_types_have_transformers_frequencies(rope, share):
    config = rope_config(rope, partial_rotary_factor=share)
    lengths = torch.tensor([[16] * 3, [17] * 3]) if config.has_dynamic_rope else None
    theta, scaling = rotary.compute_rope_parameters(config, lengths, torch.device("cpu"))
    for row, length in enumerate((16, 17)):
        expected, factor = ROPE_INIT_FUNCTIONS[rope](config, "cpu", seq_len=length)
        assert len(expected) == 8 * share
        ours = theta if lengths is None else theta[row, 1]
        torch.testing.assert_close(ours.float(), expected)
        assert scaling == factor
    first = theta if lengths is None else theta[:1]
    norms = torch.hypot(*rotary_embeddings(torch.arange(3)[None], first, scaling))
    torch.testing.assert_close(norms, torch.full_like(norms, scaling), atol=1e-5, rtol=0)
    assert (scaling > 1) == (rope == "yarn")


def test_default_frequencies_follow_theta_and_share():
    config = rope_config("default", rope_theta=500.0, partial_rotary_factor=0.5)
    theta, scaling = rotary.compute_rope_parameters(config, None, torch.device("cpu"))
    expected = [500 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(theta, torch.tensor(expected, dtype=torch.float64))
    assert scaling == 1.0


def test_the_half_split_layout_is_llamas():
    x = torch.randn(2, 9, 3, 16)
    table = rotary_embeddings(torch.arange(9), compute_inv_freq(16))
    cos, sin = (torch.cat((t, t), dim=-1)[None] for t in table)
    q, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    torch.testing.assert_close(apply_rotary(x, *table, interleave=False), q.transpose(1, 2))


def test_odd_width_is_refused_by_name():
    with pytest.raises(ValueError, match="dim must be even.*got 7"):
        compute_inv_freq(7)
