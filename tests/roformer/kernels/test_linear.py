"""Dense layers by oneDNN give what torch's own give, and step aside for whoever looks on."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from roformer import RoFormerConfig, RoFormerForMaskedLM
from roformer.kernels import linear
from roformer.modeling_roformer import RoFormerIntermediate

FIELDS = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 96}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """On any processor both dtypes go by oneDNN; returned are the rows of each product there."""
    seen, product = [], linear._product
    dtypes = frozenset({torch.float32, torch.bfloat16})
    monkeypatch.setattr(linear, "_faster_dtypes", lambda: dtypes)
    monkeypatch.setattr(linear, "_product", lambda *told: seen.append(told[0]) or product(*told))
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
    outputs = linear.dense(layer, inputs[0]), exact(inputs[1])
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
        ours = linear.dense(layer, x, activation)
    exact = activation(layer.double()(x.double()))
    bound = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=bound)
    assert len(calls) == 1
    assert ours.dtype == dtype


def test_parts_of_a_layer_that_learn_are_all_that_get_gradients(calls):
    layer, x = layer_of(16), torch.randn(5, 48)
    layer.weight.requires_grad_(False)
    linear.dense(layer, x).sum().backward()
    assert len(calls) == 1
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((16,), 5.0))


def test_the_gradient_of_a_gradient_is_that_of_float64():
    layer, x = layer_of(16), torch.randn(5, 48)
    found = []
    for dtype in (torch.float32, torch.float64):
        given, module = x.to(dtype).requires_grad_(), layer.to(dtype)
        loss = linear.dense(module, given).pow(3).sum()
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


@pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta", "ignore:.*invariant checks"
)
def test_sparse_weights_are_left_to_torch(calls):
    layer, x = layer_of(16), torch.randn(3, 48)
    expected = layer(x)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)
    torch.testing.assert_close(linear.dense(layer, x), expected)
    assert not calls


@pytest.mark.parametrize("change", [hooked, replaced, pruned])
def test_what_others_have_done_to_a_layer_counts(calls, change):
    layer = layer_of(16)
    change(layer)
    assert torch.equal(linear.dense(layer, torch.randn(3, 48)), torch.full((3, 16), 7.0))
    assert not calls


def test_who_looks_at_all_layers_sees_these(calls, monkeypatch):
    layer, x, seen = layer_of(16), torch.randn(3, 48), []
    handle = register_module_forward_hook(lambda module, given, out: out * 0 + 7)
    try:
        assert (linear.dense(layer, x) == 7).all()
    finally:
        handle.remove()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        linear.dense(layer, x)
    assert F.linear in seen
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: torch.full((3, 16), 7.0))
    assert (linear.dense(layer, x) == 7).all()
    assert not calls


@pytest.mark.parametrize("learns", [True, False])
def test_a_bias_with_gaps_is_read_with_its_gaps(learns):
    layer, x = layer_of(16), torch.randn(3, 48)
    layer.bias = nn.Parameter(torch.randn(16, 3)[:, 1])
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(linear.dense(layer, x), layer(x))


def test_a_weight_that_is_no_parameter_gets_its_gradient(calls):
    layer, made = layer_of(16).requires_grad_(False), torch.randn(16, 48, requires_grad=True)
    del layer._parameters["weight"]
    layer.weight = 2 * made
    linear.dense(layer, torch.ones(5, 48)).sum().backward()
    assert calls
    torch.testing.assert_close(made.grad, torch.full((16, 48), 10.0))


def test_what_comes_out_may_be_changed_in_place(calls):
    layer, x = layer_of(16), torch.randn(2, 3, 48)
    out = linear.dense(layer, x)
    out.div_(2.0)[..., 0] = 0.0
    out.sum().backward()
    assert calls
    expected = torch.full((16,), 3.0)
    expected[0] = 0.0
    torch.testing.assert_close(layer.bias.grad, expected)


@pytest.mark.parametrize("wide", [16, 200])
def test_gradients_lie_in_memory_as_the_weights_do(calls, wide):
    layer = layer_of(wide)
    found = torch.autograd.grad(linear.dense(layer, torch.randn(5, 48)).sum(), layer.weight)
    assert len(calls) == 2
    assert found[0].stride() == layer.weight.stride()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("learns", [True, False])
def test_derivatives_in_forward_mode_are_those_of_backward_mode(learns):
    layer, activation = layer_of(200).requires_grad_(learns), ACT2FN["gelu"]
    x, way = torch.randn(5, 48), torch.randn(5, 48)
    with forward_ad.dual_level():
        out = linear.dense(layer, forward_ad.make_dual(x, way), activation)
        ours = forward_ad.unpack_dual(out).tangent
    jacobian = torch.autograd.functional.jacobian(lambda x: activation(layer(x)), x)
    torch.testing.assert_close(ours, torch.einsum("nokd,kd->no", jacobian, way))


def test_a_hooked_activation_is_called(calls):
    activation = type(ACT2FN["gelu"])()
    activation.register_forward_hook(lambda module, given, out: out * 0 + 7)
    with torch.no_grad():
        assert (linear.dense(layer_of(16), torch.randn(3, 48), activation) == 7).all()


def test_precision_and_switches_of_torch_are_obeyed(calls, monkeypatch):
    layer, x = layer_of(16), torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.dense(layer, x).dtype == torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        linear.dense(layer, x)
    with FlopCounterMode(display=False) as counter:
        linear.dense(layer, x)
    assert counter.get_total_flops() == 2 * 3 * 48 * 16
    torch.func.vmap(lambda row: linear.dense(layer, row))(x)
    assert not calls


def test_errors_are_those_of_torch():
    layer = layer_of(16)
    for wrong in (torch.randn(3, 47), torch.randn(3, 48).bfloat16(), torch.randn(3, 48).half()):
        with pytest.raises(RuntimeError) as theirs:
            layer(wrong)
        with pytest.raises(RuntimeError) as ours:
            linear.dense(layer, wrong)
        assert str(ours.value) == str(theirs.value)
    assert linear.dense(layer, torch.randn(48)).shape == (16,)


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
