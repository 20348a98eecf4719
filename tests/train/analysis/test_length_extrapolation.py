"""Loss against length: one text at every length, three ways to turn, an end to BERT's table."""

import json
from functools import partial
from itertools import product

import numpy as np
import pytest
from transformers import BertConfig

from roformer import RoFormerConfig
from roformer.rotary import compute_inv_freq, compute_rope_parameters
from tiny import refused
from tiny_glue import tiny_model
from train.analysis.length_extrapolation import LengthSettings, main, rescalings, select_sequences
from train.data.batching import SequenceIndex
from train.data.corpus import tokenize_corpus
from train.settings import TextSettings


@pytest.fixture
def long_text(tmp_path):
    """Documents of 10, 200, 130 and 1,000 tokens, counted without special ones."""
    file = tmp_path / "long.txt"
    file.write_text("\n\n".join(" ".join(["the"] * n) for n in (10, 200, 130, 1000)))
    return TextSettings(validation=str(file), cache=str(tmp_path / "tokens"))


@pytest.mark.parametrize("length", [16, 32, 64, 128])
def test_every_length_reads_the_start_of_the_long_documents(length, long_text, tokenizer):
    sequences = SequenceIndex(tokenize_corpus(long_text, "validation", tokenizer), length)
    start, tokens = sequences.locate(select_sequences(sequences, 128, documents=2))
    assert set(tokens) == {length - 2}
    first, second = 10, 10 + 200  # where the documents of 200 and 130 tokens begin
    inside = [(x >= d) & (x + length - 2 <= d + 126) for x in [start] for d in (first, second)]
    assert (inside[0] ^ inside[1]).all()
    assert len(start) == 2 * (126 // (length - 2))


def test_rescaled_theta_divides_the_slowest_angle_and_leaves_the_fastest():
    plain = compute_inv_freq(64)
    found = {
        way: compute_rope_parameters(RoFormerConfig(**changes), None, plain.device)[0]
        for way, changes in rescalings(RoFormerConfig(), 8).items()
    }
    assert list(found) == ["as it is", "positions / s", "theta rescaled"]
    np.testing.assert_allclose(found["positions / s"], plain / 8, rtol=1e-6)
    assert found["theta rescaled"][0] == plain[0] == 1
    np.testing.assert_allclose(found["theta rescaled"][-1], plain[-1] / 8, rtol=1e-6)


def test_only_a_rotation_has_ways_and_only_beyond_training():
    assert list(rescalings(BertConfig(), 4)) == ["as it is"]
    assert list(rescalings(RoFormerConfig(position_encoding="alibi"), 4)) == ["as it is"]
    assert list(rescalings(RoFormerConfig(), 1)) == ["as it is"]
    assert list(rescalings(RoFormerConfig(linear_attention="favor"), 4)) == ["as it is"]
    one_frequency = RoFormerConfig(hidden_size=2, num_attention_heads=1)
    assert list(rescalings(one_frequency, 4)) == ["as it is", "positions / s"]


def test_roformer_goes_on_where_bert_is_refused(long_text, tmp_path, capsys):
    folders = []
    for seed, kind in product((0, 128), ("roformer", "bert")):
        run = tmp_path / "runs" / f"{kind}-{seed}"
        folders.append(tiny_model(run / "model", kind, initializer_range=0.3))
        (run / "settings.yaml").write_text(f"run: {{seed: {seed}}}")
    output = tmp_path / "out" / "lengths.png"
    main(LengthSettings(folders, long_text, [16, 32, 128], 32, documents=3, output=str(output)))
    assert output.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(output.with_suffix(".json").read_text())
    # every length is rescaled by that of training, and reads the text of the longest
    first = [(row["length"], row["sequences"]) for row in rows[:5]]
    assert first == [(16, 3 * 9), (32, 3 * 4), (128, 3), (128, 3), (128, 3)]
    loss = {(x["model"], x["seed"], x["way"], x["length"]): x.get("validation_loss") for x in rows}
    for seed in (0, 128):
        beyond = [loss["roformer", seed, way, 128] for way in rescalings(RoFormerConfig(), 4)]
        assert len(set(beyond)) == 3
        assert None not in beyond
        assert loss["bert", seed, "as it is", 32] is not None
        assert loss["bert", seed, "as it is", 128] is None
    twice = LengthSettings([folders[1], "x/bert-0/model"], long_text, output=str(output))
    refused(partial(main, twice), "models", "got bert-0 twice")
    assert any("64 positions of the bert table" in row.get("refused", "") for row in rows)
    table = output.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    assert "| bert, as it is " in table
    assert table.count("refused") == 1
    assert "| roformer, theta rescaled " in table


def test_a_document_that_just_fills_the_longest_is_read_and_none_shorter(long_text, tokenizer):
    sequences = SequenceIndex(tokenize_corpus(long_text, "validation", tokenizer), 132)
    assert len(select_sequences(sequences, 132, documents=9)) == 3  # of 200, 130 and 1,000 tokens
    too_long = partial(select_sequences, sequences, 4096, documents=2)
    refused(too_long, "corpus.validation", "4094 tokens")
