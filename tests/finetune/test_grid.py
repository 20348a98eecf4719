"""Grids: no result is lost or made twice, whatever is killed; changed inputs are made again."""

import json
import math
import re
import signal
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import yaml

from finetune import grid, results
from finetune.results import prediction_file, read_results, run_key, run_lock
from finetune.run_info import hash_inputs
from finetune.settings import GridSettings
from launched_runs import LAUNCH, wait_for
from tiny import refused
from tiny_glue import RATE, RECIPE, run_paths, run_settings, tiny_model, tiny_tokenizer, write_sst2


def ask(folder: Path, **changes) -> GridSettings:
    values = {"models": [str(folder / "model")], "tasks": ["sst2"], "learning_rates": [RATE]}
    return GridSettings(**values | run_paths(folder) | RECIPE | changes)


@pytest.fixture
def in_process(monkeypatch):
    """Workers are threads: what is made does not depend on it, and processes take seconds."""
    workers = []

    def start_worker(worker, count):
        workers.append(ThreadPoolExecutor(1))
        return workers[-1]

    monkeypatch.setattr(grid, "start_worker", start_worker)
    yield
    for worker in workers:  # all have ended: Python warns of what killed processes leave
        with pytest.raises(RuntimeError, match="after shutdown"):
            worker.submit(print)


def command(settings: GridSettings) -> list[str]:
    """The README's command, in float32."""
    file = Path(settings.cache).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(asdict(settings)))
    launch = [*LAUNCH, "--quiet", "--mixed_precision", "no"]
    return [*launch, "-m", "finetune.grid", f"--config={file}"]


def lines_of(settings: GridSettings) -> list[dict]:
    """Every line as it stands in the file, doubled ones twice."""
    path = Path(settings.output)
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def descendants(process: subprocess.Popen, marker: str) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [child for child in found if marker in " ".join(child.cmdline())]


