import itertools
import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score
from torch.utils.data import DataLoader
from transformers import pipeline

import roformer
from finetune import glue
from finetune.data import epoch_batches
from finetune.results import RUN_KEY, prediction_file, read_predictions, read_results
from finetune.run_info import format_result
from finetune.settings import GlueSettings
from finetune.tasks import TASKS
from tiny import ROOT
from tiny_glue import (
    PAIR,
    other_model,
    sentences,
    tiny_model,
    write_mnli,
    write_split,
    write_sst2,
    write_stsb,
)
from train.settings import InputError

RECIPE = {"length": 32, "batch_size": 16, "epochs": 6, "learning_rate": 5e-3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def settings(folder: Path, task: str = "sst2", **changes) -> GlueSettings:
    given = {**RECIPE, "glue_dir": str(folder / "glue"), "output": str(folder / "results.jsonl")}
    given["cache"] = str(folder / "tokens")
    return GlueSettings(**{**given, "model": str(folder / "model"), "task": task, **changes})


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_tiny_model_learns_a_separable_task(tmp_path, kind):
    """The score is recomputed from the saved predictions and the labels of the data's file."""
    torch.manual_seed(0)
    tiny_model(tmp_path / "model", kind)
    write_sst2(tmp_path / "glue")
    asked = settings(tmp_path, save=str(tmp_path / "tuned"))
    result = glue.main(asked)
    labels, logits = read_predictions(prediction_file(asked.output, result, "validation"))
    table = parquet.read_table(tmp_path / "glue/sst2/validation.parquet")
    assert labels.tolist() == table["label"].to_pylist()
    accuracy = accuracy_score(labels, logits.argmax(axis=1))
    assert result["metrics"]["validation"] == {"accuracy": accuracy}
    assert result["headline"] > result["majority"] + 0.3
    assert result["losses"][-1] < 0.8 * result["losses"][0]
    classify = pipeline("text-classification", str(tmp_path / "tuned"))
    answers = classify(["a good day", "a bad day"])
    assert [answer["label"] for answer in answers] == ["positive", "negative"]


def test_micro_batches_of_few_tokens_give_the_outcome_of_whole_batches(tmp_path):
    """Gradients are accumulated, and evaluation is split, without changing more than rounding."""
    tiny_model(tmp_path / "model", "roformer", **NO_DROPOUT)
    write_stsb(tmp_path / "glue", train=100)
    logits = []
    for tokens in (16384, 40, 1):
        run = settings(tmp_path, "stsb", epochs=2, micro_batch_tokens=tokens)
        run = replace(run, output=str(tmp_path / f"{tokens}" / "results.jsonl"))
        line = glue.main(run)
        logits.append(read_predictions(prediction_file(run.output, line, "validation"))[1])
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)
    np.testing.assert_allclose(logits[2], logits[0], atol=2e-5)


def test_a_lack_of_memory_is_one_line_before_the_first_step(tmp_path, monkeypatch):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue")

    def allocate(*args, **inputs):
        torch.empty(2**60)

    monkeypatch.setattr(roformer.RoFormerForSequenceClassification, "forward", allocate)
    monkeypatch.setattr(glue, "check_forward", lambda *args: None)
    monkeypatch.setattr(glue, "set_learning_rate", None)  # a step would call it
    with pytest.raises(InputError, match="micro_batch_tokens"):
        glue.main(settings(tmp_path))


def test_a_run_says_how_much_its_length_cuts_off(tmp_path, capsys):
    tiny_model(tmp_path / "model", "roformer")
    texts = ["good film", "good " * 20, "bad day", "bad " * 30]  # and [CLS], [SEP]
    for split in ("train", "validation"):
        write_split(tmp_path / "glue", "sst2", split, {"sentence": texts, "label": [1, 1, 0, 0]})
    line = glue.main(settings(tmp_path, length=12, epochs=1))
    cut = {"texts": 0.5, "tokens": round((22 - 12 + 32 - 12) / (4 + 22 + 4 + 32), 4)}
    assert line["truncation"] == {"train": cut, "validation": cut}
    assert "train: 50.0% of the texts are longer than 12 tokens" in capsys.readouterr().out
    assert glue.main(settings(tmp_path, length=32, epochs=1))["truncation"]["train"]["tokens"] == 0


