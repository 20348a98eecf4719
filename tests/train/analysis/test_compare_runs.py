"""Models side by side: intervals over seeds, differences in pairs, bits for bytes, refusals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from train.analysis.compare_runs import CompareSettings, main, t_interval
from train.settings import InputError

LOSSES = {"rope-0": [5.0, 4.0], "rope-1": [5.0, 4.2], "rope-2": [5.0, 4.1],
          "none-0": [6.0, 5.5], "none-1": [6.0, 5.8], "none-2": [6.0, 5.2]}  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    for name, losses in LOSSES.items():
        folder = tmp_path / name
        folder.mkdir()
        speed = 100 if name.startswith("rope") else 200
        rows = []
        for number, loss in enumerate(losses, start=1):
            place = {"step": number, "tokens": 100 * number, "seconds": 100 * number / speed}
            trained = place | {"loss": loss, "tokens_per_second": speed + int(name[-1])}
            rows += [trained, place | {"validation_loss": loss}]
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "environment.json").write_text(json.dumps({"parameters": 1234567}))
    return [str(tmp_path / name) for name in LOSSES]


def written(tmp_path):
    return json.loads((tmp_path / "c.json").read_text())["models"]


def test_the_interval_is_students():
    values = [4.0, 4.2, 4.1]
    found = t_interval(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found["mean"] - found["half"], found["mean"] + found["half"]) == pytest.approx(
        (low, high)
    )
    assert t_interval([4.0])["half"] is None


def test_models_are_compared_seed_by_seed_at_equal_tokens_and_at_equal_time(runs, tmp_path, capsys):
    main(CompareSettings(runs, output=str(tmp_path / "c.png")))
    rope, none = written(tmp_path)
    assert rope["at_equal_tokens"] == t_interval([4.0, 4.2, 4.1])
    assert none["at_equal_tokens"] == t_interval([5.5, 5.8, 5.2])
    assert none["first_minus_it"]["values"] == pytest.approx([-1.5, -1.6, -1.1])
    # after one second rope is half-way and none at its end
    assert rope["at_equal_time"]["values"] == [5.0, 5.0, 5.0]
    assert none["at_equal_time"]["values"] == [5.5, 5.8, 5.2]
    assert none["tokens_per_second"]["values"] == [200, 201, 202]
    printed = capsys.readouterr().out
    assert "| none | 3 | 1,234,567 | 201 ± 2 | 5.500 ± 0.745 | -1.400 ± 0.657 |" in printed
    assert printed.startswith((tmp_path / "c.md").read_text())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_longer_texts_are_columns_and_a_table_that_ends_is_refused(runs, tmp_path):
    rows = [
        {"model": model, "seed": seed, "way": "as it is", "length": length, "validation_loss": loss}
        for model, seed, length, loss in [("rope", 0, 16, 4.0), ("rope", 1, 16, 4.5),
                                          ("rope", 0, 32, 6.0), ("none", 0, 16, 5.0)]
    ]  # fmt: skip
    rows += [{"model": "none", "seed": 0, "way": "as it is", "length": 32, "refused": "too long"}]
    rows += [rows[2] | {"way": "theta rescaled", "validation_loss": 3.0}]
    (tmp_path / "lengths.json").write_text(json.dumps(rows))
    main(CompareSettings(runs, str(tmp_path / "lengths.json"), str(tmp_path / "c.png")))
    rope, none = written(tmp_path)
    assert rope["at_length"]["16"]["values"] == [4.0, 4.5]
    assert rope["at_length"]["32"]["mean"] == 6.0  # as it is
    assert none["at_length"]["32"] == "refused"
    assert "| at length 16 | at length 32 |" in (tmp_path / "c.md").read_text()


def test_a_model_has_one_colour_in_all_panels(runs, tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(
        "train.analysis.compare_runs.save_figure", lambda found, output: axes.extend(found)
    )
    row = {"seed": 0, "way": "as it is", "length": 16, "validation_loss": 4.0}
    rows = [row | {"model": "none"}, row | {"model": "rope"}]  # in another order than the runs
    (tmp_path / "lengths.json").write_text(json.dumps(rows))
    main(CompareSettings(runs, str(tmp_path / "lengths.json"), str(tmp_path / "c.png")))
    colours = [
        {x.get_label(): x.get_color() for x in axis.lines if x.get_label() in ("rope", "none")}
        for axis in (axes[0], axes[2])
    ]
    assert colours[0] == colours[1] == {"rope": "tab:red", "none": "tab:blue"}


def test_a_shorter_run_moves_difference_and_losses_to_one_place(runs, tmp_path):
    (tmp_path / "third-0").mkdir()
    rows = (tmp_path / "none-0" / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "third-0" / "log.jsonl").write_text("".join(rows[:2]))  # half as many tokens
    main(CompareSettings([runs[0], runs[3], str(tmp_path / "third-0")], output=f"{tmp_path}/c.png"))
    rope, none, _ = written(tmp_path)
    assert (rope["at_equal_tokens"]["mean"], none["at_equal_tokens"]["mean"]) == (5.0, 6.0)
    assert none["first_minus_it"]["values"] == [-1.0]


def test_losses_are_bits_where_all_runs_read_bytes(runs, tmp_path):
    for bytewise, unit in ((runs[:1], 1.0), (runs, math.log(2))):
        for run in bytewise:
            Path(run, "settings.yaml").write_text("corpus: {tokenizer: bytes}\n")
        main(CompareSettings(runs, output=str(tmp_path / "c.png")))
        found = written(tmp_path)[0]["at_equal_tokens"]["values"]
        np.testing.assert_allclose(found, np.array([4.0, 4.2, 4.1]) / unit)
    assert "bits a byte" in (tmp_path / "c.md").read_text()
    row = {"model": "rope", "seed": 0, "way": "as it is", "length": 16, "validation_loss": 4.0}
    (tmp_path / "lengths.json").write_text(json.dumps([row]))  # in nats, of pieces
    with pytest.raises(InputError, match="lengths must be null for runs on bytes"):
        main(CompareSettings(runs, str(tmp_path / "lengths.json"), str(tmp_path / "d.png")))


def test_what_cannot_be_compared_is_said(runs, tmp_path):
    output = str(tmp_path / "c.png")
    with pytest.raises(InputError, match="runs .* got 1"):
        main(CompareSettings(runs[:3], output=output))
    for text in ("{", '[{"model": "rope"}]', '"rope"'):
        (tmp_path / "lengths.json").write_text(text)
        with pytest.raises(InputError, match="lengths must be"):
            main(CompareSettings(runs, str(tmp_path / "lengths.json"), output))
    with pytest.raises(InputError, match="lengths must be .* got nowhere"):
        main(CompareSettings(runs, "nowhere", output))
    with pytest.raises(InputError, match="output "):
        CompareSettings(runs, output="table")
    assert not (tmp_path / "c.png").exists()


def test_a_model_of_which_one_seed_has_no_loss_there_has_none(runs, tmp_path):
    log = tmp_path / "none-1" / "log.jsonl"
    later = log.read_text().replace('"tokens": ', '"tokens": 9')
    log.write_text(later.replace('"seconds": ', '"seconds": 9'))
    main(CompareSettings([runs[i] for i in (0, 1, 3, 4)], output=str(tmp_path / "c.png")))
    rope, none = written(tmp_path)
    assert rope["at_equal_tokens"]["values"] == [4.0, 4.2]
    assert (none["at_equal_tokens"], none["at_equal_time"]) == (None, None)
    assert none["first_minus_it"]["values"] == [-1.5]  # of the seed that has
    for others in ([4], [5]):  # the seed without a loss; no seed in common
        main(CompareSettings([runs[i] for i in (0, 1, *others)], output=str(tmp_path / "c.png")))
        assert written(tmp_path)[1]["first_minus_it"] is None


def test_one_slow_interval_does_not_slow_a_run(runs, tmp_path):
    log = tmp_path / "rope-0" / "log.jsonl"
    first = json.loads(log.read_text().splitlines()[0])
    with log.open("a") as stream:
        stream.write(json.dumps(first | {"tokens_per_second": 1}) + "\n")
    main(CompareSettings(runs, output=str(tmp_path / "c.png")))
    assert written(tmp_path)[0]["tokens_per_second"]["values"] == [100, 101, 102]
