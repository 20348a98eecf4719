"""The fine-tuning command: what a run learns, records, writes and refuses."""

import itertools
import json
import math
import shlex
import shutil
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
from transformers import AutoModel

import roformer
from finetune import glue
from finetune.data import epoch_batches
from finetune.metrics import compute_metrics
from finetune.models import load_config_and_tokenizer, load_model
from finetune.results import RUN_KEY, prediction_file, read_predictions, read_results
from finetune.run_info import format_result
from finetune.shared_head import ENCODER
from finetune.tasks import TASKS
from launched_runs import NO_DROPOUT, TORCHRUN
from tiny import command, refused
from tiny_glue import glue_run, predictions_of, run_settings, tiny_model, write_mnli, write_split


def test_micro_batches_of_few_tokens_give_the_outcome_of_whole_batches(folder):
    tiny_model(folder / "model", "roformer", **NO_DROPOUT)
    logits = []
    for tokens in (16384, 40, 1):
        # clipped gradients would be alike whatever the loss is divided by
        run = run_settings(folder, "stsb", epochs=2, clip_norm=1e9, micro_batch_tokens=tokens)
        logits.append(predictions_of(run, glue_run(run))[1])
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)
    np.testing.assert_allclose(logits[2], logits[0], atol=2e-5)


def test_a_lack_of_memory_is_one_line_before_the_first_step(folder, monkeypatch):
    head = roformer.RoFormerForSequenceClassification
    monkeypatch.setattr(head, "forward", lambda *args, **inputs: torch.empty(2**60))
    monkeypatch.setattr(glue, "check_forward", lambda *args: None)
    monkeypatch.setattr(glue, "set_learning_rate", None)  # a step would call it
    refused(lambda: glue_run(run_settings(folder)), "micro_batch_tokens")


def test_no_more_memory_is_tried_than_a_step_needs(folder, monkeypatch):
    rows = []
    monkeypatch.setattr(glue, "compute_gradients", lambda *args: rows.append(len(args[2])))
    asked, task = run_settings(folder), TASKS["sst2"]
    data = glue.load_data(asked, task, load_config_and_tokenizer(asked, task)[1])
    model, accelerator = torch.nn.Linear(1, 1), SimpleNamespace(num_processes=1)
    glue.check_memory(model, data["train"], 16, 16384, accelerator)
    assert rows == [16]


def test_a_run_says_how_much_its_length_cuts_off(folder, capsys):
    texts = ["good film", "good " * 20, "bad day", "bad " * 30]  # and [CLS], [SEP]
    for split in ("train", "validation"):
        write_split(folder / "glue", "sst2", split, {"sentence": texts, "label": [1, 1, 0, 0]})
    line = glue_run(run_settings(folder, length=12))
    cut = {"texts": 0.5, "tokens": round((22 - 12 + 32 - 12) / (4 + 22 + 4 + 32), 4)}
    assert line["truncation"] == {"train": cut, "validation": cut}
    assert "train: 50.0% of the texts are longer than 12 tokens" in capsys.readouterr().out
    assert glue_run(run_settings(folder))["truncation"]["train"]["tokens"] == 0


@pytest.mark.parametrize(
    ("kind", "task"), [("roformer", "stsb"), ("roformer", "sst2"), ("bert", "sst2")]
)
def test_the_outcome_is_that_of_transformers_trainer(kind, task, folder):
    """Schedule, decay, clipping, loss and optimiser of two loops: logits after six epochs."""
    tiny_model(folder / "model", kind, **NO_DROPOUT)
    protocol = {"epochs": 6, "learning_rate": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5}
    protocol["warmup_share"] = 0.07  # of 60 or 18 steps: no whole number
    # the last batches are smaller
    asked = run_settings(folder, task, seed=3, batch_size=20, **protocol)
    result = glue_run(asked)
    labels, ours = predictions_of(asked, result)
    # our score follows from the saved predictions and the labels of the data's file
    file = parquet.read_table(folder / f"glue/{task}/validation.parquet")
    assert labels.tolist() == file["label"].to_pylist()
    answers = ours[:, 0] if task == "stsb" else ours.argmax(axis=1)
    assert result["metrics"]["validation"] == compute_metrics(TASKS[task], answers, labels)
    assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert task == "stsb" or result["headline"] > result["majority"] + 0.3
    config, tokenizer = load_config_and_tokenizer(asked, TASKS[task])
    data = glue.load_data(asked, TASKS[task], tokenizer)
    model, train = load_model(asked, config), data["train"]
    batches = [
        train.batch(rows)
        for epoch in range(asked.epochs)
        for rows in epoch_batches(train.lengths, asked.batch_size, asked.seed, epoch)
    ]
    told = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=1,  # which has the batches of all six
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        learning_rate=asked.learning_rate,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.clip_norm,
        warmup_steps=asked.warmup_share,  # below 1: a share
        lr_scheduler_type=asked.schedule,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    one = lambda rows: rows[0]  # noqa: E731
    transformers.Trainer(model, told, data_collator=one, train_dataset=batches).train()
    everything = data["validation"].batch(np.arange(len(data["validation"])))
    everything.pop("labels")
    with torch.no_grad():
        theirs = model.eval()(**everything).logits
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)


