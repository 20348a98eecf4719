"""Which kernel a call takes, by the table of the documentation, and that all can be turned off."""

import runpy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.func import functional_call, vmap

import roformer
from roformer import RoFormerForCausalLM, RoFormerForSequenceClassification, RoFormerModel, kernels
from roformer.kernels import attention, linear
from tiny import HEADS, POOLED, build, inputs_with_labels, tiny_config

IDS = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
PACKED = torch.cat((torch.arange(5), torch.arange(7)))[None]


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """Kernel and number of queries of each attention, on a CPU with bfloat16 instructions."""
    monkeypatch.setattr(attention, "bfloat16_is_emulated", lambda: False)
    monkeypatch.setattr(attention, "CALL_COST", 0)  # so that each length is a call of its own
    found: list[tuple[str, int]] = []

    def spy(holder: Any, name: str) -> None:
        function = getattr(holder, name)

        def record(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append((name.lstrip("_"), query.shape[0] * query.shape[2]))
            return function(query, *args, **kwargs)

        monkeypatch.setattr(holder, name, record)

    spy(attention, "softmax_attention")
    spy(attention, "_chunked_attention")
    spy(torch.nn.functional, "scaled_dot_product_attention")
    return found


def model_of(kernel: str | None, head: type = RoFormerModel, **fields: Any) -> Any:
    return build(head, tiny_config(num_hidden_layers=1, **fields), kernel).bfloat16()


FULL, CHUNKED, SDPA = "softmax_attention", "chunked_attention", "scaled_dot_product_attention"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, int]]]] = {
    "no padding": ({}, {}, [(FULL, 36)]),
    "padding": ({}, {"attention_mask": PADDED}, [(FULL, 12), (FULL, 7), (FULL, 3)]),
    "packed": ({}, {"input_ids": IDS[:1], "position_ids": PACKED}, [(FULL, 7), (FULL, 5)]),
    "hidden states": ({}, {"attention_mask": PADDED, "output_hidden_states": True}, [(FULL, 36)]),
    "attentions": ({}, {"attention_mask": PADDED, "output_attentions": True}, []),
    "position bias": ({"position_encoding": "alibi"}, {"attention_mask": PADDED}, [(FULL, 36)]),
    "four dimensions": ({}, {"attention_mask": PADDED[:, None, None].bool()}, [(FULL, 36)]),
}
"""Fields of the configuration, arguments, and kernels with their number of queries."""


@pytest.mark.parametrize(
    ("length", "dtype", "dropout", "kernel"),
    [
        (512, torch.float32, 0.0, SDPA),
        (512, torch.float32, 0.1, FULL),
        (512, torch.bfloat16, 0.0, FULL),
        (512, torch.float16, 0.1, SDPA),
        (2048, torch.float32, 0.1, CHUNKED),
        (2048, torch.bfloat16, 0.0, CHUNKED),
    ],
)
def test_length_dtype_and_dropout_decide_the_kernel(length, dtype, dropout, kernel, calls):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "attention_probs_dropout_prob": dropout}
    model = model_of(None, **sizes).to(dtype).train()
    with torch.no_grad():
        model(torch.randint(5, 60, (2, length)))
    assert calls[0][0] == kernel


@pytest.mark.parametrize(("fields", "changes", "expected"), CASES.values(), ids=CASES)
def test_each_call_is_computed_by_the_kernel_of_the_table(fields, changes, expected, calls):
    inputs = {"input_ids": IDS} | changes
    with torch.no_grad():
        output = model_of(None, **fields)(**inputs)[0]
        assert calls == expected
        eager = model_of("eager", **fields)(**inputs)[0]
    mask = PADDED.bool() if "attention_mask" in changes else slice(None)
    torch.testing.assert_close(output[mask], eager[mask], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_emulated_bfloat16_takes_the_kernel_of_float32(is_causal, calls, monkeypatch):
    monkeypatch.setattr(attention, "bfloat16_is_emulated", lambda: True)
    sdpa = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, SDPA, sdpa)
    with torch.no_grad():
        assert model_of(None, is_decoder=is_causal)(IDS)[0].dtype == torch.bfloat16
    assert calls == [(SDPA, 36)]
    assert sdpa.call_args.args[0].dtype == torch.float32


def test_autocast_decides_by_the_dtype_of_the_queries(calls):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model_of(None).float()(IDS)
    assert calls == [(FULL, 36)]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
@pytest.mark.parametrize("is_compiled", [False, True])
def test_traced_calls_are_computed_by_sdpa(is_compiled, calls):
    model = model_of(None)
    state = dict(model.named_parameters())
    with torch.no_grad():
        if is_compiled:
            torch.compile(model, backend="eager")(IDS, attention_mask=PADDED)
        else:
            vmap(lambda x: functional_call(model, state, (x[None],))[0])(IDS)
    assert {name for name, _ in calls} == {SDPA}


