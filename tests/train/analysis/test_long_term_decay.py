"""Long-term decay: the paper's bound by its own sum, and scores by the rotation itself."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from roformer.rotary import apply_rotary, compute_inv_freq, rotary_embeddings
from tiny import refused
from tiny_glue import sentences, tiny_model
from train.analysis.long_term_decay import DecaySettings, decay_bound, decay_of_scores, main
from train.settings import TextSettings


@pytest.mark.parametrize(("width", "theta"), [(8, 100.0), (64, 10000.0)])
def test_the_bound_is_the_mean_of_the_partial_sums(width, theta):
    found = decay_bound(np.arange(40.0), width, theta)
    assert found[0] == pytest.approx((width / 2 + 1) / 2)  # all turns are 1: the mean of 1 .. d/2
    for distance in (1, 7, 39):
        turns = np.exp(1j * distance * theta ** (-2 * np.arange(width // 2) / width))
        sums = [abs(turns[:j].sum()) for j in range(1, width // 2 + 1)]
        assert found[distance] == pytest.approx(np.mean(sums))


def test_scores_are_those_of_rotated_queries_and_keys():
    query, key = torch.randn(2, 30, 16)
    theta = compute_inv_freq(16)
    found = decay_of_scores(query, key, np.arange(20.0), theta)
    for distance in (0, 1, 19):
        table = rotary_embeddings(torch.tensor([distance]), theta)
        turned = apply_rotary(query[:, None, None], *table)[:, 0, 0]
        cosines = torch.nn.functional.cosine_similarity(turned, key)
        assert found["mean"][distance] == pytest.approx(cosines.mean().item(), abs=1e-6)
        assert found["size"][distance] == pytest.approx(cosines.abs().mean().item(), abs=1e-6)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(40, seed=0)[0]))
    return TextSettings(validation=str(tmp_path / "text.txt"), cache=str(tmp_path / "tokens"))


def test_a_model_stands_beside_its_random_beginning(corpus, tmp_path, capsys):
    changes = {"num_hidden_layers": 2, "initializer_range": 0.5}
    folder = tiny_model(tmp_path / "a" / "model", "roformer", **changes)
    output = tmp_path / "decay.png"
    main(DecaySettings([folder], corpus, 32, distances=50, output=str(output)))
    assert output.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert list(numbers["scores"]) == ["random, apart", "random, equal", "a, trained",
                                       "a, untrained"]  # fmt: skip
    for row in numbers["scores"].values():
        assert len(row["mean"]) == len(numbers["distances"]) == 51
        assert np.abs(row["mean"]).max() <= 1
        assert (np.abs(row["mean"]) <= np.array(row["size"]) + 1e-9).all()
    assert numbers["scores"]["random, equal"]["mean"][0] == pytest.approx(1)
    assert numbers["scores"]["a, trained"] != numbers["scores"]["a, untrained"]
    assert "score, a, trained: " in capsys.readouterr().out


def test_what_does_not_rotate_and_another_kind_of_figure_are_refused(corpus, tmp_path):
    for name, kind, fields in (
        ("bert", "bert", {}),
        ("none", "roformer", {"position_encoding": "none"}),
        ("elu", "roformer", {"linear_attention": "elu"}),
        ("half", "roformer", {"rope_interleave": False}),
    ):
        folder = tiny_model(tmp_path / name, kind, **fields)
        settings = DecaySettings([folder], corpus, output=str(tmp_path / "x.png"))
        refused(partial(main, settings), "models must be RoFormers")
    refused(partial(DecaySettings, output="x.txt"), "output", "got x.txt")
