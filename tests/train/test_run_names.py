"""The name of a model or run is read as its user means it."""

import pytest

from train.run_names import model_name, split_seed


@pytest.mark.parametrize(
    ("place", "name"),
    [("runs/mine/model", "mine"), ("/a/mine/", "mine"), ("user/mine", "mine"), ("model", "model")],
)
def test_a_model_has_the_telling_part_of_its_path_for_a_name(place, name):
    assert model_name(place) == name


def test_a_size_is_no_seed():
    assert split_seed("bert-1") == ("bert", 1)
    for name in ("bert", "roformer-128", "roformer-small"):
        assert split_seed(name) == (name, 0)
