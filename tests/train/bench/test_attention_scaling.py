"""Cost against length: slopes are fitted where length decides, every point in its own process."""

import json

import pytest

from train.bench import attention_scaling
from train.bench.attention_scaling import MIN_FIT_LENGTH, ScalingSettings, fit_slope, main
from train.settings import InputError


def rows_of(power: float, start: int = MIN_FIT_LENGTH) -> list[dict]:
    rows = [{"length": start * 2**n, "seconds": 1e-9 * (start * 2**n) ** power} for n in range(4)]
    return [{"length": 64, "seconds": 5.0}, *rows]  # overhead, not used for slopes


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_slope_is_the_power(power):
    assert fit_slope(rows_of(power), "seconds") == pytest.approx(power)


def test_one_long_text_has_no_slope():
    assert fit_slope(rows_of(1.0)[:2], "seconds") is None


def test_kinds_are_measured_at_every_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention_scaling, "in_new_process", lambda function, *x: function(*x))
    output = tmp_path / "attention_scaling.png"
    kinds = ["softmax", "favor"]
    monkeypatch.setattr(attention_scaling, "KINDS", kinds)
    main(ScalingSettings([512, 1024], causal=True, rounds=1, output=str(output)))
    assert output.read_bytes().startswith(b"\x89PNG")
    found = json.loads(output.with_suffix(".json").read_text())
    assert [(row["kind"], row["length"]) for row in found["rows"]] == [
        (kind, length) for length in (512, 1024) for kind in kinds
    ]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert (found["causal"], found["slopes"]["favor"]["seconds"]) == (True, None)
    assert "favor, 1024: " in capsys.readouterr().out


def test_what_is_measured_has_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_scaling, "KINDS", ["favor"])
    monkeypatch.setattr(attention_scaling, "peak_bytes", None)  # nothing is measured here
    (row,) = main(ScalingSettings([512], rounds=1, output=str(tmp_path / "attention_scaling.png")))
    assert row["seconds"] > 0
    assert row["megabytes"] > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": [0]}, "lengths .* got 0"),
        ({"rounds": 0}, "rounds .* got 0"),
        ({"output": "x.txt"}, "output .* got x.txt"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong, message):
    with pytest.raises(InputError, match=message):
        ScalingSettings(**wrong)
