"""Our RoFormer beside transformers' own, on the same checkpoints, and what ours does better."""

import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

import roformer
from roformer import (
    RoFormerConfig,
    RoFormerForMaskedLM,
    RoFormerForSequenceClassification,
    RoFormerModel,
)

PAIRS = [
    (RoFormerModel, transformers.RoFormerModel),
    (RoFormerForMaskedLM, transformers.RoFormerForMaskedLM),
    (RoFormerForSequenceClassification, transformers.RoFormerForSequenceClassification),
]
VARIANTS = [
    {},
    {"rotary_value": True},
    {"embedding_size": 16},
    {"tie_word_embeddings": False},
    {"num_labels": 5},
]


def enlarge(model: nn.Module) -> nn.Module:
    """Weights large enough for attention to matter: at 0.02 any mistake hides below 1e-5."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and "embed_positions" not in name:
                p.normal_(std=0.4)
            elif p.ndim == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def batch(vocab: int = 60) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, 30:] = 0
    mask[1, 12:] = 0
    types = torch.randint(0, 2, (3, 40))
    ids = torch.randint(0, vocab, (3, 40))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def visible(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return output[mask.bool()] if output.ndim == 3 else output


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_checkpoints_give_equal_outputs_both_ways(ours, stock, fields, saver, config, tmp_path):
    first, second = (ours, stock) if saver == "ours" else (stock, ours)
    values = {
        k: v for k, v in config.to_diff_dict().items() if k not in ("model_type", "num_labels")
    }
    saved = enlarge(first(first.config_class(**(values | fields))))
    saved.save_pretrained(tmp_path)
    loaded = second.from_pretrained(tmp_path).eval()
    inputs = batch()
    with torch.no_grad():
        a, b = (visible(m(**inputs)[0], inputs["attention_mask"]) for m in (saved, loaded))
    largest = a.abs().max()
    assert largest > 0.1
    torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, largest.item()), rtol=0)


def test_gradients_equal_stocks(config):
    ours = enlarge(RoFormerForMaskedLM(config))
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**config.to_dict()))
    stock.load_state_dict(ours.state_dict(), strict=False)
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(torch.rand(3, 40) < 0.8, -100)
    for model in (ours, stock.eval()):
        model(**inputs, labels=labels).loss.backward()
    theirs = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name], atol=1e-4, rtol=1e-4)


def test_a_saved_position_table_is_read_and_dropped_without_a_word(config, tmp_path):
    stock = transformers.RoFormerModel(transformers.RoFormerConfig(**config.to_dict()))
    stock.save_pretrained(tmp_path)
    assert "encoder.embed_positions.weight" in stock.state_dict()
    model, report = RoFormerModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert not any("embed_positions" in name for name in model.state_dict())


def test_stock_misses_nothing_but_the_table_that_it_rebuilds(config, tmp_path):
    RoFormerModel(config).save_pretrained(tmp_path)
    _, report = transformers.RoFormerModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"encoder.embed_positions.weight"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_changes_nothing(config, attention):
    model = enlarge(RoFormerModel._from_config(config, attn_implementation=attention))
    ids = torch.randint(0, 60, (1, 20))
    alone = model(ids).last_hidden_state
    padded = torch.cat([ids, torch.zeros(1, 15, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones(1, 20), torch.zeros(1, 15)], dim=1).long()
    together = model(padded, attention_mask=mask).last_hidden_state[:, :20]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_eager_and_fused_attention_agree(config):
    eager = enlarge(RoFormerModel._from_config(config, attn_implementation="eager"))
    fused = enlarge(RoFormerModel._from_config(config, attn_implementation="sdpa"))
    inputs = batch()
    a, b = (visible(m(**inputs)[0], inputs["attention_mask"]) for m in (eager, fused))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_length_is_not_limited_by_the_configuration(config):
    assert config.max_position_embeddings == 64
    output = RoFormerModel(config).eval()(torch.randint(0, 60, (1, 300))).last_hidden_state
    assert output.shape == (1, 300, 32)
    assert output.isfinite().all()


def test_position_ids_are_obeyed(config):
    model = enlarge(RoFormerModel(config))
    ids, order = torch.randint(0, 60, (2, 30)), torch.randperm(30)
    straight = model(ids).last_hidden_state
    torch.testing.assert_close(
        model(ids[:, order], position_ids=order).last_hidden_state, straight[:, order],
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip
    shifted = model(ids, position_ids=torch.arange(30) + 700).last_hidden_state
    torch.testing.assert_close(shifted, straight, atol=1e-3, rtol=1e-3)
    stretched = model(ids, position_ids=torch.arange(30) * 2).last_hidden_state
    assert (stretched - straight).abs().max() > 0.1


def test_casting_the_model_leaves_angles_in_float32(config):
    model = RoFormerModel(config).bfloat16()
    cos, _ = model._rotation(torch.arange(1024), torch.zeros(1, 1024, 32, dtype=torch.bfloat16))
    assert cos.dtype == torch.float32
    assert len(cos[:, 1].unique()) > 1000  # in bfloat16 positions would collide


def test_sequence_head_reads_the_first_unmasked_token(config):
    model = enlarge(RoFormerForSequenceClassification(config))
    ids = torch.randint(1, 60, (1, 10))
    left = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(16) >= 6).long()[None]
    torch.testing.assert_close(
        model(left, attention_mask=mask).logits, model(ids).logits, atol=1e-4, rtol=1e-4
    )


def test_hidden_states_and_attentions_are_returned(config):
    model = RoFormerModel._from_config(config, attn_implementation="eager").eval()
    output = model(torch.randint(0, 60, (2, 7)), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert [a.shape for a in output.attentions] == [(2, 2, 7, 7)] * 2
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 2, 7))


def test_gradient_checkpointing_changes_no_gradient(config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    gradients = []
    for checkpointing in (False, True):
        model = enlarge(RoFormerForMaskedLM(config))
        if checkpointing:
            # transformers renamed it after 5.17
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)()
        model.train()
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_both_or_neither_input_is_refused(config):
    model = RoFormerModel(config)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(torch.zeros(1, 2, dtype=torch.long), inputs_embeds=torch.zeros(1, 2, 32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "hidden_size",
            33,
            "hidden_size must be a multiple of 2 \\* num_attention_heads = 4.*got 33",
        ),
        ("hidden_size", 34, "hidden_size must be a multiple .* got 34"),
        ("num_hidden_layers", 0, "num_hidden_layers must be at least 1, got 0"),
        ("hidden_dropout_prob", 1.0, "hidden_dropout_prob must be .* below 1, got 1.0"),
        ("pad_token_id", 60, "pad_token_id must be below vocab_size = 60, got 60"),
    ],
)
def test_impossible_configurations_are_refused_by_name(field, value, message):
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=message):
        RoFormerConfig(**(sizes | {field: value}))


def test_importing_leaves_transformers_auto_classes_alone_until_asked(config, tmp_path):
    RoFormerForMaskedLM(config).save_pretrained(tmp_path)
    code = f"""
import roformer, transformers
load = lambda: type(transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r}))
assert load() is transformers.RoFormerForMaskedLM
roformer.use_for_auto_classes()
assert load() is roformer.RoFormerForMaskedLM
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_documented():
    for name in roformer.__all__:
        assert getattr(roformer, name).__doc__, name
