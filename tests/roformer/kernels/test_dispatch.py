"""All kernels can be turned off: outputs, losses and gradients stay the same."""

import runpy
import sys

import pytest
import torch

import roformer
from roformer import RoFormerForMultipleChoice, RoFormerForSequenceClassification, kernels
from roformer.kernels import linear
from tiny import HEADS, build, inputs_with_labels, tiny_config

IDS = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def _kernels_off_afterwards(monkeypatch):
    monkeypatch.setattr(linear, "_prefers_onednn", lambda: linear._onednn_linear is not None)
    yield
    kernels.set_kernels_enabled(True)


LAYOUTS = ["full", "right", "left", "packed"]
POOLED = (RoFormerForSequenceClassification, RoFormerForMultipleChoice)
CASES = [(h, x) for h in HEADS for x in LAYOUTS if x != "packed" or h not in POOLED]
"""Heads that read one token of each row take no packed documents."""


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
    output = model(**inputs)
    loss, logits = output[:2]
    if logits.shape[:2] == mask.shape:
        logits = logits[mask]
    if "start_positions" in inputs:  # the softmax over a row includes its padding
        loss = logits.square().mean()
    loss.backward()
    return [loss, logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("_kernels_off_afterwards")
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "unpadded", None])
@pytest.mark.parametrize(("head", "layout"), CASES)
def test_kernels_change_no_output_loss_or_gradient(head, layout, kernel):
    on, off = (outputs(head, layout, kernel, enabled) for enabled in (True, False))
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * max(1, a.abs().max().item()), rtol=1e-4)


@pytest.mark.usefixtures("_kernels_off_afterwards")
def test_no_kernel_is_called_when_they_are_off(monkeypatch):
    monkeypatch.setattr(linear, "_linear", lambda *x: pytest.fail("oneDNN was called"))
    attention = sys.modules["roformer.kernels.attention"]
    monkeypatch.setattr(attention, "_full_attention", lambda *x: pytest.fail("was called"))
    monkeypatch.setattr("roformer.kernels.dropout._keep_mask", lambda *x: pytest.fail("was called"))
    kernels.set_kernels_enabled(False)
    model = roformer.RoFormerForMaskedLM(tiny_config())
    model.train()(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_turns_them_off(monkeypatch, value, enabled):
    monkeypatch.setenv("ROFORMER_KERNELS", value)
    assert runpy.run_path(kernels.dispatch.__file__)["kernels_enabled"]() == enabled
