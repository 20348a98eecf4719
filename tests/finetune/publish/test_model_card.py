"""The saved model answers as its card says, and the card says what the line says."""

import json
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForSequenceClassification

import roformer
from finetune.publish import model_card
from finetune.publish.model_card import save_with_card
from finetune.tasks import TASKS
from tiny import command, enlarge, refused
from tiny_glue import SHAPE, tiny_tokenizer
from tiny_results import line
from train.atomic_dir import UNFINISHED

COMMAND = "accelerate launch --mixed_precision no finetune/glue.py --model m --task t --seed 3"


def a_line(task: str = "rte", model: str = "google-bert/bert-base-uncased", **changes) -> dict:
    """A results line, with other values in every field."""
    known = TASKS[task]
    scores = {
        split: {name: (i + 2) / 7 + j / 11 for i, name in enumerate(known.metrics)}
        for j, split in enumerate(known.validation_splits)
    }
    facts = {
        "seed": 3, "learning_rate": 3e-5, "epochs": 4, "batch_size": 16, "length": 24,
        "schedule": "cosine", "warmup_share": 0.06, "weight_decay": 0.02, "clip_norm": 0.9,
        "model_type": "bert", "metrics": scores, "parameters": 12_345_678, "loss": 0.4567,
        "rows": {"train": 2490, **dict.fromkeys(known.validation_splits, 1000)},
        "majority_metrics": {
            s: dict.fromkeys(v, 0.123 + j / 10) for j, (s, v) in enumerate(scores.items())
        },
        "seconds": 98.76, "processes": 2, "versions": {"torch": "2.99", "transformers": "5.98"},
        "command": COMMAND,
    }  # fmt: skip
    return line(model, task, 0.3, **(facts | changes))


REDUCED = {"official": False, "dataset": "mnli (9k)"}


def a_model(task: str = "rte", kind: str = "bert") -> torch.nn.Module:
    roformer.use_for_auto_classes()
    names = TASKS[task].labels or ("value",)
    head = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "single_label_classification" if TASKS[task].labels else "regression",
    }
    if kind == "roformer_plus":
        head["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    config = AutoConfig.for_model(kind, **SHAPE, **head)
    return enlarge(AutoModelForSequenceClassification.from_config(config))


def saved(folder: Path, task: str = "rte", kind: str = "bert", **changes) -> Path:
    run = a_line(task, model_type=kind, **changes)
    save_with_card(str(folder / "tuned"), a_model(task, kind), tiny_tokenizer(), run)
    return folder / "tuned"


def snippet(folder: Path) -> str:
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]


def own_answer(task: str, kind: str) -> tuple[str, float]:
    """What the model in memory says to the card's example."""
    texts = model_card.EXAMPLE[: len(TASKS[task].columns)]
    batch = tiny_tokenizer()(*texts, return_tensors="pt", truncation=True, max_length=24)
    model = a_model(task, kind)
    with torch.no_grad():
        logits = model(**batch).logits[0]
    scores = logits.softmax(-1) if TASKS[task].labels else logits
    return model.config.id2label[int(scores.argmax())], float(scores.max())


def read_answer(printed: str) -> tuple[str, float]:
    answer = yaml.safe_load(printed.strip().splitlines()[-1])
    answer = answer[0] if isinstance(answer, list) else answer
    return answer["label"], answer["score"]


@pytest.mark.parametrize(
    ("task", "kind"),
    [("rte", "bert"), ("cola", "bert"), ("mnli", "roformer_plus"), ("stsb", "roformer")],
)
def test_a_cards_code_runs_and_answers_as_the_model_did(tmp_path, monkeypatch, capsys, task, kind):
    folder = saved(tmp_path, task, kind)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(snippet(folder), {})
    label, score = read_answer(capsys.readouterr().out)
    expected, value = own_answer(task, kind)
    assert (label, score) == (expected, pytest.approx(value, abs=1e-5))
    # the one type that transformers does not know by itself
    assert snippet(folder).startswith("import roformer") == (kind == "roformer_plus")


def test_a_roformer_is_read_by_transformers_alone_and_by_ours(tmp_path):
    folder = saved(tmp_path, "rte", "roformer")
    assert "roformer.use_for_auto_classes()" in (folder / "README.md").read_text()
    script = f"""
import os, socket, sys
os.chdir({str(folder)!r})
socket.socket.connect = socket.getaddrinfo = None
{snippet(folder)}
assert 'roformer' not in sys.modules
import roformer; roformer.use_for_auto_classes()
{snippet(folder)}
assert type(classify.model).__module__.startswith('roformer')
"""
    printed = command("-c", script).stdout
    expected, value = own_answer("rte", "roformer")
    answers = [read_answer(text) for text in printed.splitlines() if "score" in text]
    assert answers == [(expected, pytest.approx(value, abs=1e-5))] * 2