class InOurOrder(transformers.Trainer):
    """transformers' own loop, given the rows in our order, one epoch after the other."""

    def get_train_dataloader(self) -> DataLoader:
        asked, rows = self.asked, self.train_dataset
        names = ("input_ids", "token_type_ids", "labels")
        lists = [{k: rows.batch(np.array([i]))[k][0] for k in names} for i in range(len(rows))]
        epochs = iter(range(asked.epochs))

        class Order:
            def __iter__(self):
                order = asked.batch_size, asked.seed, next(epochs)
                return (batch.tolist() for batch in epoch_batches(rows.lengths, *order))

            def __len__(self) -> int:
                return -(-len(rows) // asked.batch_size)

        return DataLoader(lists, batch_sampler=Order(), collate_fn=self.data_collator)


@pytest.mark.parametrize(
    ("kind", "task", "write"),
    [
        ("roformer", "stsb", write_stsb),
        ("roformer", "sst2", write_sst2),
        ("bert", "sst2", write_sst2),
    ],
)
def test_the_outcome_is_that_of_transformers_trainer(kind, task, write, tmp_path):
    """Schedule, decay, clipping, loss and optimiser of two loops: logits after six epochs."""
    tiny_model(tmp_path / "model", kind, **NO_DROPOUT)
    write(tmp_path / "glue", train=250)
    asked = settings(tmp_path, task, learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)
    line = glue.main(asked)
    ours = read_predictions(prediction_file(asked.output, line, "validation"))[1]
    config, tokenizer = glue.load_config_and_tokenizer(asked, TASKS[task])
    data = glue.load_data(asked, TASKS[task], tokenizer)
    model = glue.load_model(asked, config)
    steps = asked.epochs * -(-len(data["train"]) // asked.batch_size)
    told = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        num_train_epochs=asked.epochs,
        learning_rate=asked.learning_rate,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.clip_norm,
        adam_epsilon=1e-8,
        warmup_steps=round(asked.warmup_share * steps),
        lr_scheduler_type=asked.schedule,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = InOurOrder(model, told, data_collator=collate, train_dataset=data["train"])
    trainer.asked = asked
    trainer.train()
    everything = data["validation"].batch(np.arange(len(data["validation"])))
    everything.pop("labels")
    with torch.no_grad():
        theirs = model.eval()(**everything).logits
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)
    assert np.ptp(ours) > 0.1  # it has learned something to agree on


def test_a_line_says_all_that_made_it(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_mnli(tmp_path / "glue")
    asked = settings(tmp_path, "mnli", epochs=1, seed=2)
    result = glue.main(asked)
    (line,) = read_results(asked.output)
    assert line == json.loads(json.dumps(result))
    assert {name: line[name] for name in RUN_KEY} == {
        name: getattr(asked, name) for name in RUN_KEY
    }
    assert (line["label"], line["official"], line["model_type"]) == ("mnli (9)", False, "roformer")
    assert list(line["metrics"]) == ["validation_matched", "validation_mismatched"]
    assert line["majority"] == pytest.approx(2 / 3)
    assert line["rows"] == dict.fromkeys(("train", *line["metrics"]), 9)
    assert line["settings"] == vars(asked)
    rest = {"loss", "seconds", "parameters", "versions", "device", "precision", "processes"}
    assert rest <= set(line)


def test_the_control_never_sees_the_weights_and_a_diverged_run_is_kept(tmp_path):
    """Broken weights make a run diverge; the control with the same folder goes through."""
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=16)
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v * float("nan") for k, v in load_file(file).items()}, file, {"format": "pt"})
    assert glue.main(settings(tmp_path, epochs=1))["status"] == "diverged"
    assert glue.main(settings(tmp_path, epochs=1, random_weights=True))["status"] == "done"


