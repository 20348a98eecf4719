"""Settings: every shipped YAML parses, every mistake is one line that names the key."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from finetune.settings import GridSettings
from tiny import ROOT, name_of, refused
from train.analysis.length_extrapolation import LengthSettings
from train.analysis.long_term_decay import DecaySettings
from train.command_line import parse_settings, run_command
from train.loop.evaluate import EvaluateSettings
from train.loop.run_metadata import settings_dict
from train.pretrain import DEFAULT_CONFIG, main
from train.settings import CorpusSettings, PretrainSettings, StageSettings, TextSettings

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PRETRAIN = sorted((ROOT / "configs" / "pretrain").glob("*.yaml"))
MODELS = sorted((ROOT / "configs" / "model").glob("*.yaml"))
BASE = ["--optim.steps=200"]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_config_opens_with_command_cost_and_expectation(path):
    lines = path.read_text().splitlines()
    heads = [line for line in lines if line.startswith(("# Run: ", "# Cost: ", "# Expect: "))]
    assert [h.split(":")[0] for h in heads] == ["# Run", "# Cost", "# Expect"]
    assert lines[0].startswith("# Run: ")
    assert "TBD" not in path.read_text()
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize(
    ("run", "model"),
    [(PRETRAIN[0], model) for model in MODELS] + [(run, MODELS[0]) for run in PRETRAIN[1:]],
    ids=name_of,
)
def test_every_pretraining_config_parses_and_is_joined_by_every_model_config(run, model):
    settings = parse_settings(PretrainSettings, ["--config", str(run), "--config", str(model)])
    sizes = yaml.safe_load(model.read_text())["model"]["config"]
    assert sizes.items() <= settings.model.config.items()
    assert settings.optim == parse_settings(PretrainSettings, ["--config", str(run)]).optim


@pytest.mark.parametrize("model", ["roformer", "bert"])
def test_the_published_pair_was_made_with_the_settings_of_make_pair(model):
    files = ["configs/pretrain/pair-small.yaml", f"configs/model/{model}-small.yaml"]
    flags = [flag for file in files for flag in ("--config", str(ROOT / file))]
    settings = parse_settings(PretrainSettings, flags)
    found = settings_dict(settings)
    run = yaml.safe_load((ROOT / f"results/pair/{model}-0/settings.yaml").read_text())
    free = {"batch_size", "micro_batch"}  # those of the stages count
    free |= {"muon_scale", "attention", "init", "cache", "train", "validation", "tokenizer"}
    for section in ("optim", "model", "corpus"):
        # a setting that is newer than the run had its default
        begun = settings_dict(type(getattr(settings, section))()) | run[section]
        names = found[section].keys() - free
        assert {x: found[section][x] for x in names} == {x: begun[x] for x in names}
    sizes = [stage["batch_size"] or found["optim"]["batch_size"] for stage in found["stages"]]
    for (ours, theirs), size in zip(zip(found["stages"], run["stages"], strict=True), sizes):
        theirs = dict.fromkeys(ours) | theirs | {"micro_batch": None}
        assert theirs == ours | {"batch_size": size, "micro_batch": None}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "glue").glob("*.yaml")), ids=name_of)
def test_every_glue_config_parses(path):
    flags = ["--config", str(path), "--models", "[m]", "--tasks", "[rte]"]
    assert parse_settings(GridSettings, flags).models == ["m"]


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_two_families_differ_in_their_type_and_kernel_alone(size):
    files = [ROOT / "configs" / "model" / f"{kind}-{size}.yaml" for kind in ("roformer", "bert")]
    both = [yaml.safe_load(file.read_text())["model"] for file in files]
    assert [model.pop("type") for model in both] == ["roformer", "bert"]
    assert "attention" not in both[0]  # the model's own choice
    both[1].pop("attention", None)
    assert both[0] == both[1]


def test_flags_win_over_later_files_over_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {steps: 101, learning_rate: 1e-3, batch_size: 64}")
    (tmp_path / "b.yaml").write_text("optim: {learning_rate: 2e-3, batch_size: 96}")
    a, b, flag = f"--config={tmp_path / 'a.yaml'}", tmp_path / "b.yaml", "--optim.batch_size=128"
    files = [a, "--config", str(b)]
    for flags in ([*files, flag], [flag, *files], [a, flag, *files[1:]]):  # wherever they stand
        optim = parse_settings(PretrainSettings, flags).optim
        assert (optim.steps, optim.learning_rate, optim.batch_size) == (101, 2e-3, 128)


def test_stages_of_a_flag_take_nothing_from_those_of_a_file():
    flags = ["--config", str(ROOT / "configs/pretrain/fast-small.yaml")]
    flags += ["--stages", "[{steps: 400}, {steps: 1}, {steps: 2}]"]
    steps = [StageSettings(400), StageSettings(1), StageSettings(2)]
    assert parse_settings(PretrainSettings, flags).stages == steps


MISTAKES = {
    "--optim.learning_rte=1": ("--optim.learning_rte=1", "did you mean --optim.learning_rate?"),
    "--optim.lr=1": ("unrecognized arguments: --optim.lr=1", "see --help"),
    "--corpus.train a.txt b.txt": ("b.txt; quote globs, write a list as",),
    "--corpus.train old train": ("train; quote globs, write a list as",),
    "--corpus.validation=0.02": ("corpus.validation must be text, or a share", "got 0.02"),
    "--optim.tokens=5M": ("optim.tokens must be of type int or null, got 5M; see --help",),
    "--optim.tokens=1.2.3e4": ("optim.tokens must be of type int or null", "got 1.2.3e4"),
    "--optim.tokens=1.5e9": ("optim.tokens must be of type int or null", "write 1500000000"),
    "--optim.batch_size=1e2": ("optim.batch_size must be of type int, got 100.0; write 100",),
    "--optim.batch_size=null": ("optim.batch_size must be of type int", "got null"),
    '--stages=[{"steps":"x"}]': ("stages.steps must be of type int", "got x"),
    '--stages=[{"length":8}]': ("arguments are required: steps; see --help",),
    "--train=x": ("unrecognized arguments: --train=x", "did you mean --corpus.train?"),
    "--stages.mask_rate=0.2": ("stages must be given whole, got --stages.mask_rate=0.2",),
    '--stages=[{"stepz":1}]': ("'stepz' is not accepted", "did you mean stages.steps"),
    "--optim.learning_rate=-1": ("optim.learning_rate must be positive and finite", "got -1.0"),
    "--optim.tokens=5": ("optim needs one of optim.steps", "got optim.steps, optim.tokens"),
    '--stages=[{"steps":4}]': ("optim needs one of", "got optim.steps, stages"),
    "--optim.warmup_steps=-1": ("optim.warmup_steps must not be negative", "got -1"),
    "--optim.schedule=lin": ("optim.schedule must be one of linear", "got lin"),
    "--optim.name=sgd": ("optim.name must be one of adamw, muon", "got sgd"),
    "--optim.betas=[1.5,0.9]": ("optim.betas must be at least 0 and below 1",),
    "--optim.betas=[0.9]": ("optim.betas must be of type tuple[float, float]", "got [0.9]"),
    "--corpus.length=4": ("corpus.length must be at least 8", "got 4"),
    "--corpus.mask_rate=1.5": ("corpus.mask_rate must lie between 0 and 1", "got 1.5"),
    "--run.name=a/b": ("run.name must be a plain folder name", "got 'a/b'"),
    "--run.save_every=0": ("run.save_every must be at least 1", "got 0"),
    "--run.seed=18446744073709551616": ("run.seed must be from 0",),
    "--config=/nowhere.yaml": ("config must be a file, got /nowhere.yaml",),
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key(flags):
    given = [*BASE, *flags.split(" ")]
    refused(lambda: parse_settings(PretrainSettings, given), *MISTAKES[flags])


def test_later_files_override_earlier_ones_key_by_key(tmp_path):
    """Also within `model.config`, where the library's sizes would be trained otherwise."""
    file = tmp_path / "mine.yaml"
    file.write_text("{model: {config: {hidden_size: 96, layer_norm_eps: 1e-9}}, run: {name: 😀}}")
    tiny = ROOT / "configs/model/roformer-tiny.yaml"
    sizes = yaml.safe_load(tiny.read_text())["model"]["config"]
    config = parse_settings(PretrainSettings, [*BASE, f"--config={tiny}", f"--config={file}"])
    sizes |= {"hidden_size": 96, "layer_norm_eps": 1e-9}
    assert (config.model.config, config.run.name) == (sizes, "😀")


