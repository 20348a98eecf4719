"""The kernels for a CPU compute attention: compared with its definition in float64."""

import pytest
import torch

from roformer.kernels import attention

KERNELS = {
    "full": lambda *x: attention.softmax_attention(*x)[0].transpose(1, 2),
    "chunked": attention._chunked_attention,
}


def inputs(dtype: torch.dtype, mask: str) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """[B, H, L, D] queries, keys and values, and a mask that leaves every query a key."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 20, 8, generator=generator).to(dtype) for _ in range(3)]
    kept = torch.rand(2, 3, 20, 20, generator=generator) > 0.4
    kept |= torch.eye(20, dtype=torch.bool)
    masks = {
        "none": None,
        "padding": kept[:, :1, :1] | torch.eye(20, dtype=torch.bool)[0],
        "bool": kept,
        "additive": torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, -30.0),
    }
    return [x.requires_grad_() for x in tensors], masks[mask]


def definition(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax of the scores times the values in float64, [B, L, H, D]."""
    q, k, v = (x.double() for x in tensors)
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * 0.3
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return torch.einsum("bhls,bhsd->blhd", scores.softmax(-1), v)


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "additive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_and_gradients_are_those_of_float64(kernel, dtype, mask, monkeypatch):
    tensors, mask_tensor = inputs(dtype, mask)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 6 * 40 * dtype.itemsize)  # 6 queries, then 2
    weights = torch.randn(2, 20, 3, 8, generator=torch.Generator().manual_seed(1))
    expected = definition(tensors, mask_tensor)
    wanted = [expected, *torch.autograd.grad((expected * weights).sum(), tensors)]
    actual = KERNELS[kernel](*tensors, mask_tensor, 0.3, 0.0)
    gradients = torch.autograd.grad((actual.double() * weights).sum(), tensors)
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float64: 1e-12}[dtype]
    assert actual.dtype == dtype
    for a, b in zip([actual, *gradients], wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=limit, rtol=0)


@pytest.mark.parametrize("limit", [2**25, 0])  # all scores at once, some queries at a time
def test_causal_attention_with_dropout_is_that_of_float64(limit, monkeypatch):
    monkeypatch.setattr(attention, "FULL_SCORES_LIMIT_BYTES", limit)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)  # not called
    tensors, _ = inputs(torch.float32, "none")
    torch.manual_seed(0)
    actual = attention._attention(*tensors, None, 0.3, 2**-16, is_causal=True)  # drops nothing here
    expected = definition(tensors, torch.ones(20, 20, dtype=torch.bool).tril())
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "additive"])
def test_emulated_bfloat16_is_computed_in_float32_and_rounded_once(mask, monkeypatch):
    monkeypatch.setattr(attention, "bfloat16_is_emulated", lambda: True)
    tensors, mask_tensor = inputs(torch.bfloat16, mask)
    module = torch.nn.Module()
    module.is_causal = False
    expected = definition(tensors, mask_tensor)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention.roformer_attention_forward(module, *tensors, mask_tensor, 0.3)
    gradients = torch.autograd.grad(found.sum(), tensors)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cost", [0, 100, 10**6], ids=["each alone", "batches", "one batch"])
def test_documents_of_a_row_are_computed_as_alone(cost, is_causal, monkeypatch):
    monkeypatch.setattr(attention, "CALL_COST", cost)
    module = torch.nn.Module()
    module.is_causal = is_causal
    lengths = [3, 7, 0, 7, 1, 6]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, sum(lengths), 8)
    tensors = [torch.randn(shape, generator=generator).double().requires_grad_() for _ in range(3)]
    documents = zip(*(x.split(lengths, dim=2) for x in tensors), strict=True)
    masks = [torch.ones(n, n).tril().bool() if is_causal else None for n in lengths]
    alone = [definition(x, mask) for x, mask in zip(documents, masks, strict=True) if x[0].numel()]
    expected = torch.cat(alone, dim=1)
    with torch.device("meta"):  # the default device of a context is not asked for tensors
        found, _ = attention.roformer_attention_forward(
            module, *tensors, None, 0.3, cu_seq_lens_q=cu_seqlens
        )
    weights = torch.randn(found.shape, generator=generator).double()
    gradients = [torch.autograd.grad((x * weights).sum(), tensors) for x in (found, expected)]
    for a, b in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_padding_of_a_batch_of_documents_costs_less_than_a_call():
    lengths = torch.randint(1, 600, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = attention.batch_documents(lengths, num_heads=4)
    assert sorted(document for batch in batches for document in batch) == list(range(200))
    assert len(batches) < 150
    costs = []
    for batch in batches:
        squares = [lengths[document] ** 2 for document in batch]
        assert squares == sorted(squares, reverse=True)
        assert len(batch) == 1 or 4 * squares[0] * len(batch) <= attention.BATCH_SIZE
        costs.append(4 * sum(squares[0] - square for square in squares))
    assert 0 < max(costs) <= attention.CALL_COST


def test_the_backward_pass_of_chunks_draws_the_dropout_of_the_forward_pass(monkeypatch):
    """The loss is linear in the values: its gradient times the values is the loss itself."""
    monkeypatch.setattr(attention, "CHUNK_BYTES", 6 * 40 * 8)
    tensors, _ = inputs(torch.float64, "none")
    loss = attention._chunked_attention(*tensors, None, 0.3, 0.5).square().sum()
    (gradient,) = torch.autograd.grad(loss, tensors[2])
    assert (gradient * tensors[2]).sum().item() == pytest.approx(2 * loss.item(), rel=1e-12)


def test_dropout_of_chunks_keeps_the_expected_output():
    tensors, _ = inputs(torch.float64, "none")
    expected, total, draws = definition(tensors, None), 0.0, 400
    with torch.no_grad():
        for _ in range(draws):
            total = total + attention._chunked_attention(*tensors, None, 0.3, 0.5)
    torch.testing.assert_close(total / draws, expected.detach(), atol=0.25, rtol=0)