def test_a_line_says_all_that_made_it(folder):
    asked = run_settings(folder, "mnli", seed=2)
    result = glue_run(asked)
    (line,) = read_results(asked.output)
    assert line == json.loads(json.dumps(result))
    assert all(line[name] == getattr(asked, name) for name in RUN_KEY)
    assert (line["dataset"], line["official"]) == ("mnli (9)", False)
    assert line["model_type"] == "roformer"
    assert list(line["metrics"]) == ["validation_matched", "validation_mismatched"]
    assert line["majority"] == pytest.approx(2 / 3)
    assert line["rows"] == dict.fromkeys(("train", *line["metrics"]), 9)
    assert line["settings"] == vars(asked)
    rest = {"loss", "seconds", "parameters", "versions", "device", "precision", "processes"}
    assert rest <= set(line)


def test_a_diverged_run_is_kept_and_the_control_never_sees_its_weights(folder):
    file = folder / "model" / "model.safetensors"
    save_file({k: v * float("nan") for k, v in load_file(file).items()}, file, {"format": "pt"})
    asked = run_settings(folder)
    with pytest.raises(SystemExit) as ended:
        glue.main(asked)
    assert ended.value.code == 1
    (line,) = read_results(asked.output)
    assert (line["status"], line["headline"]) == ("diverged", None)
    assert glue_run(replace(asked, random_weights=True))["status"] == "done"


@pytest.mark.parametrize(("first", "status"), [(True, "done"), (False, "diverged")])
def test_fp16_leaves_a_batch_out_and_ends_where_all_overflow(first, status, folder, monkeypatch):
    whole, calls = glue.loss_sum, itertools.count()

    def overflows(*given):
        return whole(*given) * (torch.inf if not (first and next(calls)) else 1.0)

    monkeypatch.setattr(glue, "loss_sum", overflows)
    run = run_settings(folder, epochs=9)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as in fp16, which is for GPUs
    line = glue.run(run, accelerator)
    (kept,) = read_results(run.output)
    assert line["status"] == kept["status"] == status
    assert first == (math.isfinite(line.get("loss", math.nan)))


def test_sharded_weights_are_not_saved_by_halves(folder, monkeypatch):
    sharded = SimpleNamespace(value="FSDP")
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: sharded))
    run = run_settings(folder, save=str(folder / "tuned"))
    refused(lambda: glue.run(run, Accelerator(cpu=True)), "save must", "got FSDP")


