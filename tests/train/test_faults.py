"""What clusters do to a run (see also loop/test_preemption.py): real processes and signals."""

import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

import launched_runs as runs
from tiny import TINY_MODEL, log_rows, refused, sentences, soft_limit
from train.command_line import parse_settings
from train.data.batching import BatchFormat, SequenceIndex, StepDataset
from train.data.corpus import tokenize_corpus
from train.data.vocabulary import Vocab
from train.settings import PretrainSettings

ONE_STEP = "--run.max_hours=1e-9"  # which is over after a step


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_one_that_never_was(launch):
    flags = ["--optim.steps=300", "--optim.micro_batch=8", "--run.save_every=3"]
    flags += ["--run.log_every=2", "--run.validate_every=50"]
    draw, resumed = random.Random(0), set()
    for kill in range(20):
        launcher = runs.LAUNCH if kill == 0 else ()  # which only takes longer to start
        victim = launch(*flags, launcher=launcher, **runs.AS_LAUNCHED)
        launch.train_until(victim, draw.randint(1, 9) if kill else 4)
        time.sleep(0.03 * draw.random())  # between two lines, inside a step or a save
        os.killpg(victim.pid, signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        resumed.add(launch.saved_step())
    assert len(resumed) > 10
    for more in ([], ["--run.name=whole"]):
        assert launch(*flags, *more, **runs.AS_LAUNCHED).wait(runs.PATIENCE) == 0
    assert launch.output().count("going on after step") == 20
    runs.assert_same_run(launch.run.with_name("whole"), launch.run)


def test_of_two_launches_one_waits_until_the_other_has_saved(pretrain, launch):
    both = {process.pid: process for process in (launch(*runs.ENDLESS), launch(*runs.ENDLESS))}
    runs.wait_for(lambda: "waiting up to 60 s: " in launch.output())
    runs.wait_for(lambda: launch.logged_step() > 1)
    line = re.compile(rf"{launch.run} in use by process (\d+) on {platform.node()}\n")
    (holder,) = line.findall(launch.output())
    first = both.pop(int(holder))
    pretrain(*runs.ENDLESS, "--run.dry=true")  # needs no lock
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    (step,) = re.findall(r"SIGTERM: saved after step (\d+);", launch.output())
    runs.wait_for(lambda: launch.logged_step() > int(step))
    assert f"going on after step {step}\n" in launch.output()
    steps = [row["step"] for row in runs.complete_rows(launch.run) if "loss" in row]
    assert steps == [*range(1, len(steps) + 1)]  # nothing lost, nothing twice
    assert len(line.findall(launch.output())) == 1


@pytest.mark.slow
def test_a_second_launch_of_two_ranks_gives_up_in_one_line(launch):
    first = launch(*runs.ENDLESS)
    launch.train_until(first, 2)
    second = launch.ranks(*runs.ENDLESS, "--optim.micro_batch=8")
    runs.wait_for(lambda: "waiting up to 60 s: " in launch.output())
    assert [rank.wait(runs.PATIENCE) for rank in second] == [2, 2]
    (error,) = re.findall("error: .*", launch.output())  # after the bar of the first
    found = f"got {launch.run} in use by process {first.pid} on {platform.node()}; end it"
    assert error.startswith(f"error: run.folder must be free, {found}")
    assert "Traceback" not in launch.output()
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    assert launch.saved_step() == launch.logged_step()


@pytest.fixture
def poisoned(tmp_path: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Path]:
    """A BERT that has no number for the last place of a full sequence; texts with few and many."""
    texts = {name: tmp_path / f"{name}.txt" for name in ("rarely", "always")}
    sizes = TINY_MODEL | runs.NO_DROPOUT | {"vocab_size": len(tokenizer)}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight[31] = torch.nan
    model.save_pretrained(tmp_path / "init")
    tokenizer.save_pretrained(tmp_path / "init")
    for file, often in zip(texts.values(), (60, 1)):
        documents = (" ".join(sentences(3 if i % often else 6, i)) for i in range(300))
        file.write_text("\n\n".join(documents))
    return texts


def full_sequences(settings: PretrainSettings, tokenizer: object) -> list[set[int]]:
    """Steps from 1 in which each of two ranks meets a sequence of 32 tokens."""
    store = tokenize_corpus(settings.corpus, "train", tokenizer)
    sequences = SequenceIndex(store, settings.corpus.length)
    batch_format = BatchFormat(Vocab.from_tokenizer(tokenizer), 0.15, settings.run.seed)
    ranks = [StepDataset(sequences, batch_format, 16, 16, 8, 2, rank) for rank in range(2)]
    sizes = [[max(x["input_ids"].shape[1] for x in steps[n]) for n in range(16)] for steps in ranks]
    return [{n for n, size in enumerate(row, start=1) if size == 32} for row in sizes]


def test_nan_on_one_rank_moves_no_rank_and_three_end_the_run(poisoned, pretrain, tokenizer, launch):
    stages = [{"steps": 16}, {"steps": 9, "train": str(poisoned["always"])}]
    flags = [
        "--model.type=bert", f"--model.init={launch.folder / 'init'}", "--model.config={}",
        f"--corpus.train={poisoned['rarely']}", "--optim.steps=null",
        f"--stages={json.dumps(stages)}", "--optim.micro_batch=8", "--run.save_every=2",
        "--run.keep=99", "--run.validate_every=1000",
    ]  # fmt: skip
    settings = parse_settings(PretrainSettings, [*launch.flags, *flags])
    first, last = full_sequences(settings, tokenizer)
    bad = first | last
    assert 0 < len(bad) < 8  # what follows is about some steps of the first stage
    assert last - first  # the longest are the last rank's
    refused(lambda: pretrain(*flags, "--run.name=one"), "optim", "3 steps in a row, the last 19")
    assert launch.torchrun(*flags).wait(runs.PATIENCE) != 0
    run = launch.run
    norms = log_rows(run, "gradient_norm")  # which is left out where it is not finite
    infinite = [step for step in log_rows(run, "tokens") if step not in norms]
    assert infinite == [*sorted(bad), 17, 18, 19]
    # as in one process, where there is no other rank whose weights could have moved
    runs.assert_close_runs(run.with_name("one"), run, "loss")
    # nobody should have to go on from a step whose gradient was not finite
    saved = {next(step for step in range(due, 17) if step not in bad) for due in range(2, 17, 2)}
    assert saved - {*range(2, 17, 2)}  # one that was due is saved at the next good step
    assert runs.list_checkpoints(run) == [f"step-{step:08}" for step in sorted(saved)]
    warned = re.findall(r"step (\d+) changed no weight", launch.output())
    assert list(map(int, warned)) == infinite
    (error,) = [line for line in launch.output().splitlines() if line.startswith("error: ")]
    assert error.endswith(f"goes on from {run}/checkpoints/step-00000016")


def may_mount() -> bool:
    """Whether this machine permits a tmpfs in a namespace of its own."""
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = shutil.which("unshare") and subprocess.run(mount, capture_output=True, check=False)
    return bool(done) and done.returncode == 0


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.*")}


def test_a_file_size_limit_costs_no_checkpoint(pretrain, capsys):
    checkpoints = pretrain(ONE_STEP) / "checkpoints"
    files = contents(checkpoints)
    size = len(files[checkpoints / "step-00000001" / "optimizer.safetensors"])
    with soft_limit(resource.RLIMIT_FSIZE, size * 3 // 4):
        refused(pretrain, "run.folder must have room for a checkpoint, got")
    assert contents(checkpoints) == files
    warnings = re.findall("warning: no checkpoint after step (\\d+)", capsys.readouterr().err)
    assert warnings == ["4", "8", "12"]


@pytest.mark.skipif(not may_mount(), reason="no tmpfs may be mounted here")
def test_a_full_disk_costs_no_checkpoint_and_ends_in_one_line(pretrain, launch):
    run = pretrain(ONE_STEP)
    assert runs.list_checkpoints(run) == ["step-00000001"]
    files = contents(run / "checkpoints")
    room = sum(map(len, files.values()))
    inside, copy = launch.run.parent, launch.folder / "copy"  # seen by the run, and copied back
    shutil.copytree(inside, copy)
    script = (
        f"mount -t tmpfs -o size={room * 3 // 2} none {inside} && cp -r {copy}/. {inside} && "
        f'{{ "$@"; code=$?; rm -r {copy}; cp -r {inside} {copy}; exit $code; }}'
    )
    shell = ["-rm", "sh", "-c", script, "sh", sys.executable]
    limited = launch(launcher=shell, program="unshare")
    assert limited.wait(runs.PATIENCE) == 2
    shutil.rmtree(inside)
    copy.rename(inside)
    assert contents(run / "checkpoints") == files
    for step in (4, 8):
        assert f"warning: no checkpoint after step {step}, the one before stays" in launch.output()
    (error,) = [line for line in launch.output().splitlines() if line.startswith("error: ")]
    assert "run.folder must have room for a checkpoint, got" in error
    assert "Traceback" not in launch.output()
    runs.assert_same_run(pretrain("--run.name=whole"), pretrain())


def test_no_room_for_the_finished_model_is_one_line_and_the_same_command_writes_it(pretrain):
    run = pretrain()
    model, others = run / "model", run / ".model.backup"
    before = contents(model)
    shutil.rmtree(model)
    (run / ".model.unfinished-killed").mkdir()
    others.mkdir()
    with soft_limit(resource.RLIMIT_FSIZE, len(before[model / "model.safetensors"]) * 3 // 4):
        refused(pretrain, "run.folder must have room for the model, got")
    assert not model.exists()
    assert list(run.glob(".model.*")) == [others]
    pretrain()  # nothing is left to train
    assert contents(model) == before


@pytest.mark.slow
def test_one_process_then_two_then_one_train_as_one_alone(pretrain, launch):
    flags = [
        runs.model_flag(**runs.NO_DROPOUT), "--optim.batch_size=128", "--optim.micro_batch=8",
        "--optim.steps=40", "--run.validate_every=20",
    ]  # fmt: skip
    for begin, code in ((launch, 128 + signal.SIGTERM), (launch.torchrun, 1)):
        victim = begin(*flags)
        launch.train_until(victim, 4)
        victim.terminate()
        assert victim.wait(60) == code
    runs.assert_close_runs(pretrain(*flags, "--run.name=whole"), pretrain(*flags))


def test_a_run_goes_on_with_other_settings_or_text(pretrain, other_text, swapped_tokenizer, capsys):
    drift, fast = "--run.allow_drift=true", "--optim.learning_rate=0.5"
    run = pretrain(ONE_STEP)
    refused(lambda: pretrain(fast), "optim.learning_rate must stay 0.001", "got 0.5")
    other = [f"--corpus.tokenizer={swapped_tokenizer}", f"--corpus.train={other_text}"]
    for flag in other:
        key = flag[2:].partition("=")[0]
        refused(lambda flag=flag: pretrain(flag), key, "must give the tokens")
    environment = run / "environment.json"
    environment.write_text(environment.read_text().replace(torch.__version__, "2.0"))
    pretrain(ONE_STEP, "--optim.micro_batch=4")  # decides nothing
    pretrain(ONE_STEP, fast, drift)
    rates = log_rows(run, "learning_rate")
    assert sorted(rates) == [1, 2, 3]
    assert rates[3] > 0.4
    # what it says of itself is what it does, now and from now on
    first = "changed after step 2: optim.learning_rate from 0.001 to 0.5"
    assert capsys.readouterr().out.count(f"warning: {first}\n") == 1
    text = (run / "settings.yaml").read_text()
    upgrade = f"# changed after step 1: torch from '2.0' to '{torch.__version__}'"
    assert text.splitlines()[:2] == [upgrade, f"# {first}"]
    refused(pretrain, "optim.learning_rate must stay 0.5", "got 0.001")
    smaller = runs.model_flag(intermediate_size=32)
    refused(lambda: pretrain(smaller, fast), "model.config.intermediate_size must stay", "got 32")
    refused(lambda: pretrain(smaller, drift), "must hold this model")
    assert (run / "settings.yaml").read_text() == text  # what could not go on has changed nothing
    refused(lambda: pretrain(*other, fast, drift), "corpus.tokenizer must be the vocabulary")
    pretrain(other[1], fast, drift)
    assert max(log_rows(run)) == 12
    pretrain(other[1], fast, drift, "--optim.clip_norm=2")  # finished: trains nothing
    notes = [line for line in (run / "settings.yaml").read_text().splitlines() if "# " in line]
    assert notes[:2] == [upgrade, f"# {first}"]
    assert notes[2].startswith("# changed after step 3: the tokens of corpus.")
    assert len(notes) == 3
    refused(lambda: pretrain("--optim.steps=5", fast, drift), "optim", "12 steps", "got 5 steps")


def test_a_run_that_learned_its_vocabulary_learns_no_other_for_other_text(pretrain, other_text):
    flags = ("--corpus.tokenizer=null", "--corpus.vocabulary_size=100", ONE_STEP)
    pretrain(*flags)
    changed = [f"--corpus.train={other_text}"]
    refused(lambda: pretrain(*flags, *changed), "corpus.train", "must give the tokens")
    changed.append("--run.allow_drift=true")
    refused(lambda: pretrain(*flags, *changed), "corpus.tokenizer must be", "got null")


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved_and_learns_the_same(launch):
    flags = [
        runs.model_flag(**runs.NO_DROPOUT), "--model.attention=eager", "--corpus.length=512",
        "--optim.steps=3", "--optim.batch_size=64",
    ]  # fmt: skip
    largest = [0]
    process = launch(*flags, "--run.name=whole", "--optim.micro_batch=8")

    def watched() -> bool:
        text = Path(f"/proc/{process.pid}/status").read_text()
        largest.extend(int(size) << 10 for size in re.findall(r"VmPeak:\s+(\d+)", text))
        return process.poll() is not None

    runs.wait_for(watched)
    assert process.returncode == 0
    room = (max(largest) + (150 << 20), resource.RLIM_INFINITY)
    limited = launch(*flags, "--optim.micro_batch=64")
    resource.prlimit(limited.pid, resource.RLIMIT_AS, room)  # while Python starts
    assert limited.wait(runs.PATIENCE) == 0, launch.output()
    # 32, or less where a busy machine hid the peak of the first run
    assert re.search(r"out of memory; optim.micro_batch is (32|16) for", launch.output())
    runs.assert_close_runs(launch.run.with_name("whole"), launch.run, "loss")
