"""The head that all models of a comparison share, through the fine-tuning command."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, pipeline

from finetune import glue
from finetune.models import load_config_and_tokenizer, load_model
from finetune.settings import GlueSettings
from finetune.shared_head import ENCODER, SharedHead, SharedHeadClassifier
from finetune.tasks import TASKS
from tiny import refused
from tiny_glue import glue_run, predictions_of, run_settings, tiny_model, tiny_tokenizer, write_stsb

MEAN = {"pooling": "mean"}
APART = {"pooling": "mean", "pair_encoding": "separate"}


def load(run: GlueSettings) -> torch.nn.Module:
    return load_model(run, load_config_and_tokenizer(run, TASKS[run.task])[0])


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_reaches_the_logits(pooling, texts, side):
    head = SharedHead(8, 3, pooling, texts).eval()
    states = torch.randn(2 * texts, 5, 8)
    noise = torch.full((2 * texts, 3, 8), 1e4)
    parts = (noise, states) if side == "left" else (states, noise)
    mask = torch.cat([torch.full(x.shape[:2], int(x is states)) for x in parts], dim=1)
    expected = head(states, torch.ones(2 * texts, 5, dtype=torch.int64))
    assert expected.shape == (2, 3)
    torch.testing.assert_close(head(torch.cat(parts, dim=1), mask), expected)
    pooled = states[:, 0] if pooling == "first" else states.mean(1)
    torch.testing.assert_close(head(pooled[:, None], torch.ones(2 * texts, 1)), expected)


def test_texts_encoded_separately_are_compared_by_difference_and_product():
    head, mask = SharedHead(4, 1, "mean", 2).eval(), torch.ones(2, 1)
    states = torch.randn(2, 1, 4)
    u, v = states[:, 0]  # in the order of the paper, which saved heads have
    hidden = torch.nn.functional.gelu(head.dense(torch.cat((u, v, (u - v).abs(), u * v))))
    torch.testing.assert_close(head(states, mask)[0], head.out_proj(hidden))
    with torch.no_grad():
        head.dense.weight[:, :8] = 0  # leaves the two parts that do not depend on the order
    torch.testing.assert_close(head(states, mask), head(states.flip(0), mask))
    assert not torch.allclose(head(states, mask), head(states[:1].expand(2, 1, 4), mask))


@pytest.mark.parametrize("protocol", [MEAN, APART])
def test_every_encoder_gets_the_same_head(folder, protocol):
    tiny_model(folder / "bert", "bert", hidden_dropout_prob=0.3, initializer_range=0.5)
    tiny_model(folder / "distilbert", "distilbert")
    changes = [{"model": str(folder / name)} for name in ("model", "bert", "distilbert")]
    changes.append({"random_weights": True})
    runs = [run_settings(folder, "stsb", **protocol, **changed) for changed in changes]
    first, *others = (load(run).head for run in runs)
    assert repr(first).count("Dropout(p=0.1") == 1
    for head in others:
        assert repr(head) == repr(first)
        assert all(x.equal(y) for x, y in zip(head.parameters(), first.parameters(), strict=True))
    other_seed = load(run_settings(folder, "stsb", seed=1, **protocol)).head
    assert not other_seed.dense.weight.equal(first.dense.weight)


@pytest.mark.parametrize("kind", ["roformer", "bert"])
@pytest.mark.parametrize("protocol", [{}, MEAN])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_weights_may_be_missing_in_the_head_only(folder, kind, protocol, has_prefix):
    model = tiny_model(folder / "model", kind)
    if not has_prefix:
        AutoModel.from_pretrained(model).save_pretrained(model)
    run, file = run_settings(folder, "stsb", **protocol), folder / "model" / "model.safetensors"
    load(run)
    weights = load_file(file)
    (name,) = (name for name in weights if name.endswith(".attention.output.dense.weight"))
    other_shape = weights | {name: weights.pop(name)[:4].clone()}
    for damaged in (weights, other_shape):
        save_file(damaged, file, {"format": "pt"})
        refused(lambda: load(run), "model", model, ".attention.output.dense.weight")


@pytest.mark.parametrize("kind", ["roformer", "bert"])
@pytest.mark.parametrize(
    ("task", "protocol"),
    [("sst2", {"pooling": "first"}), ("sst2", APART), ("stsb", MEAN), ("stsb", APART)],
)
def test_a_model_learns_and_is_saved_with_predictions(folder, monkeypatch, kind, task, protocol):
    warned = lambda line: pytest.fail("of padding, which the head does not read")  # noqa: E731
    monkeypatch.setattr("roformer.attention_inputs.logger.warning_once", warned)
    tiny_model(folder / "model", kind)
    write_stsb(folder / "glue", train=192)
    saved = folder / "saved"
    run = run_settings(folder, task, epochs=6, save=str(saved), **protocol)
    result = glue_run(run)
    assert result["headline"] > result["majority"] + 0.3
    model = SharedHeadClassifier.from_pretrained(saved)
    assert result["parameters"] == sum(x.numel() for x in model.parameters())
    data = glue.load_data(run, TASKS[task], tiny_tokenizer())["validation"]
    batch = data.batch(np.arange(len(data)))
    batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits.numpy()
    np.testing.assert_allclose(logits, predictions_of(run, result)[1], atol=1e-5)
    assert type(AutoModel.from_pretrained(saved / ENCODER)).__module__.endswith(kind)
    with pytest.raises((OSError, ValueError), match="config.json"):
        pipeline("text-classification", str(saved))
    whole = run_settings(folder, task, model=str(saved))
    refused(lambda: glue_run(whole), f"model {saved} must", "config.json")
    refused(lambda: GlueSettings(**vars(run)), "save must be new")
    card = re.search(r"```python\n(.*?)```", (saved / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(saved)
    exec(card, scope := {})
    assert scope["model"](**scope["inputs"]).logits.shape == (1, TASKS[task].num_labels)


def test_every_weight_of_a_shared_head_model_is_trained(folder):
    """A pooler that nothing reads would have no gradient, which DistributedDataParallel refuses."""
    tiny_model(folder / "model", "bert")
    model = load(run_settings(folder, "stsb", **APART))
    ids = torch.tensor([[2, 5, 3], [2, 6, 3]])
    model(attention_mask=torch.ones_like(ids), input_ids=ids).logits.sum().backward()
    assert [name for name, x in model.named_parameters() if x.grad is None] == []