def test_segments_are_asked_for_where_the_model_has_them(folder):
    file = folder / "model" / "tokenizer_config.json"
    said = json.loads(file.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    file.write_text(json.dumps(said))
    _, tokenizer = load_config_and_tokenizer(run_settings(folder, "stsb"), TASKS["stsb"])
    assert "token_type_ids" in tokenizer.model_input_names


@pytest.mark.parametrize(
    ("damaged", "given", "rule"),
    [
        ("model.safetensors", {}, "model must be usable"),
        ("tokenizer.json", {}, "tokenizer /"),
        ("config.json", {}, "model must be usable"),
        (None, {"model": "empty"}, "model empty must"),
        (None, {"model": "bert"}, "model must"),
        (None, {"model": "hub/bert"}, "no connection to the hub"),
        (None, {"tokenizer": "hub/bert"}, "no connection to the hub"),
        (None, {"tokenizer": "empty"}, "special tokens alone"),
        (None, {"attention": "imagined"}, "imagined"),
        (None, {"task": "rte"}, "glue_dir must"),
        (None, {"save": "model"}, "save must be new"),
        (None, {"save": "file/x"}, "save must be a folder"),
        (None, {"output": "file/x.jsonl"}, "output must be a folder"),
        (None, {"output": "rows.csv"}, "output must be a .jsonl file"),
        ("decoder", {"pooling": "first"}, "pooling must not be first for a decoder"),
    ],
)
def test_impossible_runs_are_one_line_and_leave_nothing(folder, damaged, given, rule, monkeypatch):
    monkeypatch.chdir(folder)
    Path("empty").mkdir()
    Path("empty/tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    Path("file").touch()
    tiny_model(folder / "bert", "bert")
    shutil.copy(folder / "model" / "config.json", folder / "bert")  # says RoFormer
    if damaged == "decoder":
        roformer.RoFormerConfig.from_pretrained("model", is_decoder=True).save_pretrained("model")
    elif damaged:
        (folder / "model" / damaged).write_text("{}")
    refused(lambda: glue_run(run_settings(folder, **given)), rule)
    assert not (folder / "results.jsonl").exists()


def test_two_processes_score_each_example_once_and_match_one(folder):
    """41 training and 19 validation rows: the last batches leave one process without a row."""
    tiny_model(folder / "model", "roformer", **NO_DROPOUT)
    asked = run_settings(folder, "stsb", epochs=2, batch_size=8, learning_rate=1e-3)
    one = glue_run(asked)
    flags = [f"--{k}={v}" for k, v in vars(asked).items() if v is not None and v is not False]
    command(*TORCHRUN, "finetune/glue.py", *flags, ACCELERATE_USE_CPU="true")
    two = read_results(asked.output)[-1]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert " torchrun --nproc_per_node 2 finetune/glue.py " in two["command"]
    assert Path(asked.output).read_text().count("\n") == 2
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["metrics"]["validation"] == pytest.approx(one["metrics"]["validation"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task, row in TASKS.items() if row.is_glue][:-1])
def test_a_tiny_model_runs_on_every_task_and_only_whole_data_are_official(real_data, folder, task):
    reduced = task in ("mnli", "qnli", "qqp")
    data = folder / "real"
    data.mkdir()
    (data / task).symlink_to(real_data / ("glue_reduced" if reduced else "glue") / task)
    (data / "ax").symlink_to(real_data / "glue" / "ax")
    test = not reduced or task == "mnli"  # AX
    asked = run_settings(folder, task, glue_dir=str(data), batch_size=64, test=test)
    result = glue_run(asked)
    assert result["status"] == "done"
    assert result["official"] is not reduced
    assert result["dataset"] == (f"{task} (9k)" if reduced else task)
    if test:
        split, splits = ("ax", TASKS["ax"].splits) if reduced else ("test", TASKS[task].splits)
        labels, logits = predictions_of(asked, result, split)
        assert len(logits) == splits["test"]
        assert set(labels) == {-1}


def test_a_run_is_made_again_bit_for_bit_by_its_command(folder):
    asked = run_settings(folder, "stsb", epochs=2, learning_rate=1e-3, seed=3)
    first = glue_run(asked)
    threads, program, *words = shlex.split(first["command"])
    assert threads == f"OMP_NUM_THREADS={torch.get_num_threads()}"
    script = Path(sys.executable).parent / program
    again = folder / "again" / "results.jsonl"
    command(script, *words, "--output", again, **dict([threads.split("=")]))
    (second,) = read_results(str(again))
    made = ("losses", "metrics", "headline", "command")
    assert {name: second[name] for name in made} == {name: first[name] for name in made}
    files = (prediction_file(str(path), first, "validation") for path in (asked.output, again))
    assert len({file.read_bytes() for file in files}) == 1
    assert glue_run(replace(asked, seed=4))["losses"] != first["losses"]


def test_a_run_that_learned_one_answer_is_marked(folder):
    texts = ["good film", "bad book"] * 16
    write_split(folder / "glue", "sst2", "train", {"sentence": texts, "label": [1] * 32})
    asked = run_settings(folder, epochs=6)
    result = glue_run(asked)
    labels, logits = predictions_of(asked, result)
    assert set(logits.argmax(axis=1)) == {1}
    assert result["collapsed"]
    # the majority class is that of the training rows, whatever the scored rows have most of
    assert result["majority"] == result["headline"] == np.mean(labels == 1) < 0.5
    assert "one answer for every row" in format_result(result)


@pytest.mark.parametrize("tests", [("test_matched", "test_mismatched"), ()])
def test_existing_test_splits_and_ax_are_predicted_when_asked_for(folder, tests):
    write_mnli(folder / "glue", tests)
    pair = {"premise": ["good"] * 9, "hypothesis": ["bad film"] * 9}
    write_split(folder / "glue", "ax", "test", pair)
    asked = run_settings(folder, "mnli", test=True)
    result = glue_run(asked)
    written = prediction_file(asked.output, result, "any").parent
    validation = {"validation_matched", "validation_mismatched"}
    assert {file.stem for file in written.iterdir()} == {*validation, *tests, "ax"}
    for file in written.iterdir():
        labels, logits = read_predictions(file)
        assert logits.shape == (9, 3)
        assert (labels[0] == -1) == (file.stem not in validation)
    glue_run(replace(asked, test=False))  # the same run: its earlier predictions are stale
    assert {file.stem for file in written.iterdir()} == validation


@pytest.mark.parametrize("pooling", ["own", "mean"])
def test_a_run_may_start_from_a_model_fine_tuned_on_mnli(folder, pooling):
    """Its encoder is kept, and the projection to another number of classes is new."""
    tuned = folder / "tuned"
    glue_run(run_settings(folder, "mnli", epochs=2, save=str(tuned), pooling=pooling))
    encoder = tuned if pooling == "own" else tuned / ENCODER
    asked = {"model": str(encoder), "tokenizer": str(tuned), "pooling": pooling}
    run = run_settings(folder, "rte", **asked)
    model = load_model(run, load_config_and_tokenizer(run, TASKS["rte"])[0])
    weights, expected = model.state_dict(), AutoModel.from_pretrained(encoder).state_dict()
    prefix = "roformer." if pooling == "own" else "encoder."
    assert all(weights[prefix + name].equal(x) for name, x in expected.items())
    (projection,) = (x for name, x in weights.items() if name.endswith("out_proj.weight"))
    assert len(projection) == 2


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "distilbert", "electra"])
def test_other_encoders_need_no_branch(folder, kind):
    tiny_model(folder / "model", kind)
    result = glue_run(run_settings(folder, "stsb", learning_rate=1e-3))
    assert (result["status"], result["model_type"]) == ("done", kind)
    refused(lambda: glue_run(run_settings(folder, "stsb", attention="unpadded")), "attention must")


