"""What needs a CUDA device: `python -m pytest -m gpu tests/roformer/test_gpu.py`.

The tests marked `host` look at host code only (synchronisations, graph breaks, recompilations) and
pass as well over a CUDA runtime that computes nothing.
"""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.utils import counters

from roformer import RoFormerForMaskedLM, RoFormerModel
from roformer.kernels import attention
from tiny import build
from train.data.batching import packed_layout
from train.loop.language_model import LanguageModel
from train.loop.optim import adamw
from train.loop.run_log import measure_peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    # raised inside torch's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LENGTHS = (24, 24, 7, 1)


def objective_with(config, kernel: str) -> LanguageModel:
    return LanguageModel(build(RoFormerForMaskedLM, config, kernel).cuda().train())


def make_batch(lengths: tuple[int, ...], packed: bool) -> dict:
    """A micro-batch on the device with the labels of eight tokens."""
    layout = packed_layout(torch.tensor(lengths).numpy())
    ids = torch.randint(5, 60, (1, sum(lengths)))
    if not packed:
        ids = torch.randint(5, 60, (len(lengths), max(lengths)))
        layout = {"attention_mask": torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]}
    batch = {"input_ids": ids, "label_indices": torch.arange(8), "labels": ids.flatten()[:8]}
    return {k: v.cuda() if torch.is_tensor(v) else v for k, v in (batch | layout).items()}


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kernel", ["sdpa", "unpadded", "flex_attention"])
def test_kernels_in_bfloat16_are_as_close_to_float64_as_eager(kernel, decoder, config):
    config.is_decoder, config.use_cache, config.hidden_act = decoder, False, "tanh"
    torch.manual_seed(2)
    ids = torch.randint(0, 60, (4, 24), device="cuda")
    mask = (torch.arange(24) < torch.tensor(LENGTHS)[:, None]).long().cuda()

    def outputs_and_gradients(name, dtype):
        model = build(RoFormerModel, config, name).to("cuda", dtype)
        output = model(ids, attention_mask=mask).last_hidden_state[mask.bool()].double()
        output.square().mul(torch.linspace(0, 1, output.shape[-1], device="cuda")).mean().backward()
        # the bias of keys has no gradient, because softmax is invariant to it
        named = ((n, p) for n, p in model.named_parameters() if not n.endswith("key.bias"))
        return {"output": output} | {n: p.grad.double() for n, p in named if p.grad is not None}

    exact, eager, other = (
        outputs_and_gradients(*case)
        for case in (("eager", torch.float64), ("eager", torch.bfloat16), (kernel, torch.bfloat16))
    )
    for name, value in exact.items():
        # on a CPU the query biases of torch's sdpa are up to 1.6 times as far as eager's
        limit = 3 * (eager[name] - value).norm() + 1e-4 * value.norm()
        assert (other[name] - value).norm() <= limit, name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_host_documents_of_any_length_are_one_call_of_flash_attention(config, dropout, monkeypatch):
    config.attention_probs_dropout_prob = dropout
    calls, kernel = [], attention._flash_attention
    monkeypatch.setattr(
        attention, "_flash_attention", lambda *x, **o: calls.append(x) or kernel(*x, **o)
    )
    objective_with(config, "unpadded").bfloat16()(**make_batch(LENGTHS, packed=True))
    assert [call[7] for call in calls] == [dropout] * config.num_hidden_layers


@pytest.mark.parametrize(
    ("kernel", "dropout"), [("unpadded", 0.0), ("unpadded", 0.1), ("auto", 0.1)]
)
def test_host_a_training_step_waits_for_nothing(kernel, dropout, config):
    config.attention_probs_dropout_prob = dropout
    model = objective_with(config, kernel)
    batch, optimizer = make_batch(LENGTHS, model.packed), adamw(model, 1e-4, 0.01)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one creates the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # as in train/loop/launch.py
@pytest.mark.parametrize("kernel", ["unpadded", "auto"])
def test_host_compiled_layers_have_no_graph_break_and_compile_once(kernel, config):
    """As `configs/accelerate/one_gpu_compiled.yaml` asks for, over batches of many lengths."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in train/loop/launch.py
    plugin = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True, dynamic=True)
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    torch._dynamo.reset()
    counters.clear()
    objective = objective_with(config, kernel)
    model = accelerator.prepare_model(objective)
    for number in range(12):
        graphs = counters["stats"]["unique_graphs"] if number else None
        lengths = [length + number for length in LENGTHS]
        lengths += [5] * (kernel == "unpadded") * number  # also another number of documents
        loss, _ = model(**make_batch(tuple(lengths), objective.packed))
        accelerator.backward(loss)
        assert graphs in (None, counters["stats"]["unique_graphs"])
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not counters["graph_break"]
    assert hasattr(model.cross_entropy, "_orig_mod")  # the loss is compiled too


def test_the_peak_is_that_of_a_gpu():
    assert measure_peak_flops(torch.device("cuda"), torch.bfloat16) > 5e13
