"""Loss curves: runs are compared where all have been, seed by seed, with intervals over seeds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from train.analysis.loss_curves import CurvesSettings, main, paired_difference, summary
from train.analysis.runs import read_runs
from train.settings import InputError

LOSSES = {"rope-0": [5.0, 4.0], "rope-1": [5.0, 4.2], "rope-2": [5.0, 4.1],
          "none-0": [6.0, 5.5], "none-1": [6.0, 5.8], "none-2": [6.0, 5.2]}  # fmt: skip


def write_run(folder, losses, speed=100, tokens=100, logged=100):
    """Write a run that is evaluated every `tokens` tokens and makes `speed` a second."""
    folder.mkdir(parents=True)
    rows = []
    for number, loss in enumerate(losses, start=1):
        seen = tokens * number
        place = {"step": number, "tokens": seen, "seconds": seen / speed}
        rows += [place | {"loss": loss + 0.1, "tokens_per_second": logged}]
        rows += [place | {"validation_loss": loss}]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    found = []
    for name, losses in LOSSES.items():
        speed = 100 if name.startswith("rope") else 200
        found.append(write_run(tmp_path / name, losses, speed, logged=speed + int(name[-1])))
        (tmp_path / name / "environment.json").write_text(json.dumps({"parameters": 1234567}))
    return found


def compare(tmp_path, runs, **settings):
    """The numbers that the command writes."""
    main(CurvesSettings(runs, output=str(tmp_path / "c.png"), **settings))
    return json.loads((tmp_path / "c.json").read_text())


def test_the_interval_is_students():
    values = [4.0, 4.2, 4.1]
    found = summary(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    ends = (found["mean"] - found["half"], found["mean"] + found["half"])
    assert ends == pytest.approx((low, high))
    assert summary([4.0])["half"] is None


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_models_are_compared_seed_by_seed_at_equal_tokens_and_time(
    ending, start, runs, tmp_path, capsys
):
    output = tmp_path / "out" / f"curves{ending}"
    main(CurvesSettings(runs, output=str(output)))
    assert output.read_bytes().startswith(start)
    numbers = json.loads(output.with_suffix(".json").read_text())
    rope, none = numbers["models"]
    assert rope["at_equal_tokens"] == summary([4.0, 4.2, 4.1])
    assert none["at_equal_tokens"] == summary([5.5, 5.8, 5.2])
    assert none["first_minus_it"]["values"] == pytest.approx([-1.5, -1.6, -1.1])
    assert rope["first_minus_it"] is None
    # after one second rope is half-way and none at its end
    assert numbers["compared_at"] == {"tokens": 200, "seconds": 1}
    assert rope["at_equal_time"]["values"] == [5.0, 5.0, 5.0]
    assert none["at_equal_time"]["values"] == [5.5, 5.8, 5.2]
    assert none["tokens_per_second"]["values"] == [200, 201, 202]
    assert len(numbers["held_out"]["rope-0"]) == 2
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("| none"))
    assert [cell.strip() for cell in row.split("|")][2:7] == [
        "3", "1,234,567", "201 ± 2", "5.500 ± 0.745", "-1.400 ± 0.657",
    ]  # fmt: skip
    assert printed.startswith(output.with_suffix(".md").read_text())


def test_a_single_run_has_curves_and_no_interval(runs, tmp_path):
    (row,) = compare(tmp_path, runs[:1])["models"]
    assert row["at_equal_tokens"] == {"mean": 4.0, "half": None, "values": [4.0]}


def test_longer_texts_are_columns_and_a_table_that_ends_is_refused(runs, tmp_path):
    rows = [
        {"model": model, "seed": seed, "way": "as it is", "length": length, "validation_loss": loss}
        for model, seed, length, loss in [("rope", 0, 16, 4.0), ("rope", 1, 16, 4.5),
                                          ("rope", 0, 32, 6.0), ("none", 0, 16, 5.0)]
    ]  # fmt: skip
    rows += [{"model": "none", "seed": 0, "way": "as it is", "length": 32, "refused": "too long"}]
    rows += [rows[2] | {"way": "theta rescaled", "validation_loss": 3.0}]
    (tmp_path / "lengths.json").write_text(json.dumps(rows))
    rope, none = compare(tmp_path, runs, lengths=str(tmp_path / "lengths.json"))["models"]
    assert rope["at_length"]["16"]["values"] == [4.0, 4.5]
    assert rope["at_length"]["32"]["mean"] == 6.0  # as it is
    assert none["at_length"]["32"] == "refused"
    header = (tmp_path / "c.md").read_text().splitlines()[0]
    assert [cell.strip() for cell in header.split("|")][-3:-1] == ["at length 16", "at length 32"]


def test_a_model_has_one_colour_in_all_panels(runs, tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(
        "train.analysis.loss_curves.save_figure", lambda found, output: axes.extend(found)
    )
    row = {"seed": 0, "way": "as it is", "length": 16, "validation_loss": 4.0}
    rows = [row | {"model": "none"}, row | {"model": "rope"}]  # in another order than the runs
    (tmp_path / "lengths.json").write_text(json.dumps(rows))
    compare(tmp_path, runs, lengths=str(tmp_path / "lengths.json"))
    colours = [
        {x.get_label(): x.get_color() for x in axis.lines if x.get_label() in ("rope", "none")}
        for axis in (axes[0], axes[1], axes[3])
    ]
    assert colours == [{"rope": "tab:red", "none": "tab:blue"}] * 3


def test_a_shorter_run_moves_difference_and_losses_to_one_place(runs, tmp_path):
    third = write_run(tmp_path / "third-0", [7.0])  # half as many tokens
    rope, none, _ = compare(tmp_path, [runs[0], runs[3], third])["models"]
    assert (rope["at_equal_tokens"]["mean"], none["at_equal_tokens"]["mean"]) == (5.0, 6.0)
    assert none["first_minus_it"]["values"] == [-1.0]


def test_curves_of_differences_go_as_far_as_all_seeds_and_between_evaluations(tmp_path):
    for name, losses in (("rope-0", [5.0, 4.0]), ("rope-1", [5.0, 4.0]), ("bert-0", [6, 5.5, 5])):
        write_run(tmp_path / name, losses)
    write_run(tmp_path / "bert-1", [6.0, 4.0], tokens=150)
    models, _ = read_runs([str(tmp_path / "*-?")])
    tokens, differences = paired_difference(models["rope"], models["bert"])
    assert tokens.tolist() == [150, 200]  # bert-1 was evaluated at 150 first
    np.testing.assert_allclose(differences, [[4.5 - 5.75, 4.0 - 5.5], [4.5 - 6, 4.0 - 16 / 3]])
    assert paired_difference(models["rope"], {7: models["bert"][0]})[1].size == 0


def test_a_model_of_which_one_seed_has_no_loss_there_has_none(runs, tmp_path):
    write_run(tmp_path / "late" / "none-1", [6.0, 5.8], speed=20, tokens=999)
    late = str(tmp_path / "late" / "none-1")
    rope, none = compare(tmp_path, [*runs[:2], runs[3], late])["models"]
    assert rope["at_equal_tokens"]["values"] == [4.0, 4.2]
    assert (none["at_equal_tokens"], none["at_equal_time"]) == (None, None)
    assert none["first_minus_it"]["values"] == [-1.5]  # of the seed that has
    for other in (late, runs[5]):  # the seed without a loss; no seed in common
        _, none = compare(tmp_path, [*runs[:2], other])["models"]
        assert none["first_minus_it"] is None


def test_losses_are_bits_where_all_runs_read_bytes(runs, tmp_path):
    for bytewise, unit in ((runs[:1], 1.0), (runs, math.log(2))):
        for run in bytewise:
            Path(run, "settings.yaml").write_text("corpus: {tokenizer: bytes}\n")
        found = compare(tmp_path, runs)["models"][0]["at_equal_tokens"]["values"]
        np.testing.assert_allclose(found, np.array([4.0, 4.2, 4.1]) / unit)
    assert "bits a byte" in (tmp_path / "c.md").read_text()
    row = {"model": "rope", "seed": 0, "way": "as it is", "length": 16, "validation_loss": 4.0}
    (tmp_path / "lengths.json").write_text(json.dumps([row]))  # in nats, of pieces
    with pytest.raises(InputError, match="lengths must be null for runs on bytes"):
        compare(tmp_path, runs, lengths=str(tmp_path / "lengths.json"))


def test_the_end_of_a_name_is_a_seed_only_where_the_run_had_it(tmp_path):
    for name, loss in (("rate-1e-3", 4.0), ("rate-1e-4", 5.0), ("rope-3", 6.0)):
        write_run(tmp_path / name, [loss, loss])
        seed = 3 if name == "rope-3" else 0
        text = yaml.safe_dump({"corpus": {}, "run": {"seed": seed}})
        (tmp_path / name / "settings.yaml").write_text(text)
    models, _ = read_runs([str(tmp_path / name) for name in ("rate-1e-3", "rate-1e-4", "rope-3")])
    found = {(model, seed): run.name for model in models for seed, run in models[model].items()}
    names = {("rate-1e-3", 0): "rate-1e-3", ("rate-1e-4", 0): "rate-1e-4", ("rope", 3): "rope-3"}
    assert found == names


def test_a_glob_names_runs_and_each_is_read_once(tmp_path):
    for name in ("bert-0", "rope-0", "rope-1"):
        write_run(tmp_path / name, [5.0])
    (tmp_path / "rope-1.log").touch()
    models, _ = read_runs([str(tmp_path / "rope-?"), str(tmp_path / "*-?")])
    assert {name: list(seeds) for name, seeds in models.items()} == {"rope": [0, 1], "bert": [0]}


def test_one_slow_interval_does_not_slow_a_run(runs, tmp_path):
    log = tmp_path / "rope-0" / "log.jsonl"
    first = json.loads(log.read_text().splitlines()[0])
    with log.open("a") as stream:
        stream.write(json.dumps(first | {"tokens_per_second": 1}) + "\n")
    assert compare(tmp_path, runs)["models"][0]["tokens_per_second"]["values"] == [100, 101, 102]


def test_what_cannot_be_compared_is_refused(runs, tmp_path):
    for text in ("{", '[{"model": "rope"}]', '"rope"'):
        (tmp_path / "lengths.json").write_text(text)
        with pytest.raises(InputError, match="lengths must be"):
            compare(tmp_path, runs, lengths=str(tmp_path / "lengths.json"))
    with pytest.raises(InputError, match="lengths must be .* got nowhere"):
        compare(tmp_path, runs, lengths="nowhere")
    with pytest.raises(InputError, match="output "):
        CurvesSettings(runs, output="table")
    twice = [write_run(tmp_path / parent / "a", [5.0]) for parent in ("one", "two")]
    with pytest.raises(InputError, match="runs .* got a twice"):
        compare(tmp_path, twice)
    with pytest.raises(InputError, match="runs .* got .*nothing"):
        compare(tmp_path, [str(tmp_path / "nothing")])
    with pytest.raises(InputError, match="runs must have logged and evaluated"):
        compare(tmp_path, [write_run(tmp_path / "young", [])])
    assert not (tmp_path / "c.png").exists()
