"""The oneDNN linear layer gives the results of `nn.Linear`, and leaves to it what it cannot do."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from roformer import RoFormerForMaskedLM
from roformer.kernels import Linear, linear, replace_by_torch_modules
from roformer.modeling_roformer import RoFormerIntermediate
from tiny import tiny_config

pytestmark = pytest.mark.skipif(linear._onednn_linear is None, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """oneDNN is chosen on any processor; the fixture lists the shapes of its products."""
    shapes, product = [], linear._linear
    monkeypatch.setattr(linear, "_prefers_onednn", lambda: True)
    monkeypatch.setattr(linear, "_linear", lambda *x: shapes.append(x[0].shape) or product(*x))
    return shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [16, 48, 200])
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (2, 0, 48), (3, 2, 5, 48)])
def test_products_and_gradients_are_those_of_float64(calls, wide, bias, shape):
    layer, x = Linear(48, wide, bias), torch.randn(shape)
    exact = copy.deepcopy(layer).double()
    inputs = x.requires_grad_(), x.detach().double().requires_grad_()
    outputs = layer(inputs[0]), exact(inputs[1])
    slope = torch.randn(outputs[0].shape)
    ours = torch.autograd.grad(outputs[0], [inputs[0], *layer.parameters()], slope)
    theirs = torch.autograd.grad(outputs[1], [inputs[1], *exact.parameters()], slope.double())
    assert len(calls) == (3 if x.numel() else 0)  # forward, and a gradient of x and of the weight
    assert ours[1].stride() == layer.weight.stride()
    for found, expected in zip([outputs[0], *ours], [outputs[1], *theirs]):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_parts_of_a_layer_that_learn_are_all_that_get_gradients(calls):
    layer, x = Linear(48, 16), torch.randn(5, 48)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert len(calls) == 1
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((16,), 5.0))


def test_the_gradient_of_a_gradient_is_that_of_float64():
    layer, x = Linear(48, 16), torch.randn(5, 48)
    found = []
    for dtype in (torch.float32, torch.float64):
        given, module = x.to(dtype).requires_grad_(), layer.to(dtype)
        loss = module(given).pow(3).sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), module.weight)[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4 * found[1].abs().max().item())


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta", "ignore:.*invariant checks")
def test_sparse_weights_are_left_to_torch(calls):
    layer, x = Linear(48, 16), torch.randn(3, 48)
    expected = layer(x)
    calls.clear()
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)
    torch.testing.assert_close(layer(x), expected)
    assert not calls


@pytest.mark.parametrize("learns", [True, False])
def test_a_bias_with_gaps_is_read_with_its_gaps(learns):
    layer, x = Linear(48, 16), torch.randn(3, 48)
    layer.bias = nn.Parameter(torch.randn(16, 3)[:, 1])
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_weight_that_is_no_parameter_gets_its_gradient(calls):
    layer, made = Linear(48, 16).requires_grad_(False), torch.randn(16, 48, requires_grad=True)
    del layer._parameters["weight"]
    layer.weight = 2 * made
    layer(torch.ones(5, 48)).sum().backward()
    assert calls
    torch.testing.assert_close(made.grad, torch.full((16, 48), 10.0))


def test_what_comes_out_may_be_changed_in_place(calls):
    layer, x = Linear(48, 16), torch.randn(2, 3, 48)
    out = layer(x)
    out.div_(2.0)[..., 0] = 0.0
    out.sum().backward()
    assert calls
    expected = torch.full((16,), 3.0)
    expected[0] = 0.0
    torch.testing.assert_close(layer.bias.grad, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("learns", [True, False])
def test_derivatives_in_forward_mode_are_those_of_backward_mode(learns):
    layer = Linear(48, 200).requires_grad_(learns)
    x, tangent = torch.randn(5, 48), torch.randn(5, 48)
    with forward_ad.dual_level():
        out = F.gelu(layer(forward_ad.make_dual(x, tangent)))
        ours = forward_ad.unpack_dual(out).tangent
    jacobian = torch.autograd.functional.jacobian(lambda x: F.gelu(layer(x)), x)
    torch.testing.assert_close(ours, torch.einsum("nokd,kd->no", jacobian, tangent))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch._C._are_functorch_transforms_active", None),
        ("torch.cpu.get_capabilities", dict),
        ("roformer.kernels.linear._onednn_linear", None),
    ],
)
def test_a_torch_without_a_private_name_computes_by_itself(calls, monkeypatch, name, value):
    monkeypatch.undo()
    linear._prefers_onednn.cache_clear()
    monkeypatch.setattr(name, value)
    monkeypatch.setattr(linear, "_linear", lambda *x: pytest.fail("oneDNN was called"))
    layer, x = Linear(48, 16), torch.randn(3, 48)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    linear._prefers_onednn.cache_clear()


def test_autocast_switches_of_torch_and_transforms_are_obeyed(calls, monkeypatch):
    layer, x = Linear(48, 16), torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        layer(x)
    torch.func.vmap(lambda row: layer(row))(x)
    assert not calls
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert calls
    assert counter.get_total_flops() == 2 * 3 * 48 * 16


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("rows", [4, 64])
def test_emulated_bfloat16_is_computed_in_float32_for_many_rows(rows, autocast, monkeypatch):
    monkeypatch.setattr(linear, "bfloat16_is_emulated", lambda: True)
    dtypes, product = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: dtypes.append(x.dtype) or product(x, *rest))
    layer, x = Linear(48, 200).bfloat16(), torch.randn(rows, 48).bfloat16().requires_grad_()
    exact = copy.deepcopy(layer).double()
    inputs = x, x.detach().double().requires_grad_()
    if autocast:
        layer.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(x), exact(inputs[1])
    assert outputs[0].dtype == torch.bfloat16
    assert (dtypes[0] == torch.float32) == (rows == 64)
    ours = torch.autograd.grad(outputs[0].sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(outputs[1].sum(), [inputs[1], *exact.parameters()])
    for found, expected in zip([outputs[0], *ours], [outputs[1], *theirs], strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=2**-7, atol=2**-7)


def test_what_torch_refuses_is_refused():
    for wrong in (torch.randn(3, 47), torch.randn(3, 48).bfloat16(), torch.randn(3, 48).half()):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            Linear(48, 16)(wrong)
    assert Linear(48, 16)(torch.randn(48)).shape == (16,)


def test_a_model_computes_all_of_its_large_products_by_it(calls):
    model = RoFormerForMaskedLM(tiny_config()).eval()
    ids = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        model(ids)
    assert len(calls) == 2 * 6 + 2  # q, k, v and three of the halves' a layer; the head's two
    calls.clear()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 3 * (2 * 6 + 2)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_torch_quantizes_a_model_whose_layers_were_replaced_by_its_own(calls):
    block = RoFormerIntermediate(tiny_config()).eval()
    x = torch.randn(4, 32)
    expected = F.gelu(block.dense(x))
    calls.clear()
    replace_by_torch_modules(block)
    assert type(block.dense) is nn.Linear
    block = torch.ao.quantization.quantize_dynamic(block, {nn.Linear})
    assert not isinstance(block.dense, nn.Linear)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0.05)
    assert not calls