def test_a_decoder_leaves_padding_out_of_its_loss_and_then_has_no_cache(calls):
    model = model_of(None, RoFormerForCausalLM, is_decoder=True)
    labels = IDS.masked_fill(PADDED == 0, -100)
    with torch.no_grad():
        outputs = model(IDS, attention_mask=PADDED, labels=labels)
        names, lengths = zip(*calls)
        cached = model(IDS, attention_mask=PADDED, labels=labels, use_cache=True)
    assert outputs.past_key_values is None
    assert cached.past_key_values is not None
    assert set(names) == {SDPA}
    assert sum(lengths) == PADDED.sum()
    torch.testing.assert_close(outputs.loss, cached.loss, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_gradient_checkpointing_computes_with_the_same_kernel(calls):
    model = model_of(None).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(IDS)[0].float().sum().backward()
    assert calls == [(FULL, 36)] * 2  # again in the backward pass


def test_hooks_on_layers_see_the_rows_of_the_batch(calls):
    """A vector for each example, added to the last layer, must reach its own example."""
    model = model_of(None).float()
    vectors = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(IDS, attention_mask=PADDED)[0]
        model.encoder.layer[0].register_forward_hook(lambda layer, inputs, output: output + vectors)
        steered = model(IDS, attention_mask=PADDED)[0]
    mask = PADDED.bool()
    torch.testing.assert_close(steered[mask], (plain + vectors)[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["forward_pre", "full_backward", "full_backward_pre"])
def test_padding_is_computed_under_hooks_of_every_kind(calls, kind):
    model = model_of(None)
    getattr(model.encoder.layer[0], f"register_{kind}_hook")(lambda *args: None)
    model(IDS, attention_mask=PADDED)
    assert calls == [(FULL, 36)]


def test_padding_is_left_out_again_after_a_call_that_returned_hidden_states(calls):
    model = model_of(None)
    with torch.no_grad():
        model(IDS, attention_mask=PADDED, output_hidden_states=True)
        calls.clear()
        model(IDS, attention_mask=PADDED)
    assert model.encoder.layer[0]._forward_hooks  # transformers' own
    assert calls == [(FULL, 12), (FULL, 7), (FULL, 3)]


def test_a_row_of_padding_alone_is_scored_as_without_the_other_rows():
    model = model_of(None, RoFormerForSequenceClassification).float()
    mask = PADDED.clone()
    mask[2] = 0
    with torch.no_grad():
        in_batch = model(IDS, attention_mask=mask).logits[2]
        separate = model(IDS[2:], attention_mask=mask[2:]).logits[0]
    torch.testing.assert_close(in_batch, separate, atol=1e-5, rtol=1e-5)


@pytest.fixture
def _kernels_off_afterwards(monkeypatch):
    monkeypatch.setattr(linear, "_prefers_onednn", lambda: linear._onednn_linear is not None)
    yield
    kernels.set_kernels_enabled(True)


LAYOUTS = ["full", "right", "left", "packed"]
HEADS_AND_LAYOUTS = [(h, x) for h in HEADS for x in LAYOUTS if x != "packed" or h not in POOLED]


def outputs(head: type, layout: str, kernel: str | None, enabled: bool) -> list[torch.Tensor]:
    """Loss, outputs at real tokens and gradients of one call."""
    kernels.set_kernels_enabled(enabled)
    model = build(head, tiny_config(), kernel)
    mask = torch.ones(3, 12, dtype=torch.bool)
    if layout in ("left", "right"):
        mask = torch.arange(12) < torch.tensor([[12], [7], [1]])
    if layout == "left":
        mask = mask.flip(1)
    inputs = inputs_with_labels(head, IDS, mask.long())
    if layout == "packed":
        tokens = inputs["input_ids"].numel()
        edges = [row + start for row in range(0, tokens, 12) for start in (0, 3, 6)]
        inputs["cu_seq_lens_q"] = torch.tensor([*edges, tokens])
    loss, logits = model(**inputs)[:2]
    if logits.shape[:2] == mask.shape:
        logits = logits[mask]
    if "start_positions" in inputs:  # the softmax over a row includes its padding
        loss = logits.square().mean()
    loss.backward()
    return [loss, logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("_kernels_off_afterwards")
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "unpadded", None])
@pytest.mark.parametrize(("head", "layout"), HEADS_AND_LAYOUTS)
def test_kernels_change_no_output_loss_or_gradient(head, layout, kernel):
    on, off = (outputs(head, layout, kernel, enabled) for enabled in (True, False))
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * max(1, a.abs().max().item()), rtol=1e-4)


@pytest.mark.usefixtures("_kernels_off_afterwards")
def test_no_kernel_is_called_when_they_are_off(monkeypatch):
    monkeypatch.setattr(linear, "_linear", lambda *x: pytest.fail("oneDNN was called"))
    monkeypatch.setattr(attention, "softmax_attention", lambda *x: pytest.fail("was called"))
    for name in ("dropout._keep_mask", "cross_entropy._split_rows"):
        monkeypatch.setattr(f"roformer.kernels.{name}", lambda *x: pytest.fail("was called"))
    kernels.set_kernels_enabled(False)
    roformer.RoFormerForMaskedLM(tiny_config()).train()(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_turns_them_off(monkeypatch, value, enabled):
    monkeypatch.setenv("ROFORMER_KERNELS", value)
    assert runpy.run_path(kernels.conditions.__file__)["kernels_enabled"]() == enabled
