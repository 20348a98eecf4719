"""Loss curves: the picture is written, and runs are compared where both have been."""

import json

import pytest

from train.curves import CurvesSettings, main
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
    assert len(numbers["runs"]["a"]["held_out"]) == 3
    said = capsys.readouterr().out
    assert "at 0.0 M tokens: a 4.000, b 4.500" in said
    assert "minutes: a 3.000, b 5.250" in said


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"runs must hold a log.jsonl, got .*nothing"):
        main(CurvesSettings([str(tmp_path / "nothing")], str(tmp_path / "c.png")))
    write_run(tmp_path / "young", [], 1)
    with pytest.raises(InputError, match="runs must have logged and evaluated"):
        main(CurvesSettings([str(tmp_path / "young")], str(tmp_path / "c.png")))
    assert not (tmp_path / "c.png").exists()
