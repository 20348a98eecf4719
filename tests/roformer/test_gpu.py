"""What needs a CUDA device: `python -m pytest -m gpu`. Not run on a GPU so far."""

import copy

import pytest
import torch

from roformer import RoFormerForMaskedLM, RoFormerModel
from roformer.kernels import attention
from tiny import enlarge
from train.loop.flops import measure_peak_flops
from train.loop.memory import largest_batch

pytestmark = pytest.mark.gpu


def rows(width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(0, 60, (4, width), device="cuda")
    mask = torch.arange(width, device="cuda") < torch.tensor([[24], [24], [7], [1]], device="cuda")
    return ids, mask.long()


def model_with(config, kernel: str, head: type = RoFormerModel) -> torch.nn.Module:
    model = enlarge(head._from_config(copy.deepcopy(config), attn_implementation="eager"))
    model.set_attn_implementation(kernel)
    return model.cuda()


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kernel", ["sdpa", "unpadded", "flex_attention"])
def test_kernels_give_eager_outputs_and_gradients_in_bfloat16(kernel, decoder, config):
    config.is_decoder, config.use_cache, config.hidden_act = decoder, False, "tanh"
    ids, mask = rows()
    results = []
    for name in ("eager", kernel):
        model = model_with(config, name)
        model = model if name == "eager" else model.bfloat16()
        output = model(ids, attention_mask=mask).last_hidden_state[mask.bool()].float()
        output.square().mean().backward()
        results.append((output, [p.grad.float() for p in model.parameters()]))
    (exact, gradients), (coarse, others) = results
    assert (coarse - exact).abs().mean() < 0.03 * exact.abs().mean()
    for a, b in zip(gradients, others):
        assert (a - b).abs().mean() <= 0.1 * a.abs().mean() + 1e-6


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_unpadded_attention_uses_torchs_kernel_where_it_can(decoder, config, monkeypatch):
    config.is_decoder, config.use_cache = decoder, False
    calls, kernel = [], attention.varlen_attn

    def counted(*arguments, **options):
        calls.append(options)
        return kernel(*arguments, **options)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    ids, mask = rows()
    model_with(config, "unpadded").bfloat16()(ids, attention_mask=mask)
    assert len(calls) == 2
    assert bool(calls[0]) == decoder
    model_with(config, "unpadded")(ids, attention_mask=mask)  # float32: the loop
    assert len(calls) == 2


def test_a_compiled_packed_step_has_no_graph_break(config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = model_with(config, "unpadded").bfloat16()
    batch = largest_batch(3, 24, 60, 0.15, packed=True)
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    inputs = {k: v for k, v in inputs.items() if k not in ("label_positions", "labels")}
    compiled = torch.compile(model, fullgraph=True)
    a, b = (m(**inputs).last_hidden_state.float() for m in (compiled, model))
    assert (a - b).abs().mean() < 0.03 * b.abs().mean()


def test_no_value_is_looked_at_on_the_way(config):
    """A step that waits for the host would raise; with a mask transformers looks at it once."""
    model = model_with(config, "sdpa", RoFormerForMaskedLM)
    ids, mask = rows()
    model(ids, attention_mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, attention_mask=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_peak_is_that_of_a_gpu():
    assert measure_peak_flops(torch.device("cuda"), torch.bfloat16) > 5e13