@pytest.mark.parametrize("changes", [{}, REDUCED])
def test_the_metadata_come_back_as_they_were(tmp_path, changes):
    run = a_line("mnli", **changes)
    model_card.finetuned_card(run, "bert").save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md").data
    assert read.to_dict() == model_card.finetuned_card_data(run).to_dict()
    values = {(r.dataset_split, r.metric_type): r.metric_value for r in read.eval_results}
    assert values == {(s, "accuracy"): v["accuracy"] for s, v in run["metrics"].items()}
    assert (read.language, read.pipeline_tag) == ("en", "text-classification")
    assert read.license == "unknown"


def test_official_results_name_the_hubs_data_and_metrics():
    result = model_card.finetuned_card_data(a_line("stsb")).eval_results
    assert [r.metric_type for r in result] == ["pearsonr", "spearmanr"]
    for r in result:
        dataset = (r.dataset_type, r.dataset_name, r.dataset_config, r.dataset_split)
        assert dataset == ("nyu-mll/glue", "glue/stsb", "stsb", "validation")
        assert "validation split" in r.metric_name


@pytest.mark.parametrize("run", [a_line("mnli", **REDUCED), a_line("demo-order")])
def test_reduced_data_are_never_called_glue(run):
    made = model_card.finetuned_card(run, "bert")
    assert "glue" not in str(made).replace(COMMAND, "").lower()
    assert made.data.datasets is None
    assert {r.dataset_name for r in made.data.eval_results} == {run["dataset"]}
    assert run["dataset"] in made.text


WARNINGS = {
    "LEARNED NOTHING": {"collapsed": True},
    "Not pretrained": {"random_weights": True},
    "Not the official data": {"official": False, "dataset": "rte (9k)"},
}


@pytest.mark.parametrize("warning", WARNINGS)
def test_what_a_reader_must_know_stands_before_any_score(warning):
    text = model_card.finetuned_card(a_line(**WARNINGS[warning]), "bert").text
    assert text.index(warning) < text.index("## Scores")
    assert not any(other in text for other in WARNINGS if other != warning)
    assert not any(other in model_card.finetuned_card(a_line(), "bert").text for other in WARNINGS)


def test_the_card_says_all_of_the_line():
    text = model_card.finetuned_card(a_line("mnli", tokenizer="some/tokenizer"), "bert").text
    for printed in (
        "3e-05", "cosine", "0.06", "0.02", "bf16", "98.76", "2.99", "5.98", "12.3 M", COMMAND,
        "some/tokenizer", "seed 3", "0 entailment, 1 neutral, 2 contradiction",
        "| validation_matched | 1,000 | 28.6 |", "| validation_mismatched | 1,000 | 37.7 |",
        "validation split", "Apache-2.0",
    ):  # fmt: skip
        assert printed in text
    for split, score in (("matched", "12.3"), ("mismatched", "22.3")):
        assert f"| validation_{split}, majority baseline | 1,000 | {score} |" in text


def test_only_a_model_of_the_hub_is_a_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = "google-bert/bert-base-uncased"
    assert model_card.finetuned_card_data(a_line()).base_model == hub
    assert model_card.finetuned_card_data(a_line(random_weights=True)).base_model is None
    Path(hub).mkdir(parents=True)  # what transformers would read instead
    assert model_card.finetuned_card_data(a_line()).base_model is None
    assert f"`{hub}`" in model_card.finetuned_card(a_line(), "bert").text


def test_a_saved_folder_holds_model_card_and_a_clean_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer("good film", truncation=True, max_length=3, padding="max_length")
    save_with_card(str(tmp_path / "new/tuned"), a_model(), tokenizer, a_line())
    names = {path.name for path in (tmp_path / "new/tuned").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    backend = json.loads((tmp_path / "new/tuned/tokenizer.json").read_text())
    assert (backend["truncation"], backend["padding"]) == (None, None)


def test_a_save_that_fails_leaves_nothing_and_the_next_deletes_what_a_killed_one_left(tmp_path):
    broken = Mock(save_pretrained=Mock(side_effect=OSError("No space left on device")))
    save = partial(save_with_card, str(tmp_path / "tuned"), a_model(), broken, a_line())
    refused(save, "save must", "No space")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f".tuned{UNFINISHED}x").mkdir()
    saved(tmp_path, "rte")
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]