def with_loss_scaler() -> Accelerator:
    """As in fp16, which is for GPUs, on a CPU."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


@pytest.mark.parametrize(("first", "status"), [(True, "done"), (False, "diverged")])
def test_fp16_leaves_a_batch_out_and_ends_where_all_overflow(first, status, tmp_path, monkeypatch):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue")
    whole, calls = glue.loss_sum, itertools.count()

    def overflows(*given):
        return whole(*given) * (torch.inf if not (first and next(calls)) else 1.0)

    monkeypatch.setattr(glue, "loss_sum", overflows)
    line = glue.main(settings(tmp_path, epochs=9), with_loss_scaler())
    assert line["status"] == status
    (kept,) = read_results(str(tmp_path / "results.jsonl"))
    assert kept["status"] == status
    assert first == (math.isfinite(line.get("loss", math.nan)))


def test_sharded_weights_are_not_saved_by_halves(tmp_path, monkeypatch):
    sharded = SimpleNamespace(value="FSDP")
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: sharded))
    with pytest.raises(InputError, match="save must .* got FSDP"):
        glue.main(settings(tmp_path, save=str(tmp_path / "tuned")), Accelerator(cpu=True))


def test_weights_of_another_architecture_are_refused(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    tiny_model(tmp_path / "other", "bert")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model" / "model.safetensors")
    write_sst2(tmp_path / "glue", train=16)
    with pytest.raises(InputError, match="model must hold the weights"):
        glue.main(settings(tmp_path))


def test_segments_are_asked_for_where_the_model_has_them(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    folder = tmp_path / "model" / "tokenizer_config.json"
    said = json.loads(folder.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    folder.write_text(json.dumps(said))
    _, tokenizer = glue.load_config_and_tokenizer(settings(tmp_path, "stsb"), TASKS["stsb"])
    assert "token_type_ids" in tokenizer.model_input_names


@pytest.mark.parametrize(
    ("damaged", "changes", "key"),
    [
        ("model.safetensors", {}, "model"),
        ("tokenizer.json", {}, "tokenizer"),
        ("config.json", {}, "model"),
        (None, {"model": "empty"}, "model"),
        (None, {"attention": "imagined"}, "attention"),
        (None, {"task": "rte"}, "glue_dir"),
        (None, {"save": "model"}, "save"),
        (None, {"output": "file/x"}, "output"),
    ],
)
def test_a_run_that_cannot_be_made_is_one_line_and_leaves_nothing(
    tmp_path, damaged, changes, key, monkeypatch
):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=16)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    if damaged:
        (tmp_path / "model" / damaged).write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{key} must [^\n]*$"):
        glue.main(settings(tmp_path, **changes))
    assert not (tmp_path / "results.jsonl").exists()


def test_two_processes_score_each_example_once_and_match_one(tmp_path):
    """41 training and 19 validation rows: the last batches leave one process without a row."""
    tiny_model(tmp_path / "model", "roformer", **NO_DROPOUT)
    write_stsb(tmp_path / "glue")
    asked = settings(tmp_path, "stsb", epochs=2, batch_size=8, learning_rate=1e-3)
    one = glue.main(asked)
    flags = [f"--{k}={v}" for k, v in vars(asked).items() if v is not None and v is not False]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "finetune" / "glue.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    two = read_results(asked.output)[-1]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert " torchrun --nproc_per_node 2 finetune/glue.py " in two["command"]
    assert Path(asked.output).read_text().count("\n") == 2
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["metrics"]["validation"] == pytest.approx(one["metrics"]["validation"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task, row in TASKS.items() if row.official][:-1])
def test_a_tiny_model_runs_on_every_task_and_only_whole_data_are_official(
    real_data, tmp_path, task
):
    reduced = task in ("mnli", "qnli", "qqp")
    tiny_model(tmp_path / "model", "roformer")
    (tmp_path / "glue").mkdir()
    source = real_data / ("glue_reduced" if reduced else "glue")
    (tmp_path / "glue" / task).symlink_to(source / task)
    (tmp_path / "glue" / "ax").symlink_to(real_data / "glue" / "ax")
    asked = settings(tmp_path, task, epochs=1, batch_size=64, test=True)
    result = glue.main(asked)
    assert result["status"] == "done"
    assert result["official"] is not reduced
    assert result["label"] == f"{task} (9k)" if reduced else task
    if not reduced or task == "mnli":
        split, splits = ("ax", TASKS["ax"].splits) if reduced else ("test", TASKS[task].splits)
        labels, logits = read_predictions(prediction_file(asked.output, result, split))
        assert len(logits) == splits["test"]
        assert set(labels) == {-1}


def test_a_run_is_made_again_bit_for_bit_by_its_command(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_stsb(tmp_path / "glue")
    asked = settings(tmp_path, "stsb", epochs=2, learning_rate=1e-3, seed=3)
    first = glue.main(asked)
    threads, *command = shlex.split(first["command"])
    assert threads == f"OMP_NUM_THREADS={torch.get_num_threads()}"
    command[0] = str(Path(sys.executable).parent / command[0])
    command[command.index("finetune/glue.py")] = str(ROOT / "finetune" / "glue.py")
    again = tmp_path / "again" / "results.jsonl"
    environment = {**os.environ, **dict([threads.split("=")])}
    done = subprocess.run(
        [*command, "--output", str(again)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (second,) = read_results(str(again))
    made = ("losses", "metrics", "headline", "command")
    assert {name: second[name] for name in made} == {name: first[name] for name in made}
    files = (prediction_file(str(path), first, "validation") for path in (asked.output, again))
    assert len({file.read_bytes() for file in files}) == 1
    assert glue.main(replace(asked, seed=4))["losses"] != first["losses"]


def test_a_run_that_learned_one_answer_is_marked(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=32)
    texts, _ = sentences(32, 0)
    write_split(tmp_path / "glue", "sst2", "train", {"sentence": texts, "label": [1] * 32})
    asked = settings(tmp_path)
    result = glue.main(asked)
    _, logits = read_predictions(prediction_file(asked.output, result, "validation"))
    assert set(logits.argmax(axis=1)) == {1}
    assert result["collapsed"]
    assert "one answer for every row" in format_result(result)


def test_a_rate_that_blows_up_ends_with_code_1_and_a_line(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue")
    asked = settings(tmp_path, learning_rate=1e30, clip_norm=1e30)
    with pytest.raises(SystemExit) as ended:
        glue.command(asked)
    assert ended.value.code == 1
    (line,) = read_results(asked.output)
    assert (line["status"], line["headline"]) == ("diverged", None)


@pytest.mark.parametrize("tests", [("test_matched", "test_mismatched"), ()])
def test_existing_test_splits_and_ax_are_predicted_when_asked_for(tmp_path, tests):
    tiny_model(tmp_path / "model", "roformer")
    write_mnli(tmp_path / "glue", tests)
    write_split(tmp_path / "glue", "ax", "test", PAIR)
    asked = settings(tmp_path, "mnli", epochs=1, test=True)
    result = glue.main(asked)
    folder = prediction_file(asked.output, result, "any").parent
    validation = {"validation_matched", "validation_mismatched"}
    assert {file.stem for file in folder.iterdir()} == {*validation, *tests, "ax"}
    for file in folder.iterdir():
        labels, logits = read_predictions(file)
        assert logits.shape == (9, 3)
        assert (labels[0] == -1) == (file.stem not in validation)
    glue.main(replace(asked, test=False))  # the same run: its earlier predictions are stale
    assert {file.stem for file in folder.iterdir()} == validation


def test_rte_begins_from_the_model_fine_tuned_on_mnli(tmp_path):
    """Its encoder and the layers of its head that fit; the last layer is new."""
    tiny_model(tmp_path / "model", "roformer")
    write_mnli(tmp_path / "glue")
    asked = settings(tmp_path, "mnli", epochs=2, save=str(tmp_path / "tuned"))
    glue.main(asked)
    tuned = load_file(tmp_path / "tuned" / "model.safetensors")
    run = settings(tmp_path, "rte", mnli=str(tmp_path / "tuned"))
    config, _ = glue.load_config_and_tokenizer(run, TASKS["rte"])
    begun = glue.load_model(run, config).state_dict()
    same = {name for name in tuned if tuned[name].shape == begun[name].shape}
    assert set(tuned) - same == {"classifier.out_proj.weight", "classifier.out_proj.bias"}
    assert all(begun[name].equal(tuned[name]) for name in same)
    plain = glue.load_model(replace(run, mnli=None), config).state_dict()
    word = "roformer.embeddings.word_embeddings.weight"
    assert not plain[word].equal(begun[word])


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "distilbert", "electra"])
def test_other_encoders_need_no_branch(tmp_path, kind):
    other_model(tmp_path / "model", kind)
    write_stsb(tmp_path / "glue")
    result = glue.main(settings(tmp_path, "stsb", epochs=1, learning_rate=1e-3))
    assert (result["status"], result["model_type"]) == ("done", kind)


def test_a_model_that_cannot_take_its_tokenizers_words_is_refused(tmp_path):
    """A RoBERTa of 32 rows has positions for 30 tokens: its configuration does not say so."""
    other_model(tmp_path / "model", "roberta", max_position_embeddings=32)
    long, short = ({"sentence": [text, "bad"], "label": [1, 0]} for text in ("good " * 40, "good"))
    write_split(tmp_path / "glue", "sst2", "validation", long)
    for train in (long, short):  # seen before training, not after
        write_split(tmp_path / "glue", "sst2", "train", train)
        with pytest.raises(InputError, match="model must take"):
            glue.main(settings(tmp_path, length=32))
    assert not (tmp_path / "results.jsonl").exists()
