"""The head that all models of a comparison share, through the fine-tuning command."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModel, pipeline

from finetune import glue
from finetune.results import prediction_file, read_predictions
from finetune.settings import GlueSettings
from finetune.shared_head import ENCODER, SharedHead, SharedHeadClassifier
from finetune.task_data import read_split_columns
from finetune.tasks import TASKS
from tiny_glue import (
    load_examples,
    other_model,
    tiny_model,
    tiny_tokenizer,
    write_mnli,
    write_sst2,
    write_stsb,
)
from train.settings import InputError

MEAN = {"pooling": "mean"}
APART = {"pooling": "mean", "pair_encoding": "separate"}


def settings(folder, task="stsb", **changes) -> GlueSettings:
    values = {"model": str(folder / "model"), "glue_dir": str(folder / "glue"), "length": 32}
    values |= {"output": str(folder / "results.jsonl"), "cache": str(folder / "tokens")}
    return GlueSettings(**values | {"task": task, "batch_size": 16, "epochs": 1} | changes)


def load(run: GlueSettings) -> torch.nn.Module:
    return glue.load_model(run, glue.load_config_and_tokenizer(run, TASKS[run.task])[0])


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_reaches_the_logits(pooling, texts, side):
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    head, mask = SharedHead(4, 1, "mean", 2).eval(), torch.ones(2, 1)
    states = torch.randn(2, 1, 4)
    with torch.no_grad():
        head.dense.weight[:, :8] = 0  # leaves the two parts that do not depend on the order
    torch.testing.assert_close(head(states, mask), head(states.flip(0), mask))
    assert not torch.allclose(head(states, mask), head(states[:1].expand(2, 1, 4), mask))


def test_separate_texts_are_tokenized_as_single_texts(tmp_path):
    write_stsb(tmp_path)
    rows = np.array([7, 3, 11])
    data = load_examples(
        TASKS["stsb"], "validation", str(tmp_path), tiny_tokenizer(), 32, str(tmp_path), "separate"
    )
    batch = data.batch(rows)
    columns = read_split_columns(TASKS["stsb"], "validation", str(tmp_path))
    texts = [columns[name][row] for row in rows for name in ("sentence1", "sentence2")]
    expected = tiny_tokenizer()(texts, padding=True, return_tensors="pt")
    labels = batch.pop("labels")
    assert {name: x.tolist() for name, x in batch.items()} == {
        name: x.tolist() for name, x in expected.items()
    }
    assert labels.tolist() == columns["label"][rows].tolist()
    longest = [max(pair) for pair in batch["attention_mask"].sum(1).view(-1, 2).tolist()]
    assert data.lengths[rows].tolist() == longest


def test_a_single_text_is_read_alike_by_both_encodings_of_pairs(tmp_path):
    write_sst2(tmp_path)
    both = [
        load_examples(
            TASKS["sst2"], "train", str(tmp_path), tiny_tokenizer(), 32, str(tmp_path), encoding
        ).batch(np.arange(9))
        for encoding in ("joint", "separate")
    ]
    assert all(both[0][name].equal(both[1][name]) for name in both[0])


@pytest.mark.parametrize("protocol", [MEAN, APART])
def test_every_encoder_gets_the_same_head(tmp_path, protocol):
    tiny_model(tmp_path / "model", "roformer")
    tiny_model(tmp_path / "bert", "bert", hidden_dropout_prob=0.3, initializer_range=0.5)
    other_model(tmp_path / "distilbert", "distilbert")
    runs = [settings(tmp_path, **protocol), settings(tmp_path, random_weights=True, **protocol)]
    runs += [
        settings(tmp_path, model=str(tmp_path / name), **protocol)
        for name in ("bert", "distilbert")
    ]
    first, *others = (load(run).head for run in runs)
    assert repr(first).count("Dropout(p=0.1") == 1
    for head in others:
        assert repr(head) == repr(first)
        assert all(x.equal(y) for x, y in zip(head.parameters(), first.parameters(), strict=True))
    other_seed = load(settings(tmp_path, seed=1, **protocol)).head
    assert not other_seed.dense.weight.equal(first.dense.weight)


@pytest.mark.parametrize("kind", ["roformer", "bert"])
@pytest.mark.parametrize(
    ("task", "protocol"),
    [("sst2", {"pooling": "first"}), ("sst2", APART), ("stsb", MEAN), ("stsb", APART)],
)
def test_a_model_learns_and_its_folder_gives_the_scored_predictions(
    tmp_path, monkeypatch, kind, task, protocol
):
    warned = lambda config: pytest.fail("of padding, which the head does not read")  # noqa: E731
    monkeypatch.setattr("roformer.modeling_roformer.warn_of_zeros", warned)
    torch.manual_seed(0)
    tiny_model(tmp_path / "model", kind)
    write = write_sst2 if task == "sst2" else write_stsb
    write(tmp_path / "glue", train=192)
    saved = tmp_path / "saved"
    run = settings(tmp_path, task, epochs=6, learning_rate=5e-3, save=str(saved), **protocol)
    result = glue.main(run)
    assert result["headline"] > result["majority"] + 0.3
    model = SharedHeadClassifier.from_pretrained(saved)
    assert result["parameters"] == model.num_parameters()
    data = glue.load_data(run, TASKS[task], tiny_tokenizer())["validation"]
    batch = data.batch(np.arange(len(data)))
    batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits.numpy()
    scored = read_predictions(prediction_file(run.output, result, "validation"))[1]
    np.testing.assert_allclose(logits, scored, atol=1e-5)
    assert type(AutoModel.from_pretrained(saved / ENCODER)).__module__.endswith(kind)
    with pytest.raises((OSError, ValueError), match="config.json"):
        pipeline("text-classification", str(saved))
    with pytest.raises(InputError, match=f"take {saved / ENCODER}$"):
        glue.main(settings(tmp_path, task, model=str(saved)))
    again = glue.main(run)  # an earlier save is replaced
    assert again["losses"] == result["losses"]
    card = re.search(r"```python\n(.*?)```", (saved / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(saved)
    exec(card, scope := {})
    assert scope["model"](**scope["inputs"]).logits.shape == (1, TASKS[task].num_labels)


def test_every_weight_of_a_shared_head_model_is_trained(tmp_path):
    """A pooler that nothing reads would have no gradient, which DistributedDataParallel refuses."""
    tiny_model(tmp_path / "model", "bert")
    model = load(settings(tmp_path, **APART))
    ids = torch.tensor([[2, 5, 3], [2, 6, 3]])
    model(attention_mask=torch.ones_like(ids), input_ids=ids).logits.sum().backward()
    assert [name for name, x in model.named_parameters() if x.grad is None] == []


def test_a_run_from_mnli_takes_over_encoder_and_fitting_layers(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_mnli(tmp_path / "glue")
    folder = tmp_path / "mnli"
    glue.main(settings(tmp_path, "mnli", learning_rate=1e-2, save=str(folder), **APART))
    tuned = SharedHeadClassifier.from_pretrained(folder).state_dict()
    begun = load(settings(tmp_path, "rte", mnli=str(folder), **APART)).state_dict()
    changed = {name for name in tuned if not tuned[name].equal(begun[name])}
    assert changed == {"head.out_proj.weight", "head.out_proj.bias"}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("pooling", {"pooling": "max"}),
        ("pair_encoding", {"pooling": "mean", "pair_encoding": "both"}),
        ("pair_encoding", {"pair_encoding": "separate"}),
    ],
)
def test_a_protocol_that_does_not_exist_is_refused(tmp_path, key, changes):
    with pytest.raises(InputError, match=f"^{key} must "):
        settings(tmp_path, **changes)