@pytest.mark.slow
def test_grids_killed_at_any_time_or_side_by_side_lose_and_double_no_run(folder, start):
    """Killed twice, a torn line behind, then two at once; an unbroken grid has the same results."""
    write_sst2(folder / "glue", train=400)
    settings = ask(folder, seeds=list(range(12)), workers=2, epochs=3)
    for _ in range(2):
        running = start(*command(settings))
        before = len(lines_of(settings))
        wait_for(lambda before=before: len(lines_of(settings)) > before)
        workers = descendants(running, "spawn_main")
        assert len(workers) == 2
        for process in descendants(running, "finetune.grid"):
            process.kill()  # the workers end by themselves
        running.wait()
        assert not psutil.wait_procs(workers, timeout=10)[1]
    left = 12 - len(lines_of(settings))
    assert 0 < left <= 10
    with open(settings.output, "a") as stream:
        stream.write('{"model": "x", "ta')
    before = (folder / "output").read_text()
    both = [start(*command(settings)) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    printed = (folder / "output").read_text().removeprefix(before)
    assert "ended in a torn line, cut off" in printed
    assert printed.count("accuracy") == left
    assert "made by another grid" in printed  # or they did not overlap
    lines = lines_of(settings)
    assert sorted(line["seed"] for line in lines) == list(range(12))
    unbroken = ask(folder, seeds=[0, 11], output=str(folder / "b" / "results.jsonl"), epochs=3)
    grid.main(unbroken)
    for line in lines_of(unbroken):
        (same,) = (x for x in lines if x["seed"] == line["seed"])
        assert (same["metrics"], same["losses"]) == (line["metrics"], line["losses"])
        files = (prediction_file(s.output, line, "validation") for s in (settings, unbroken))
        assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.usefixtures("in_process")
def test_a_killed_worker_fails_its_run_alone_and_a_grid_ends_with_its_launcher(folder, start):
    write_sst2(folder / "glue", train=300)
    settings = ask(folder, seeds=list(range(1000)), epochs=4)
    launcher = start(*command(settings))

    def statuses():
        return [line["status"] for line in lines_of(settings)]

    def kill_workers():  # again, if it had just finished its run
        with suppress(psutil.NoSuchProcess):  # one that was killed before and is a zombie
            for worker in descendants(launcher, "spawn_main"):
                worker.send_signal(signal.SIGKILL)
        return "failed" in statuses()

    wait_for(lambda: "done" in statuses())
    wait_for(kill_workers)
    wait_for(lambda: statuses()[-1] == "done")
    rest = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    assert not psutil.wait_procs(rest, timeout=20)[1]
    failed = next(line for line in lines_of(settings) if line["status"] == "failed")
    assert "its process died" in failed["error"]
    grid.main(replace(settings, seeds=[failed["seed"]]))  # makes the failed run
    assert statuses()[-1] == "done"


def test_a_worker_whose_process_died_gets_the_next_run_at_once(folder, monkeypatch):
    endless, dead, done = Future(), Future(), Future()
    dead.set_exception(BrokenProcessPool())
    done.set_result({})
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(grid.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(grid.torch, "get_num_threads", lambda: 6)
    # the second of two workers dies in its run and takes no other: a third is started for it
    outcomes = [[endless], [dead, BrokenProcessPool()], [done]]
    workers = iter([Mock(**{"submit.side_effect": found}) for found in outcomes])
    monkeypatch.setattr(grid, "start_worker", lambda *arguments: next(workers))

    def end_of_any(running, **options):
        busy.append(len(running))
        return wait(running, timeout=0.01, **options)

    busy: list[int] = []
    monkeypatch.setattr(grid, "wait", end_of_any)
    ended = grid.make_runs(grid.list_runs(ask(folder, seeds=[0, 1, 2])), workers=2)
    (dead_run, result), (next_run, _) = next(ended), next(ended)
    assert (dead_run.seed, next_run.seed, busy) == (1, 2, [2, 2])
    assert re.match("OMP_NUM_THREADS=3 accelerate .* --cpu ", result["command"])


def test_a_worker_makes_each_run_with_an_accelerator_of_its_own(folder, monkeypatch):
    # in fp16 it holds the loss scale, which the run before has changed
    made = Mock(return_value=None)
    monkeypatch.setattr(grid.glue, "run", made)
    for run in grid.list_runs(ask(folder, seeds=[0, 1])):
        grid.make_run(run, worker=0)
    assert len({id(call.args[1]) for call in made.call_args_list}) == 2


@pytest.mark.usefixtures("in_process")
def test_what_is_done_is_left_out_and_a_failing_run_does_not_stop_the_others(folder, capsys):
    grid.main(ask(folder, controls=True))
    more = ask(folder, seeds=[0, 1], controls=True, models=[f"{folder}/./model/"])
    (last,) = (run for run in grid.list_runs(more) if run.seed == 1 and not run.random_weights)
    broken = prediction_file(more.output, asdict(last), "validation")
    broken.mkdir(parents=True)  # where this run will want to write a file
    refused(lambda: grid.main(more), "got 1 of 2 that failed")
    printed = capsys.readouterr().out
    assert "runs: 2 to make, 2 done already" in printed
    score = r"accuracy \d+\.\d \(majority \d+\.\d.*\), \d+ s"
    last = rf"^\[2/2\] sst2 .*, random weights, .* seed 1: {score}; 0 min left$"
    assert re.search(last, printed, re.MULTILINE)
    runs = [x for x in read_results(more.output) if x["model"] == more.models[0]]
    found = {(x["seed"], x["random_weights"]): x["status"] for x in runs}
    assert len(runs) == len(read_results(more.output)) - 1  # one record is of simple features
    assert found == {
        (0, False): "done", (0, True): "done", (1, False): "failed", (1, True): "done",
    }  # fmt: skip


@pytest.mark.usefixtures("in_process")
def test_every_field_of_a_line_is_documented(folder, monkeypatch):
    settings = ask(folder, controls=True)
    grid.main(settings)
    monkeypatch.setattr(grid.glue, "run", lambda *rest, **options: 1 / 0)
    refused(lambda: grid.main(replace(settings, seeds=[1])), "2 that failed")
    lines = [json.loads(x) for x in Path(settings.output).read_text().splitlines()]
    assert {x["status"] for x in lines} == {"done", "failed"}
    fields = {name for x in lines for name in x} | {"test_metrics", "description"}
    assert fields <= {*re.findall(r"\w+", results.__doc__ or "")}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"models": ["gone"]}, "model gone must"),
        ({"tasks": ["sst2", "rte"]}, "glue_dir must"),
        ({"attention": "imagined"}, "imagined"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_run(folder, changes, rule):
    settings = ask(folder, **changes)
    refused(lambda: grid.main(settings), rule)
    assert not Path(settings.output).exists()


@pytest.mark.parametrize("rate", [0.0, -1e-5, math.nan, math.inf])
def test_a_learning_rate_that_cannot_train_is_refused(folder, rate):
    rule = "must be positive and finite"
    refused(lambda: ask(folder, learning_rates=[2e-5, rate]), f"learning_rates {rule}", f"{rate}]")
    refused(lambda: run_settings(folder, learning_rate=rate), f"learning_rate {rule}", f"{rate};")
    refused(lambda: ask(folder, learning_rates=[]), f"learning_rates {rule}", "got []")
    refused(lambda: ask(folder, seeds=[]), "seeds must", "got []")


def test_several_processes_are_sent_to_workers(monkeypatch, folder):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda: grid.main(ask(folder)), "launch must", "got 2")