def test_a_model_without_segments_reads_pairs(folder):
    tiny_model(folder / "model", "roformer", type_vocab_size=0)
    assert glue_run(run_settings(folder, "stsb"))["status"] == "done"


def test_a_model_that_cannot_take_its_tokenizers_words_is_refused(folder):
    """A RoBERTa of 32 rows has positions for 30 tokens: its configuration does not say so."""
    tiny_model(folder / "model", "roberta", max_position_embeddings=32)
    long, short = ({"sentence": [text, "bad"], "label": [1, 0]} for text in ("good " * 40, "good"))
    write_split(folder / "glue", "sst2", "validation", long)
    for train in (long, short):  # seen before training, not after
        write_split(folder / "glue", "sst2", "train", train)
        refused(lambda: glue_run(run_settings(folder)), "model must take")
    assert not (folder / "results.jsonl").exists()


def test_dropout_of_a_step_follows_from_seed_step_and_rank(folder, monkeypatch):
    """And dropout is on: with other draws the losses are others."""
    seeds, losses, seed_torch, derive = [], [], torch.manual_seed, glue.derive_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_torch(seed))
    for rank in (0, 1):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        asked = run_settings(folder, seed=5, output=str(folder / f"{rank}.jsonl"))
        losses.append(glue_run(asked)["losses"])
        assert seeds[-12:] == [derive(5, step, rank) for step in range(12)]
    monkeypatch.setattr(glue, "derive_seed", lambda *key: derive(*key, 1))
    again = glue_run(run_settings(folder, seed=5, output=str(folder / "2.jsonl")))["losses"]
    assert again != losses[1]
