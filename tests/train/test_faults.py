"""What clusters do to a run: real processes, real signals, real files.

What ends a run early is in loop/test_preemption.py.
"""

import itertools
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file

from launched_runs import (
    AS_LAUNCHED,
    CPU,
    ENDLESS,
    LAUNCH,
    NO_DROPOUT,
    PATIENCE,
    SCRIPT,
    TORCHRUN,
    assert_same_run,
    complete_rows,
    last_logged_step,
    list_checkpoints,
    log_mtime,
    newest_step,
    read_output,
    run_in_process,
    start_ranks,
    train_until,
    wait_for,
)
from tiny import TINY_MODEL, log_rows, sentences
from train.command_line import parse_settings
from train.data import vocabulary
from train.data.batching import BatchFormat, SequenceIndex, StepDataset
from train.data.corpus import tokenize_corpus
from train.data.masking import Vocab
from train.loop import checkpoint
from train.pretrain import main
from train.settings import InputError, PretrainSettings


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_twenty_times_ends_as_one_that_never_was(
    workers, pretrain_flags, tmp_path, start
):
    flags = [
        *pretrain_flags, "--optim.steps=300", "--optim.micro_batch=8",
        "--run.save_every=3", "--run.log_every=2", "--run.validate_every=50",
        f"--run.workers={workers}",
    ]  # fmt: skip
    run, draw, resumed = tmp_path / "runs" / "tiny", random.Random(workers), set()
    for kill in range(20):
        before = log_mtime(run)
        command = LAUNCH if kill == 0 else ()  # which only takes longer to start
        victim = start(*command, SCRIPT, *flags, **AS_LAUNCHED)
        train_until(victim, run, before, draw.randint(1, 9) if kill else 4)
        time.sleep(0.03 * draw.random())  # between two lines, inside a step or a save
        os.killpg(victim.pid, signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        resumed.add(newest_step(run))
    assert len(resumed) > 10
    assert start(SCRIPT, *flags, **AS_LAUNCHED).wait(PATIENCE) == 0
    whole = start(SCRIPT, *flags, "--run.name=whole", **AS_LAUNCHED)
    assert whole.wait(PATIENCE) == 0
    assert read_output(tmp_path).count("going on after step") == 20
    assert_same_run(tmp_path / "runs" / "whole", run)


def test_of_two_launches_one_waits_until_the_other_has_saved(pretrain_flags, tmp_path, start):
    run, flags = tmp_path / "runs" / "tiny", [*pretrain_flags, *ENDLESS]
    both = {process.pid: process for process in (start(SCRIPT, *flags, **CPU) for _ in range(2))}
    wait_for(lambda: "waiting up to 60 s: " in read_output(tmp_path))
    wait_for(lambda: last_logged_step(run) > 1)
    line = re.compile(rf"{run} in use by process (\d+) on {platform.node()}\n")
    (holder,) = line.findall(read_output(tmp_path))
    first = both.pop(int(holder))
    main(parse_settings(PretrainSettings, [*flags, "--run.dry=true"]))  # needs no lock
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    (step,) = re.findall(r"SIGTERM: saved after step (\d+);", read_output(tmp_path))
    wait_for(lambda: last_logged_step(run) > int(step))
    assert f"going on after step {step}\n" in read_output(tmp_path)
    steps = [row["step"] for row in complete_rows(run) if "loss" in row]
    assert steps == [*range(1, len(steps) + 1)]  # nothing lost, nothing twice
    assert len(line.findall(read_output(tmp_path))) == 1


@pytest.mark.slow
def test_a_second_launch_of_two_ranks_gives_up_in_one_line(pretrain_flags, tmp_path, start):
    run, flags = tmp_path / "runs" / "tiny", [*pretrain_flags, *ENDLESS]
    first = start(SCRIPT, *flags, **CPU)
    train_until(first, run, 0, 2)
    second = start_ranks(start, [*flags, "--optim.micro_batch=8"])
    wait_for(lambda: "waiting up to 60 s: " in read_output(tmp_path))
    assert [rank.wait(PATIENCE) for rank in second] == [2, 2]
    (error,) = re.findall("error: .*", read_output(tmp_path))  # after the bar of the first
    holder = f"process {first.pid} on {platform.node()}"
    assert error == (
        f"error: run.folder must be free, got {run} in use by {holder}; "
        "end it, or choose another run.name"
    )
    assert "Traceback" not in read_output(tmp_path)
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    assert newest_step(run) == last_logged_step(run)


@pytest.fixture
def poisoned(tmp_path: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Path]:
    """A BERT that has no number for the last place of a full sequence; texts with few and many."""
    sizes = {**json.loads(NO_DROPOUT), "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight[31] = torch.nan
    model.save_pretrained(tmp_path / "init")
    tokenizer.save_pretrained(tmp_path / "init")
    for name, often in (("rarely", 60), ("always", 1)):
        texts = [" ".join(sentences(3 if i % often else 6, i)) for i in range(300)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return {name: tmp_path / f"{name}.jsonl" for name in ("rarely", "always")}


def full_sequences(settings: PretrainSettings, tokenizer: object) -> dict[int, set[int]]:
    """Step from 1 -> ranks of two that meet a sequence of 32 tokens."""
    store = tokenize_corpus(settings.corpus, "train", tokenizer)
    sequences = SequenceIndex(store, settings.corpus.length)
    batch_format = BatchFormat(Vocab.from_tokenizer(tokenizer), 0.15, settings.run.seed)
    found: dict[int, set[int]] = {}
    for rank, step in itertools.product(range(2), range(16)):
        steps = StepDataset(sequences, batch_format, 16, 8, 2, rank)
        if max(batch["input_ids"].shape[1] for batch in steps[step]) == 32:
            found.setdefault(step + 1, set()).add(rank)
    return found


def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_rank_and_three_end_the_run(
    poisoned, pretrain_flags, tokenizer, tmp_path, start
):
    stages = [{"steps": 16}, {"steps": 9, "train": str(poisoned["always"])}]
    flags = [
        *pretrain_flags, "--model.type=bert", f"--model.init={tmp_path / 'init'}",
        "--model.config={}", f"--corpus.train={poisoned['rarely']}", "--optim.steps=null",
        f"--stages={json.dumps(stages)}", "--optim.micro_batch=8", "--run.save_every=1",
        "--run.keep=99", "--run.validate_every=1000",
    ]  # fmt: skip
    bad = full_sequences(parse_settings(PretrainSettings, flags), tokenizer)
    assert 0 < len(bad) < 8  # what follows is about some steps of the first stage
    assert {1} in bad.values()  # the longest are the last rank's
    with pytest.raises(InputError, match="3 steps in a row, the last 19"):
        run_in_process(flags, "--run.name=one")
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    assert torchrun.wait(PATIENCE) != 0
    run, losses = tmp_path / "runs" / "tiny", log_rows(tmp_path / "runs" / "tiny")
    norms = log_rows(run, "gradient_norm")  # which is left out where it is not finite
    infinite = [step for step in log_rows(run, "tokens") if step not in norms]
    assert infinite == [*sorted(bad), 17, 18, 19]
    # as in one process, where there is no other rank whose weights could have moved
    one = log_rows(tmp_path / "runs" / "one")
    np.testing.assert_allclose(list(losses.values()), list(one.values()), rtol=1e-6)
    # nobody should have to go on from a step whose gradient was not finite
    assert list_checkpoints(run) == [f"step-{step:08}" for step in range(1, 17) if step not in bad]
    warned = re.findall(r"step (\d+) changed no weight", read_output(tmp_path))
    assert list(map(int, warned)) == infinite
    (error,) = [line for line in read_output(tmp_path).splitlines() if line.startswith("error: ")]
    assert error.endswith(f"goes on from {run}/checkpoints/step-00000016")


def test_a_gradient_that_overflows_ends_a_run_whose_losses_are_finite(
    pretrain_flags, tokenizer, tmp_path
):
    # words that are all alike: LayerNorm divides their gradient by the root of its epsilon
    sizes = {**json.loads(NO_DROPOUT), "layer_norm_eps": 1e-44, "tie_word_embeddings": False}
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    )
    for table in model.bert.embeddings.children():
        if isinstance(table, torch.nn.Embedding):
            torch.nn.init.zeros_(table.weight)
    model.save_pretrained(tmp_path / "init")
    tokenizer.save_pretrained(tmp_path / "init")
    init = ["--model.type=bert", f"--model.init={tmp_path / 'init'}", "--model.config={}"]
    with pytest.raises(InputError, match="3 steps in a row, the last 3, .* begins again"):
        run_in_process(pretrain_flags, *init)
    assert all(map(np.isfinite, log_rows(tmp_path / "runs" / "tiny").values()))


def may_mount() -> bool:
    """Whether this machine permits a tmpfs in a namespace of its own."""
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a number of bytes, as with a full quota."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_size_limit_costs_no_checkpoint(pretrain_flags, tmp_path, capsys):
    run = tmp_path / "runs" / "tiny"
    run_in_process(pretrain_flags, "--run.max_hours=1e-9")  # which is over after a step
    files = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")}
    size = len(files[run / "checkpoints" / "step-00000001" / "optimizer.safetensors"])
    with (
        file_size_limit(size * 3 // 4),
        pytest.raises(InputError, match="run.folder must have room for a checkpoint, got"),
    ):
        run_in_process(pretrain_flags)
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")} == files
    warnings = re.findall("warning: no checkpoint after step (\\d+)", capsys.readouterr().err)
    assert warnings == ["4", "8", "12"]


@pytest.mark.skipif(not may_mount(), reason="no tmpfs may be mounted here")
def test_a_full_disk_costs_no_checkpoint_and_ends_in_one_line(pretrain_flags, tmp_path, start):
    run = tmp_path / "runs" / "tiny"
    run_in_process(pretrain_flags, "--run.max_hours=1e-9")  # which is over after a step
    assert list_checkpoints(run) == ["step-00000001"]
    files = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")}
    room = sum(map(len, files.values()))
    inside, copy = tmp_path / "runs", tmp_path / "copy"  # seen by the run, and copied back
    shutil.copytree(inside, copy)
    script = (
        f"mount -t tmpfs -o size={room * 3 // 2} none {inside} && cp -r {copy}/. {inside} && "
        f'{{ "$@"; code=$?; rm -r {copy}; cp -r {inside} {copy}; exit $code; }}'
    )
    shell = ["-rm", "sh", "-c", script, "sh", sys.executable]
    limited = start(*shell, SCRIPT, *pretrain_flags, program="unshare", **CPU)
    assert limited.wait(PATIENCE) == 2
    shutil.rmtree(inside)
    copy.rename(inside)
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")} == files
    for step in (4, 8):
        assert f"warning: no checkpoint after step {step}, the one before stays" in read_output(
            tmp_path
        )
    (error,) = [line for line in read_output(tmp_path).splitlines() if line.startswith("error: ")]
    assert "run.folder must have room for a checkpoint, got" in error
    assert "Traceback" not in read_output(tmp_path)
    run_in_process(pretrain_flags)
    run_in_process(pretrain_flags, "--run.name=whole")
    assert_same_run(tmp_path / "runs" / "whole", run)


@pytest.mark.slow
def test_one_process_then_two_then_one_train_as_one_alone(pretrain_flags, tmp_path, start):
    flags = [
        *pretrain_flags, f"--model.config={NO_DROPOUT}", "--optim.batch_size=128",
        "--optim.micro_batch=8", "--optim.steps=40", "--run.validate_every=20",
    ]  # fmt: skip
    run = tmp_path / "runs" / "tiny"
    first = start(SCRIPT, *flags, **CPU)
    for processes, launch in ((1, first), (2, None)):
        before = log_mtime(run) if launch is None else 0
        launch = launch or start(*TORCHRUN, SCRIPT, *flags, **CPU)
        train_until(launch, run, before, 4)
        launch.terminate()
        assert launch.wait(60) == (143 if processes == 1 else 1)
    run_in_process(flags)
    run_in_process(flags, "--run.name=whole")
    for key in ("loss", "validation_loss", "tokens"):
        both = [log_rows(tmp_path / "runs" / name, key) for name in ("whole", "tiny")]
        assert list(both[0]) == list(both[1])
        np.testing.assert_allclose(list(both[1].values()), list(both[0].values()), rtol=1e-6)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_half(path: Path, write: Callable[[], object], moment: Callable[[], None]) -> None:
    """Let a moment pass when half of a file is there, and one when all of it is."""
    write()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    moment()
    path.write_bytes(whole)
    moment()


def save_and_die(folder: Path, last: int) -> int:
    """A child of this process saves and retains, and kills itself at that moment; its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    moments = itertools.count(1)
    write_text, fsync = Path.write_text, os.fsync

    def moment(event: str = "", arguments: tuple = ()) -> None:
        touches = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
        if (not event or event in touches) and next(moments) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(descriptor: int) -> None:
        moment()
        fsync(descriptor)

    def write_tensors(tensors: dict, path: Path) -> None:
        write_half(path, lambda: save_file(tensors, path), moment)

    def write_words(path: Path, text: str) -> None:
        write_half(path, lambda: write_text(path, text), moment)

    try:
        held = checkpoint.gather_state(*small())
        os.fsync, Path.write_text, checkpoint.save_file = flush, write_words, write_tensors
        sys.addaudithook(moment)
        checkpoint.save(folder, 3, held, {})
        checkpoint.prune(folder, 2)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_write_flush_or_rename_of_a_save_leaves_a_checkpoint(tmp_path):
    begun = tmp_path / "begun"
    for step in (1, 2):
        checkpoint.save(begun, step, checkpoint.gather_state(*small()), {})
    killed = []
    for last in itertools.count(1):
        run = tmp_path / f"killed-{last}"
        shutil.copytree(begun, run)
        status = save_and_die(run, last)
        path = checkpoint.latest(run)
        killed.append(path.name)
        assert checkpoint.load(path, *small())["step"] == int(path.name[-1])
        checkpoint.save(run, 4, checkpoint.gather_state(*small()), {})
        checkpoint.prune(run, 2)
        assert list_checkpoints(run) == [path.name, "step-00000004"]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert killed == sorted(killed)  # the new one is there from one moment on
    assert set(killed) == {"step-00000002", "step-00000003"}
    assert len(killed) > 25


def test_a_foreign_or_empty_folder_is_set_aside_with_one_warning(tmp_path, capsys):
    checkpoint.save(tmp_path, 3, checkpoint.gather_state(*small()), {})
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    foreign = tmp_path / "checkpoints" / "step-99-of-mine1"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("do not lose me")
    assert checkpoint.latest(tmp_path).name == "step-00000003"
    lines = capsys.readouterr().out.splitlines()
    assert [name in line for name, line in zip((foreign.name, "step-00000009"), lines)] == [
        True
    ] * 2
    assert list(tmp_path.rglob("notes.txt"))


def test_the_same_step_damaged_twice_is_set_aside_twice(tmp_path):
    checkpoint.save(tmp_path, 3, checkpoint.gather_state(*small()), {})
    for _ in range(2):
        path = checkpoint.save(tmp_path, 6, checkpoint.gather_state(*small()), {})
        (path / "state.json").write_text("{}")
        assert checkpoint.latest(tmp_path).name == "step-00000003"


def test_a_run_goes_on_under_other_settings_and_text_when_it_may(
    pretrain_flags, other_text, tmp_path, tokenizer, capsys
):
    drift = "--run.allow_drift=true"
    run_in_process(pretrain_flags, "--run.max_hours=1e-9")
    with pytest.raises(InputError, match="optim.learning_rate must stay 0.001"):
        run_in_process(pretrain_flags, "--optim.learning_rate=0.5")
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary.save_tokenizer([*pieces[:-2], pieces[-1], pieces[-2]], tmp_path / "swapped")
    other = f"--corpus.tokenizer={tmp_path / 'swapped'}"
    with pytest.raises(InputError, match="corpus.tokenizer.* must give the tokens"):
        run_in_process(pretrain_flags, other)
    with pytest.raises(InputError, match="corpus.train.* must give the tokens"):
        run_in_process(pretrain_flags, f"--corpus.train={other_text}")
    run_in_process(
        pretrain_flags, "--run.max_hours=1e-9", "--optim.micro_batch=4"
    )  # decides nothing
    run_in_process(pretrain_flags, "--run.max_hours=1e-9", "--optim.learning_rate=0.5", drift)
    run = tmp_path / "runs" / "tiny"
    rates = log_rows(run, "learning_rate")
    assert sorted(rates) == [1, 2, 3]
    assert rates[3] > 0.4
    # what it says of itself is what it does, now and from now on
    first = "run.allow_drift changed after step 2: optim.learning_rate from 0.001 to 0.5"
    assert capsys.readouterr().out.count(f"warning: {first}\n") == 1
    text = (run / "settings.yaml").read_text()
    assert text.splitlines()[0] == f"# {first}"
    assert yaml.safe_load(text)["optim"]["learning_rate"] == 0.5
    with pytest.raises(InputError, match="optim.learning_rate must stay 0.5 .* got 0.001"):
        run_in_process(pretrain_flags)
    other_size = f"--model.config={json.dumps(TINY_MODEL | {'intermediate_size': 32})}"
    with pytest.raises(InputError, match="must hold this model, got another's"):
        run_in_process(pretrain_flags, other_size, drift)
    assert (run / "settings.yaml").read_text() == text  # what could not go on has changed nothing
    fast = "--optim.learning_rate=0.5"
    run_in_process(pretrain_flags, other, f"--corpus.train={tmp_path / 'other.jsonl'}", fast, drift)
    assert last_logged_step(run) == 12
    notes = [line for line in (run / "settings.yaml").read_text().splitlines() if "# " in line]
    assert notes[0] == f"# {first}"
    assert notes[1].startswith("# run.allow_drift changed after step 3: the tokens of corpus.")
    assert len(notes) == 2
    with pytest.raises(InputError, match="optim must be .* at least the 12 steps .* got 5 steps"):
        run_in_process(pretrain_flags, "--optim.steps=5", fast, drift)


def test_a_run_that_learned_its_vocabulary_does_not_learn_another_for_other_text(
    pretrain_flags, other_text
):
    flags = ("--corpus.tokenizer=null", "--corpus.vocabulary_size=100", "--run.max_hours=1e-9")
    run_in_process(pretrain_flags, *flags)
    with pytest.raises(InputError, match=r"^corpus\.tokenizer must name the run's vocabulary"):
        run_in_process(
            pretrain_flags, *flags, f"--corpus.train={other_text}", "--run.allow_drift=true"
        )


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved_and_learns_the_same(
    pretrain_flags, tmp_path, start
):
    flags = [
        *pretrain_flags, f"--model.config={NO_DROPOUT}", "--model.attention=eager",
        "--corpus.length=512", "--optim.steps=3", "--optim.batch_size=64",
    ]  # fmt: skip
    largest = [0]
    process = start(SCRIPT, *flags, "--run.name=whole", "--optim.micro_batch=8", **CPU)

    def watched() -> bool:
        text = Path(f"/proc/{process.pid}/status").read_text()
        largest.extend(int(size) << 10 for size in re.findall(r"VmPeak:\s+(\d+)", text))
        return process.poll() is not None

    wait_for(watched)
    assert process.returncode == 0
    room = (max(largest) + (150 << 20), resource.RLIM_INFINITY)
    limited = start(
        SCRIPT, *flags, "--optim.micro_batch=64", **CPU,
        limits=lambda: resource.setrlimit(resource.RLIMIT_AS, room),
    )  # fmt: skip
    assert limited.wait(PATIENCE) == 0, read_output(tmp_path)
    assert "warning: out of memory; optim.micro_batch is 32 in this launch" in read_output(tmp_path)
    losses = [list(log_rows(tmp_path / "runs" / name).values()) for name in ("whole", "tiny")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_no_room_for_the_finished_model_is_one_line_and_the_model_before_stays(
    pretrain_flags, tmp_path
):
    run = tmp_path / "runs" / "tiny"
    run_in_process(pretrain_flags)
    model, others = run / "model", run / ".model.backup"
    before = {path: path.read_bytes() for path in model.iterdir()}
    (run / ".model.unfinished-killed").mkdir()
    others.mkdir()
    with (
        file_size_limit(len(before[model / "model.safetensors"]) * 3 // 4),
        pytest.raises(InputError, match="^run.folder must have room for the model, got [^\n]*$"),
    ):
        run_in_process(pretrain_flags)
    assert {path: path.read_bytes() for path in model.iterdir()} == before
    assert list(run.glob(".model.*")) == [others]
    (model / "config.json").write_text("{}")
    run_in_process(pretrain_flags)  # nothing is left to train: the model is written again
    assert {path: path.read_bytes() for path in model.iterdir()} == before
