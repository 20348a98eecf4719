import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import pipeline

from finetune import glue, grid
from finetune.results import KEY, append_result, read_results
from finetune.settings import GlueSettings, GridSettings
from tiny_glue import tiny_model, tiny_tokenizer, write_split, write_sst2, write_stsb
from train import counter
from train.settings import InputError

ROOT = Path(__file__).parent.parent
RECIPE = {"length": 32, "batch_size": 16, "epochs": 6, "learning_rate": 5e-3}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(folder: Path, task: str = "sst2", **changes) -> GlueSettings:
    given = {**RECIPE, "glue_dir": str(folder / "glue"), "output": str(folder / "results.jsonl")}
    return GlueSettings(**{**given, "model": str(folder / "model"), "task": task, **changes})


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_tiny_model_learns_a_separable_task(tmp_path, kind):
    torch.manual_seed(0)
    tiny_model(tmp_path / "model", kind)
    write_sst2(tmp_path / "glue")
    result = glue.main(settings(tmp_path, save=str(tmp_path / "tuned")))
    assert result["headline"] > result["majority"] + 0.3
    assert result["history"][-1]["loss"] < 0.8 * result["history"][0]["loss"]
    classify = pipeline("text-classification", str(tmp_path / "tuned"))
    assert [answer["label"] for answer in classify(["a good day", "a bad day"])] == [
        "positive",
        "negative",
    ]


def test_the_same_settings_give_the_same_numbers(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue")
    first, again, other = (glue.main(settings(tmp_path, epochs=2, seed=seed)) for seed in (3, 3, 4))
    assert first["history"] == again["history"]
    assert first["metrics"] == again["metrics"]
    assert first["loss"] != other["loss"]


def test_dropout_follows_from_seed_step_and_rank(tmp_path, monkeypatch):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=40)
    seeds, seed_torch = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_torch(seed))
    glue.main(settings(tmp_path, epochs=2, seed=5))
    assert seeds == [5, *(int(counter.bits(5, step, 0)) >> 1 for step in range(6))]


def test_a_line_says_all_that_made_it(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    for split in ("train", "validation_matched", "validation_mismatched"):
        pair = {"premise": ["good"] * 9, "hypothesis": ["bad film"] * 9, "label": [0, 1, 1] * 3}
        write_split(tmp_path / "glue", "mnli", split, pair)
    asked = settings(tmp_path, "mnli", epochs=1, seed=2)
    result = glue.main(asked)
    (line,) = read_results(asked.output)
    assert line == json.loads(json.dumps(result))
    assert {name: line[name] for name in KEY} == {name: getattr(asked, name) for name in KEY}
    assert line["label"] == "mnli (9)"
    assert not line["official"]
    assert line["model_type"] == "roformer"
    assert list(line["metrics"]) == ["validation_matched", "validation_mismatched"]
    assert line["majority"] == pytest.approx(2 / 3)
    assert line["rows"] == dict.fromkeys(("train", *line["metrics"]), 9)
    assert line["settings"]["warmup_share"] == asked.warmup_share
    rest = {"loss", "seconds", "parameters", "versions", "device", "precision", "processes"}
    assert rest <= set(line)


def test_the_control_never_sees_the_weights(tmp_path):
    """Broken weights stop a run; the control with the same folder goes through."""
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=16)
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v * float("nan") for k, v in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"^learning_rate must keep .* finite"):
        glue.main(settings(tmp_path, epochs=1))
    assert not (tmp_path / "results.jsonl").exists()
    assert glue.main(settings(tmp_path, epochs=1, random_weights=True))["random_weights"]


def test_weights_of_another_architecture_are_refused(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    tiny_model(tmp_path / "other", "bert")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model" / "model.safetensors")
    write_sst2(tmp_path / "glue", train=16)
    with pytest.raises(InputError, match="model must hold the weights of its"):
        glue.main(settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"model": "glue"}, "model must be a folder or hub id with a config.json"),
        ({"attention": "imagined"}, "model must be a folder or hub id with weights"),
        ({"task": "rte"}, "glue_dir must hold a folder rte"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line_and_leaves_nothing(tmp_path, changes, start):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=16)
    if "model" in changes:  # a folder that is there and holds no model
        changes = {"model": str(tmp_path / changes["model"])}
    with pytest.raises(InputError) as caught:
        glue.main(settings(tmp_path, **changes))
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "results.jsonl").exists()


def test_a_grid_makes_what_is_missing_and_goes_on_after_a_failure(tmp_path, capsys):
    tiny_model(tmp_path / "model", "roformer")
    write_sst2(tmp_path / "glue", train=32)
    recipe = {**RECIPE, "epochs": 1, "glue_dir": str(tmp_path / "glue")}
    recipe["output"] = str(tmp_path / "out" / "results.jsonl")
    models = [str(tmp_path / "gone"), str(tmp_path / "model")]
    ask = GridSettings(**recipe, models=models[1:], tasks=["sst2"], seeds=[0], random_control=True)
    grid.main(ask)
    assert [line["random_weights"] for line in read_results(ask.output)] == [False, True]
    more = GridSettings(**recipe, models=models, tasks=["sst2"], seeds=[0, 1], random_control=True)
    with pytest.raises(InputError, match="4 of 6 that failed"):
        grid.main(more)
    assert [line["seed"] for line in read_results(ask.output)] == [0, 0, 1, 1]
    assert "6 runs to make, 2 done already" in capsys.readouterr().out


def test_a_torn_line_is_warned_of_and_the_next_line_stands_alone(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    line = dict.fromkeys(KEY, 1)
    append_result(str(file), line)
    with file.open("a") as stream:
        stream.write('{"model": "x", "ta')
    assert read_results(str(file)) == [line]
    assert capsys.readouterr().err.count("line 2 is torn") == 1
    append_result(str(file), line)
    assert read_results(str(file)) == [line, line]


def test_two_processes_score_each_example_once_and_match_one(tmp_path):
    """41 training and 19 validation rows: the last batches leave one process without a row."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tiny_model(tmp_path / "model", "roformer", **still)
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
    assert len(read_results(asked.output)) == 2
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["metrics"]["validation"] == pytest.approx(one["metrics"]["validation"], abs=1e-3)


def test_the_command_ends_with_one_line_and_code_2(tmp_path):
    command = [sys.executable, str(ROOT / "finetune" / "glue.py"), "--model=x", "--task=colla"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: task must be one of cola")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_tiny_model_runs_on_real_rte(tmp_path):
    tiny_model(tmp_path / "model", "roformer")
    folder = str(Path(os.environ["ROFORMER_DATA"]) / "glue")
    result = glue.main(settings(tmp_path, "rte", glue_dir=folder, epochs=1))
    assert result["official"]
    assert result["label"] == "rte"
    assert result["rows"] == {"train": 2490, "validation": 277}


def test_the_tiny_tokenizer_marks_segments():
    assert tiny_tokenizer()("good", "bad")["token_type_ids"] == [0, 0, 0, 1, 1]
