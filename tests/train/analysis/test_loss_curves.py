"""Loss curves: runs are compared where all have been, seed by seed, with intervals over seeds."""

import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml

from tiny import refused
from train.analysis.loss_curves import CurvesSettings, main, paired_difference, read_runs, summary

LOSSES = {"rope-0": [5.0, 4.0], "rope-1": [5.0, 4.2], "rope-2": [5.0, 4.1],
          "none-0": [6.0, 5.5], "none-1": [6.0, 5.8], "none-2": [6.0, 5.2]}  # fmt: skip


def write_run(folder, losses, speed=100, tokens=100, logged=100, seed=None, tokenizer=None):
    """Write a run that is evaluated every `tokens` tokens and makes `speed` a second."""
    folder.mkdir(parents=True)
    rows = []
    for number, loss in enumerate(losses, start=1):
        seen = tokens * number
        place = {"step": number, "tokens": seen, "seconds": seen / speed}
        rows += [place | {"loss": loss + 0.1, "tokens_per_second": logged}]
        rows += [place | {"validation_loss": loss}]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps({"parameters": 1234567}))
    seed = int(folder.name.rpartition("-")[2]) if seed is None else seed
    settings = {"corpus": {"tokenizer": tokenizer}, "run": {"seed": seed}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    found = []
    for name, losses in LOSSES.items():
        speed = 100 if name.startswith("rope") else 200
        found.append(write_run(tmp_path / name, losses, speed, logged=speed + int(name[-1])))
    return found


def compare(tmp_path, runs):
    main(CurvesSettings(runs, output=str(tmp_path / "c.png")))
    return json.loads((tmp_path / "c.json").read_text())


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_models_are_compared_by_seed_at_equal_tokens_or_time(ending, start, runs, tmp_path, capsys):
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
    cells = [cell.strip() for cell in row.split("|")][2:7]
    assert cells == ["3", "1,234,567", "201 ± 2", "5.500 ± 0.745", "-1.400 ± 0.657"]
    assert printed.startswith(output.with_suffix(".md").read_text())


def test_a_single_run_has_curves_and_no_interval(runs, tmp_path):
    (row,) = compare(tmp_path, runs[:1])["models"]
    assert row["at_equal_tokens"] == {"mean": 4.0, "half": None, "values": [4.0]}
    figures = [str(tmp_path / f"{name}.png") for name in ("both", "tokens")]
    for figure, wall_clock in zip(figures, (True, False)):
        main(CurvesSettings([str(runs[0])], figure, wall_clock=wall_clock))
    two_panels, one = (plt.imread(figure).shape[1] for figure in figures)
    assert two_panels > 1.5 * one


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
    late = write_run(tmp_path / "late" / "none-1", [6.0, 5.8], speed=20, tokens=999)
    rope, none = compare(tmp_path, [*runs[:2], runs[3], late])["models"]
    assert rope["at_equal_tokens"]["values"] == [4.0, 4.2]
    assert (none["at_equal_tokens"], none["at_equal_time"]) == (None, None)
    assert none["first_minus_it"]["values"] == [-1.5]  # of the seed that has
    for other in (late, runs[5]):  # the seed without a loss; no seed in common
        _, none = compare(tmp_path, [*runs[:2], other])["models"]
        assert none["first_minus_it"] is None


def test_losses_are_bits_where_all_runs_read_bytes(runs, tmp_path):
    read_bytes = write_run(tmp_path / "bytes-0", [4.0], tokenizer="bytes")
    for compared, unit in (([read_bytes, runs[0]], 1.0), ([read_bytes], math.log(2))):
        found = compare(tmp_path, compared)["models"][0]["at_equal_tokens"]["values"]
        np.testing.assert_allclose(found, [4.0 / unit])
    assert "bits a byte" in (tmp_path / "c.md").read_text()


def test_globs_name_runs_each_of_which_counts_once(tmp_path):
    for name in ("rate-3", "rope-3", "rope-4"):
        write_run(tmp_path / name, [5.0, 4.0])
    (tmp_path / "rope-1.log").touch()
    models, _ = read_runs([str(tmp_path / "rope-?"), str(tmp_path / "*-?")])
    assert {model: list(found) for model, found in models.items()} == {"rope": [3, 4], "rate": [3]}


def test_one_slow_interval_does_not_slow_a_run(runs, tmp_path):
    log = tmp_path / "rope-0" / "log.jsonl"
    first = json.loads(log.read_text().splitlines()[0])
    with log.open("a") as stream:
        stream.write(json.dumps(first | {"tokens_per_second": 1}) + "\n")
    assert compare(tmp_path, runs)["models"][0]["tokens_per_second"]["values"] == [100, 101, 102]


def test_what_cannot_be_compared_is_refused(runs, tmp_path):
    refused(lambda: CurvesSettings(runs, output="table"), "output")
    for wrong, *words in (
        ([write_run(tmp_path / parent / "a-0", [5.0]) for parent in ("one", "two")], "a-0 twice"),
        ([runs[0], write_run(tmp_path / "rope", [5.0], seed=0)], "two of rope with seed 0"),
        ([str(tmp_path / "nothing")], "runs", "got", "nothing"),
        ([write_run(tmp_path / "young-0", [])], "runs must have logged and evaluated"),
    ):
        refused(lambda wrong=wrong: compare(tmp_path, wrong), *words)
    assert not (tmp_path / "c.png").exists()
