"""The name of a model or run is read as its user means it."""

import pytest

from train.run_names import model_and_seed, model_name


@pytest.mark.parametrize(
    ("place", "name"),
    [("runs/mine/model", "mine"), ("/a/mine/", "mine"), ("user/mine", "mine"), ("model", "model")],
)
def test_a_model_has_the_telling_part_of_its_path_for_a_name(place, name):
    assert model_name(place) == name


@pytest.mark.parametrize("place", ["", "model"])
def test_a_number_in_a_name_is_a_seed_only_if_it_is_the_seed_of_the_run(place, tmp_path):
    for name, seed in (("bert-1", 1), ("roformer-12", 0), ("big-128", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.yaml").write_text(f"run: {{seed: {seed}}}")
    names = ("bert-1", "roformer-12", "big-128", "unset-2", "unset-512", "bert_L-4_H-256_A-4")
    found = [model_and_seed(str(tmp_path / name / place)) for name in names]  # three without one
    expected = [("bert", 1), ("roformer-12", 0), ("big", 128), ("unset", 2), ("unset-512", 0)]
    assert found == [*expected, (names[-1], 0)]