@pytest.mark.parametrize(
    ("settings", "flags"),
    [(EvaluateSettings, ["--model=m"]), (LengthSettings, ["--models=[m]"]), (DecaySettings, [])],
)
def test_a_command_that_measures_refuses_what_it_would_not_read_of_the_corpus(settings, flags):
    used = ["--corpus.train=x", "--corpus.validation=2%", "--corpus.cache=y"]
    assert parse_settings(settings, [*flags, *used]).corpus.validation == "2%"
    names = {field.name for field in fields(CorpusSettings)}
    for name in names - {field.name for field in fields(TextSettings)}:
        flag = f"--corpus.{name}=200"
        refused(lambda flag=flag: parse_settings(settings, [*flags, flag]), flag)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("corpus: {lenght: 64}", "'lenght'; did you mean corpus.length?"),
        ("model: 3", "model must be of type section, got 3"),
        ("stages: null", "stages must be of type list[StageSettings], got null; see --help"),
        ("# nothing", "x.yaml must be a mapping of settings, got None"),
        (b"\xff", "x.yaml must be YAML"),
        ("optim: !!python/object/apply:os.mkdir ['made']", "x.yaml must be YAML"),
    ],
)
def test_a_mistake_in_yaml_is_one_line_and_runs_no_code(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    for flags in (["--config=x.yaml"], ["--config", "x.yaml"]):
        refused(lambda flags=flags: parse_settings(PretrainSettings, flags), message)
    assert not Path("made").exists()


def test_help_shows_the_defaults_in_force(capsys):
    for flags, rate in (([], "0.0015"), ([f"--config={PRETRAIN[0]}"], "0.001")):
        with pytest.raises(SystemExit):
            run_command(main, PretrainSettings, [*flags, "--help"], DEFAULT_CONFIG)
        text = capsys.readouterr().out
        assert re.search(rf"learning_rate .*? default: {rate}\)", text, re.DOTALL)


def test_a_command_without_config_names_the_file_it_reads_instead(capsys):
    found = []
    run_command(found.append, PretrainSettings, ["--optim.tokens=7"], DEFAULT_CONFIG)
    assert (found[0].optim.tokens, found[0].optim.learning_rate) == (7, 1.5e-3)
    assert f"no --config: the settings of {DEFAULT_CONFIG}" in capsys.readouterr().out
    run_command(found.append, PretrainSettings, [f"--config={DEFAULT_CONFIG}"], DEFAULT_CONFIG)
    assert capsys.readouterr().out == ""
    assert found[1].corpus == found[0].corpus


@pytest.mark.parametrize(("rank", "start"), [("0", "error: "), ("3", "error (process 3): ")])
def test_an_error_of_any_process_is_printed(rank, start, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        run_command(main, PretrainSettings, ["--optim.steps=x"])
    assert capsys.readouterr().err.startswith(f"{start}optim.steps must be")


def test_a_reader_that_has_enough_ends_a_command_without_a_message():
    code = """
import dataclasses, train.command_line
settings = dataclasses.make_dataclass("Settings", ())
train.command_line.run_command(lambda _: print("x\\n" * 10**6), settings, [])
"""
    shell = ["bash", "-c", '"$0" -c "$1" | head -n 1', sys.executable, code]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("x\n", "")
    other_pipe = Mock(side_effect=BrokenPipeError("of a worker"))
    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_command(other_pipe, EvaluateSettings, ["--model=m"])
