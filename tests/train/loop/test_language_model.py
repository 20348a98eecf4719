"""The sparse loss against transformers' full one."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

import roformer
from roformer.configuration_roformer import POSITION_BIASES, POSITION_ENCODINGS
from tiny import refused, tiny_config
from tiny_tokens import VOCAB, make_token_store
from train.data.batching import IGNORE_INDEX, SequenceIndex
from train.loop.evaluate import evaluate
from train.loop.language_model import CrossEntropy, LanguageModel, load_config


def test_a_batch_with_nothing_to_predict_has_no_loss_and_no_gradient():
    model = roformer.RoFormerForMaskedLM(tiny_config())
    nothing = torch.zeros(0, dtype=torch.long)
    loss, _ = LanguageModel(model)(torch.randint(5, 60, (1, 4)), nothing, nothing)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "precision", "packed"),
    [
        ({}, "no", False),
        *(({"position_encoding": x}, "bf16", x not in POSITION_BIASES) for x in POSITION_ENCODINGS),
        ({"linear_attention": "elu"}, "bf16", False),
    ],
)
def test_rows_are_packed_with_a_kernel_and_without_a_bias(fields, precision, packed, monkeypatch):
    model = LanguageModel(roformer.RoFormerForMaskedLM(tiny_config(**fields)))
    model.choose_attention(Accelerator(cpu=True))
    assert not model.packed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    model.choose_attention(gpu)
    assert model.packed == packed
    model.model.set_attn_implementation("sdpa")  # a name that is given is obeyed
    model.choose_attention(gpu)
    assert not model.packed
    model.model.set_attn_implementation("unpadded")
    assert model.packed != (fields.get("position_encoding") in POSITION_BIASES)


def test_losses_are_added_up_and_correct_predictions_counted():
    logits, labels = torch.randn(32, 97), torch.randint(0, 97, (32,))
    labels[::2] = logits[::2].argmax(dim=-1)
    labels[::5] = IGNORE_INDEX
    loss, correct = CrossEntropy().eval()(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))
    assert correct == (logits.argmax(dim=-1) == labels).sum()
    assert CrossEntropy()(logits, labels)[1] is None  # in training


def test_held_out_text_is_predicted_at_15_percent_of_its_tokens(tmp_path):
    sequences = SequenceIndex(make_token_store(np.full(300, 20), tmp_path), 24)
    model = LanguageModel(roformer.RoFormerForMaskedLM(tiny_config(vocab_size=7000)))
    vocab = dataclasses.replace(VOCAB, size=7000)
    found = evaluate(model, sequences, vocab, Accelerator(), 32, np.arange(300))
    assert found["validation_tokens"] / 6000 == pytest.approx(0.15, abs=0.02)


def test_a_damaged_configuration_is_refused_with_the_reason_and_not_for_its_path(tmp_path):
    missing = partial(load_config, str(tmp_path / "none"), "model.init")
    refused(missing, f"model.init {tmp_path}/none must", "no such folder", "check the path")
    (tmp_path / "config.json").write_text("{")
    damaged = partial(load_config, str(tmp_path), "model.init")
    refused(damaged, "model.init", "not a valid JSON file", "config.json")