@pytest.mark.usefixtures("in_process")
def test_a_run_of_another_grid_is_left_to_it_and_made_if_that_dies(folder, monkeypatch):
    first, second = grid.list_runs(ask(folder, seeds=[0, 1]))
    made = []
    monkeypatch.setattr(grid.glue, "run", lambda run, *rest, **options: made.append(run) or {})
    elsewhere = run_lock(str(folder / "other.jsonl"), asdict(second))  # of another results file
    with run_lock(first.output, asdict(first)) as lock, elsewhere:
        for _ in grid.make_runs([first, second], workers=1):
            lock.release()  # its grid is killed
    assert made == [second, first]


@pytest.mark.usefixtures("in_process")
def test_new_weights_or_data_are_run_again_and_other_precision_refused(folder, capsys, monkeypatch):
    models = [tiny_model(folder / name, "roformer") for name in ("model", "other")]
    settings = ask(folder, models=models, controls=True)
    grid.main(settings)
    first = lines_of(settings)
    runs = [x for x in first if x["model"] in models]
    assert len({x["weights"] for x in runs if not x["random_weights"]} - {None}) == 2
    random = {x["weights"] for x in runs if x["random_weights"]}
    assert len(random - {None}) == 1  # of a seed and the configuration, which both have
    grid.main(settings)
    assert lines_of(settings) == first
    tiny_model(folder / "model", "roformer")
    capsys.readouterr()
    grid.main(settings)
    changed = f"weights, tokenizer or data changed, made again: sst2 of {models[0]}"
    assert changed in capsys.readouterr().out.splitlines()
    (new,) = lines_of(settings)[len(first) :]
    assert [x for x in read_results(settings.output) if run_key(x) == run_key(new)] == [new]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    refused(lambda: grid.main(settings), "launch must", "got fp16")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    write_sst2(folder / "glue", train=48)
    grid.main(settings)
    assert {x["rows"]["train"] for x in read_results(settings.output)} == {48}


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("place", ["model", "words"])
def test_another_tokenizer_and_an_edited_configuration_are_noticed(folder, control, place):
    tiny_tokenizer().save_pretrained(folder / "words")
    tokenizer = None if place == "model" else str(folder / "words")
    run = run_settings(folder, random_weights=control, tokenizer=tokenizer)
    line = {**asdict(run), "status": "diverged", **hash_inputs(run)}
    old = {name: value for name, value in line.items() if name != "tokenizer_files"}
    key = run_key(line)
    assert grid.is_finished(run, {key: line})
    config, file = folder / "model" / "config.json", folder / place / "tokenizer.json"
    before = config.read_text()
    config.write_text(before.replace('"hidden_dropout_prob": 0.', '"hidden_dropout_prob": 0.4'))
    assert not grid.is_finished(run, {key: line})
    config.write_text(before)
    swapped = re.sub("good|bad", lambda x: {"good": "bad"}.get(x[0], "good"), file.read_text())
    file.write_text(swapped)
    assert not grid.is_finished(run, {key: line})
    assert grid.is_finished(run, {key: old})  # of a version that did not hash it
