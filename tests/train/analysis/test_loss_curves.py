"""Loss curves: the picture is written, and runs are compared where both have been."""

import json

import pytest
import yaml

from train.analysis.loss_curves import CurvesSettings, main, read_runs
from train.settings import InputError


def write_run(folder, losses, seconds):
    folder.mkdir()
    rows = []
    for number, loss in enumerate(losses, start=1):
        place = {"step": number, "tokens": 100 * number, "seconds": seconds * number}
        rows += [place | {"loss": loss + 0.1}, place | {"validation_loss": loss}]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_runs_are_compared_at_the_tokens_and_the_time_that_all_have_had(
    ending, start, tmp_path, capsys
):
    write_run(tmp_path / "a", [5.0, 4.0, 3.0], 1)
    write_run(tmp_path / "b", [6.0, 4.5], 2)
    output = tmp_path / "out" / f"curves{ending}"
    main(CurvesSettings([str(tmp_path / "a"), str(tmp_path / "b")], str(output)))
    assert output.read_bytes().startswith(start)
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert numbers["at_equal_tokens"] == {"tokens": 200, "validation_loss": {"a": 4.0, "b": 4.5}}
    assert numbers["at_equal_time"] == {"seconds": 3, "validation_loss": {"a": 3.0, "b": 5.25}}
    assert numbers["difference"]["by_seed"] == {"0": [-1.0, -0.5]}
    assert len(numbers["runs"]["a"]["held_out"]) == 3
    printed = capsys.readouterr().out
    assert "at 0.0 M tokens: a 4.000, b 4.500" in printed
    assert "minutes: a 3.000, b 5.250" in printed


def test_seeds_of_a_model_are_one_line_and_differ_in_pairs(tmp_path):
    for name, losses in (("rope-0", [5.0, 4.0]), ("bert-0", [6.0, 5.5, 5.0]),
                         ("rope-1", [5.0, 4.0]), ("bert-1", [6.0, 4.5])):  # fmt: skip
        write_run(tmp_path / name, losses, 1)
    runs = [str(tmp_path / name) for name in ("rope-0", "bert-0", "rope-1", "bert-1")]
    main(CurvesSettings([runs[0], runs[3]], str(tmp_path / "c.png")))  # no seed in common
    assert json.loads((tmp_path / "c.json").read_text())["difference"] is None
    main(CurvesSettings(runs, str(tmp_path / "c.png")))
    found = json.loads((tmp_path / "c.json").read_text())["difference"]
    assert found["tokens"] == [100, 200]  # as far as all have got
    assert found["by_seed"] == {"0": [-1.0, -1.5], "1": [-1.0, -0.5]}
    assert found["mean_at_end"] == -1.0
    assert found["std_at_end"] == pytest.approx(0.5**0.5)


def test_the_end_of_a_name_is_a_seed_only_where_the_run_had_it(tmp_path):
    for name, loss in (("rate-1e-3", 4.0), ("rate-1e-4", 5.0), ("rope-3", 6.0)):
        write_run(tmp_path / name, [loss, loss], 1)
        seed = 3 if name == "rope-3" else 0
        text = yaml.safe_dump({"corpus": {}, "run": {"seed": seed}})
        (tmp_path / name / "settings.yaml").write_text(text)
    models, _ = read_runs([str(tmp_path / name) for name in ("rate-1e-3", "rate-1e-4", "rope-3")])
    found = {(model, seed): run.name for model in models for seed, run in models[model].items()}
    names = {("rate-1e-3", 0): "rate-1e-3", ("rate-1e-4", 0): "rate-1e-4", ("rope", 3): "rope-3"}
    assert found == names


def test_runs_that_were_never_evaluated_at_the_same_tokens_are_compared_between(tmp_path):
    write_run(tmp_path / "a", [5.0, 4.0, 3.0], 1)
    write_run(tmp_path / "b", [6.0, 5.0], 1)
    log = tmp_path / "b" / "log.jsonl"
    log.write_text(log.read_text().replace('"tokens": 100', '"tokens": 150'))
    main(CurvesSettings([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c.png")))
    found = json.loads((tmp_path / "c.json").read_text())["difference"]
    assert found["tokens"] == [150, 200]
    assert found["by_seed"] == {"0": [-1.5, -1.0]}


def test_a_run_has_no_loss_before_its_first_evaluation(tmp_path, capsys):
    write_run(tmp_path / "a", [5.0, 4.0], 1)
    write_run(tmp_path / "b", [6.0, 5.0], 9)
    main(CurvesSettings([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c.png")))
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert numbers["at_equal_time"] == {"seconds": 2, "validation_loss": {"a": 4.0, "b": None}}
    assert "minutes: a 4.000, b not measured" in capsys.readouterr().out


def test_a_glob_names_runs_and_each_is_read_once(tmp_path):
    for name in ("bert-0", "rope-0", "rope-1"):
        write_run(tmp_path / name, [5.0], 1)
    (tmp_path / "rope-1.log").touch()
    models, _ = read_runs([str(tmp_path / "rope-?"), str(tmp_path / "*-?")])
    assert {name: list(seeds) for name, seeds in models.items()} == {"rope": [0, 1], "bert": [0]}


def test_two_runs_of_one_name_are_refused(tmp_path):
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "a", [5.0], 1)
    runs = [str(tmp_path / parent / "a") for parent in ("one", "two")]
    with pytest.raises(InputError, match="runs .* got a twice"):
        main(CurvesSettings(runs, str(tmp_path / "c.png")))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="runs .* got .*nothing"):
        main(CurvesSettings([str(tmp_path / "nothing")], str(tmp_path / "c.png")))
    write_run(tmp_path / "young", [], 1)
    with pytest.raises(InputError, match="runs must have logged and evaluated"):
        main(CurvesSettings([str(tmp_path / "young")], str(tmp_path / "c.png")))
    assert not (tmp_path / "c.png").exists()
