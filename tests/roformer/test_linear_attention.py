"""Linear attention against equation 19 in float64, and its properties in the model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from roformer.configuration_roformer import FEATURE_MAPS
from roformer.linear_attention import CHUNK_LENGTH, FeatureMap, linear_attention, orthogonal_vectors
from roformer.rotary import compute_inv_freq, rotary_embeddings
from tiny import assert_near, hidden, model_of, rotation_matrices

B, L, H, D, V = 2, 150, 2, 16, 60  # more than two chunks, and not a whole number of them
PACKED = torch.tensor([[0, 1, 2, 0, 1]])


def features_of(kind: str, **fields: object) -> FeatureMap:
    return model_of(kind, **fields).encoder.layer[0].attention.self.features


@pytest.fixture
def heads() -> torch.Tensor:
    return torch.randn(3, B, L, H, D)


def phi(x: torch.Tensor, features: FeatureMap) -> torch.Tensor:
    """Features by their definition, float64."""
    if features.kind == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if features.kind == "relu":
        return x.clamp(min=0) + 1e-3
    x = x / D**0.25
    exponents = torch.einsum("...d,md->...m", x, features.vectors.double())
    return (exponents - x.square().sum(-1, keepdim=True) / 2).exp()


def oracle(heads, features, positions, causal, padding_mask):
    """The sum over every pair of tokens, rotated by matrices, float64."""
    q, k = (phi(x.double(), features) for x in heads[:2])
    v = heads[2].double()
    seen = torch.ones(L, L, dtype=torch.bool)
    seen = (seen.tril() if causal else seen) & padding_mask[:, None, None]
    plain = torch.einsum("blhm,bshm->bhls", q, k)
    rotated_scores = plain
    if positions is not None:
        matrices = rotation_matrices(positions, q.shape[-1])
        q, k = (torch.einsum("lmn,blhn->blhm", matrices, x) for x in (q, k))
        rotated_scores = torch.einsum("blhm,bshm->bhls", q, k)
    mixed = torch.einsum("bhls,bshd->blhd", rotated_scores * seen, v)
    return mixed / (plain * seen).sum(-1).transpose(1, 2)[..., None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_it_is_the_papers_equation(kind, rotated, causal, heads):
    features = features_of(kind)
    positions = torch.arange(L) if rotated else None
    width = 32 if kind == "favor" else D
    table = rotary_embeddings(positions[None], compute_inv_freq(width)) if rotated else None
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[1, 60:] = False
    found = linear_attention(*heads, features, table, padding_mask=mask, is_causal=causal)
    assert found.isfinite().all()
    expected = oracle(heads, features, positions, causal, mask)[mask]
    assert (found.double()[mask] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_padding_does_not_change_the_scale_of_random_features(causal, heads):
    features = features_of("favor")
    heads[:2] *= 12.0  # features of e^-100 and less
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[:, :50] = False
    separate = linear_attention(*heads[:, :, 50:], features, None, is_causal=causal)
    found = linear_attention(*heads, features, None, padding_mask=mask, is_causal=causal)[:, 50:]
    assert_near(found, separate)
    assert found.abs().amax() > 0.1


def test_random_features_estimate_the_kernel_of_softmax(heads):
    q, k = heads[0, 0, :40, 0] / 2, heads[1, 0, :40, 0] / 2
    exact = (q @ k.T / D**0.5).exp()
    errors = []
    for number in (64, 4096):
        features = features_of("favor", random_features=number)
        a, b = (phi(x.double(), features) for x in (q, k))
        errors.append(((a @ b.T / number - exact) / exact).abs().mean().item())
    assert errors[1] < 0.1
    assert errors[1] < errors[0] / 4  # one over the root of the number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_vectors_are_orthogonal_in_blocks_and_as_long_as_normal_ones(dtype):
    torch.set_default_dtype(dtype)
    try:
        found = orthogonal_vectors(2000, D, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    block = found[:D] @ found[:D].T
    assert (block - block.diag().diag()).abs().max() < 1e-4
    assert found.norm(dim=1).square().mean() == pytest.approx(D, rel=0.05)
    assert found.mean().abs() < 0.02
    assert torch.equal(found, orthogonal_vectors(2000, D, 0))  # whatever the default dtype is
    assert not torch.equal(found, orthogonal_vectors(2000, D, 1))


def test_features_stay_finite_and_positive_far_from_zero(heads):
    for kind in FEATURE_MAPS:
        features = features_of(kind)
        for size in (1e-3, 1.0, 30.0):
            q, k, v = heads * torch.tensor([size, size, 1.0]).view(3, 1, 1, 1, 1)
            for dtype in (torch.float32, torch.bfloat16):
                found = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), features, None)
                assert found.isfinite().all(), (kind, size, dtype)
                low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
                inside = (found.float() >= low - 0.1) & (found.float() <= high + 0.1)
                assert inside.all(), "a weighted mean without rotation"


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_a_large_key_does_not_leak_to_earlier_tokens(kind):
    heads = torch.randn(3, 1, 2 * CHUNK_LENGTH, H, D)
    heads[:2] *= 4.0
    heads[1, :, -1] *= 0.2  # FAVOR+: a short key is the largest feature, by many orders
    features = features_of(kind)
    whole = linear_attention(*heads, features, None, is_causal=True)
    parts = linear_attention(*heads[:, :, :-1], features, None, is_causal=True)
    assert_near(whole[:, :-1], parts, 1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_twice_the_text_is_twice_the_arithmetic(kind, causal):
    model = model_of(kind, is_decoder=causal, use_cache=False)

    def flops(length: int) -> int:
        with FlopCounterMode(display=False) as counter:
            hidden(model, torch.randint(5, V, (1, length)))
        return counter.get_total_flops()

    assert flops(16 * CHUNK_LENGTH) == pytest.approx(2 * flops(8 * CHUNK_LENGTH), rel=1e-3)


@pytest.mark.parametrize(
    ("key", "inputs"),
    [
        ("output_attentions", {"output_attentions": True}),
        # documents are in rows of their own inside the model
        ("output_hidden_states", {"position_ids": PACKED, "output_hidden_states": True}),
        ("attention_mask", {"attention_mask": torch.ones(1, 1, 5, 5)}),
    ],
)
def test_calls_that_need_scores_or_keys_are_refused(key, inputs):
    model = model_of("elu", is_decoder=True)
    with pytest.raises(ValueError, match=f"^{key} must"):
        model(torch.ones(1, 5).long(), **inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_autocast_leaves_features_and_sums_in_float32(kind, causal, heads):
    features = features_of(kind)
    expected = linear_attention(*heads, features, None, is_causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_attention(*heads, features, None, is_causal=causal)
    assert_near(found, expected)
