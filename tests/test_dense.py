"""Dense layers by oneDNN give what torch's own give, and step aside for whoever looks on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from roformer import RoFormerConfig, RoFormerForMaskedLM, dense
from roformer.layers import RoFormerIntermediate

FIELDS = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 96}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """On any processor both dtypes go by oneDNN; returned are the rows of each product there."""
    seen, product = [], dense._product
    dtypes = frozenset({torch.float32, torch.bfloat16})
    monkeypatch.setattr(dense, "_faster_dtypes", lambda: dtypes)
    monkeypatch.setattr(dense, "_product", lambda *told: seen.append(told[0]) or product(*told))
    return seen


def layer_of(wide: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, wide, bias=bias).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [16, 48, 200])
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (2, 0, 48), (3, 2, 5, 48)])
def test_products_and_gradients_are_those_of_float64(calls, wide, bias, shape):
    layer, x = layer_of(wide, bias), torch.randn(shape)
    exact = layer_of(wide, bias).double()
    exact.load_state_dict(layer.state_dict())
    inputs = x.requires_grad_(), x.detach().double().requires_grad_()
    outputs = dense.dense(layer, inputs[0]), exact(inputs[1])
    slope = torch.randn(outputs[0].shape)
    outputs[0].backward(slope)
    outputs[1].backward(slope.double())
    assert len(calls) == (3 if x.numel() else 0)  # forward, and a gradient of x and of the weight
    pairs = [outputs, (inputs[0].grad, inputs[1].grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters())]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_comes_with_the_product_or_after_it(calls, name, dtype):
    layer, x, activation = layer_of(200, dtype=dtype), torch.randn(9, 48).to(dtype), ACT2FN[name]
    with torch.no_grad():
        ours = dense.dense(layer, x, activation)
    exact = activation(layer.double()(x.double()))
    bound = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=bound)
    assert len(calls) == 1
    assert ours.dtype == dtype


def test_parts_of_a_layer_that_learn_are_all_that_get_gradients(calls):
    layer, x = layer_of(16), torch.randn(5, 48)
    layer.weight.requires_grad_(False)
    dense.dense(layer, x).sum().backward()
    assert len(calls) == 1
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((16,), 5.0))


def test_the_gradient_of_a_gradient_is_that_of_float64():
    layer, x = layer_of(16), torch.randn(5, 48)
    found = []
    for dtype in (torch.float32, torch.float64):
        given, module = x.to(dtype).requires_grad_(), layer.to(dtype)
        loss = dense.dense(module, given).pow(3).sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), module.weight)[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4 * found[1].abs().max().item())


def hooked(layer):
    layer.register_forward_hook(lambda module, given, out: out * 0 + 7)


def replaced(layer):
    layer.forward = lambda x: torch.full((*x.shape[:-1], 16), 7.0)


def pruned(layer):
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.bias)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Hardtanh(7.0, 8.0))


@pytest.mark.parametrize("change", [hooked, replaced, pruned])
def test_what_others_have_done_to_a_layer_counts(calls, change):
    layer = layer_of(16)
    change(layer)
    assert torch.equal(dense.dense(layer, torch.randn(3, 48)), torch.full((3, 16), 7.0))
    assert not calls


def test_a_hooked_activation_is_called(calls):
    activation = type(ACT2FN["gelu"])()
    activation.register_forward_hook(lambda module, given, out: out * 0 + 7)
    with torch.no_grad():
        assert (dense.dense(layer_of(16), torch.randn(3, 48), activation) == 7).all()


def test_precision_and_switches_of_torch_are_obeyed(calls, monkeypatch):
    layer, x = layer_of(16), torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert dense.dense(layer, x).dtype == torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        dense.dense(layer, x)
    with FlopCounterMode(display=False) as counter:
        dense.dense(layer, x)
    assert counter.get_total_flops() == 2 * 3 * 48 * 16
    torch.func.vmap(lambda row: dense.dense(layer, row))(x)
    assert not calls


def test_errors_are_those_of_torch():
    layer = layer_of(16)
    for wrong in (torch.randn(3, 47), torch.randn(3, 48).bfloat16(), torch.randn(3, 48).half()):
        with pytest.raises(RuntimeError) as theirs:
            layer(wrong)
        with pytest.raises(RuntimeError) as ours:
            dense.dense(layer, wrong)
        assert str(ours.value) == str(theirs.value)
    assert dense.dense(layer, torch.randn(48)).shape == (16,)


def test_a_model_computes_all_of_its_large_products_by_it(calls):
    config = RoFormerConfig(**FIELDS)
    model = RoFormerForMaskedLM(config).eval()
    ids = torch.randint(5, 300, (2, 9))
    with torch.no_grad():
        model(ids)
    assert len(calls) == 2 * 6 + 2  # q, k, v and three of the halves' a layer; the head's two
    calls.clear()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 3 * (2 * 6 + 2)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantised_layers_take_the_place_of_those_they_were_made_from(calls):
    block = RoFormerIntermediate(RoFormerConfig(**FIELDS)).eval()
    x = torch.randn(4, 64)
    before = F.gelu(block.dense(x))
    block = torch.ao.quantization.quantize_dynamic(block, {nn.Linear})
    assert type(block.dense) is not nn.Linear
    torch.testing.assert_close(block(x), before, rtol=0, atol=0.05)
    assert not calls
