"""What a configuration refuses, and under which of its two model types it is saved."""

import copy
import json
import pickle  # a configuration must survive it; nothing here reads one from a file
import subprocess
import sys

import pytest
import torch
import transformers

from roformer import RoFormerConfig, RoFormerForMaskedLM, RoFormerForMultipleChoice, RoFormerModel
from tiny import ROPES, rope_config

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2}
FOREIGN = [
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 500.0}},
    {"rope_parameters": {"partial_rotary_factor": 0.5}},
    {"rope_interleave": False},
    {"use_bias": False},
    {"norm_type": "rms_norm"},
    {"type_vocab_size": 0},
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 33}, "hidden_size must be a multiple of 2 \\* num_att.* = 4.*got 33"),
        ({"hidden_size": 34}, "hidden_size must be a multiple .* got 34"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob must be .* below 1, got 1.0"),
        ({"pad_token_id": 60}, "pad_token_id must be None or .* = 59, got 60"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps must be a number >= 0, got -1.0"),
        ({"initializer_range": -0.1}, "initializer_range must be a number >= 0, got -0.1"),
        ({"type_vocab_size": -1}, "type_vocab_size must be an integer of at least 0, got -1"),
        ({"hidden_act": "gleu"}, "hidden_act must be an activation of transformers, got 'gleu'"),
        ({"norm_type": "rms"}, "norm_type must be one of layer_norm, rms_norm, got 'rms'"),
        ({"add_cross_attention": True}, "add_cross_attention must be False .* is_decoder=True"),
        ({"hidden_size": "32"}, "hidden_size must be an integer of at least 1, got '32'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be an integer .*, got 2.0"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
        ({"hidden_dropout_prob": "0.1"}, "hidden_dropout_prob must be a number .*, got '0.1'"),
        ({"rotary_value": "yes"}, "rotary_value must be True or False, got 'yes'"),
        ({"rope_interleave": "half"}, "rope_interleave must be True or False, got 'half'"),
        ({"head_dim": 8}, "head_dim must be absent, or .* = 16, got 8"),
        ({"rotary_value": True, "rope_parameters": ROPES["yarn"] | {"rope_type": "yarn"}},
         "rotary_value must be False with rope_type yarn, whose factor is no rotation, got True"),
    ],
)  # fmt: skip
def test_impossible_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RoFormerConfig(**(SIZES | fields))


@pytest.mark.parametrize(
    ("rope", "fields", "message"),
    [
        ("ntk", {}, "rope_type must be one of default, linear, .*, got 'ntk'"),
        ("default", {"factor": 2.0}, "factor must be absent with rope_type default, got 2.0"),
        ("linear", {"factor": 0.5}, "factor must be a number >= 1, got 0.5"),
        ("linear", {"factor": "2"}, "factor must be a number >= 1, got '2'"),
        ("linear", {"factro": 2.0}, "factro must be absent with rope_type linear.*spelling"),
        ("default", {"rope_theta": 0}, "rope_theta must be a number > 1, got 0"),
        ("default", {"partial_rotary_factor": 0.45},
         "partial_rotary_factor must leave an even number .* of the 16 coord.*got 0.45"),
        ("dynamic", {"partial_rotary_factor": 0.125}, "partial_rotary_factor .*least 4 .*0.125"),
        ("longrope", {"long_factor": [1.0]}, "long_factor must be a list of 8 positive numbers"),
        ("longrope", {"short_factor": ["a"] * 8}, "short_factor must be a list of 8 positive"),
        ("longrope", {"original_max_position_embeddings": 1}, "original_max.* must be a num.* > 1"),
        ("default", {"rope_theta": None}, "rope_theta must be given with rope_type default"),
        ("default", {"rope_theta": float("inf")}, "rope_theta must be a number > 1, got inf"),
        ("linear", {"factor": True}, "factor must be a number >= 1, got True"),
        ("default", {"partial_rotary_factor": "0.5"}, "partial_rotary_factor must .*got '0.5'"),
        ("yarn", {"attention_factor": 0}, "attention_factor must be a number > 0, got 0"),
        ("yarn", {"beta_fast": 1, "beta_slow": 2}, "beta_fast must be above beta_slow = 2, got 1"),
        ("yarn", {"truncate": "no"}, "truncate must be True or False, got 'no'"),
        ("llama3", {"low_freq_factor": 0}, "low_freq_factor must be a number > 0, got 0"),
        ("llama3", {"high_freq_factor": 0.5},
         "high_freq_factor must be above low_freq_factor = 1.0, got 0.5"),
    ],
)  # fmt: skip
def test_impossible_rope_settings_are_refused_by_name(rope, fields, message):
    with pytest.raises(ValueError, match=f"rope_parameters.{message}"):
        rope_config(rope, **fields)


@pytest.mark.parametrize(("rope", "key"), [("linear", "factor"), ("longrope", "short_factor")])
def test_missing_rope_settings_are_named(rope, key):
    settings = {k: v for k, v in ROPES[rope].items() if k != key} | {"rope_type": rope}
    with pytest.raises(ValueError, match=f"{key} must be given with rope_type {rope}, got None"):
        RoFormerConfig(**SIZES, rope_parameters=settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"summary_use_proj": True}, "summary_use_proj must be absent.*got True"),
        ({"summary_type": "mean"}, "summary_type must be one of first, last, got 'mean'"),
    ],
)
def test_another_summary_is_refused_by_the_head_that_reads_it(fields, message):
    config = RoFormerConfig(**SIZES, **fields)
    RoFormerForMaskedLM(config)
    with pytest.raises(ValueError, match=message):
        RoFormerForMultipleChoice(config)


def test_fields_edited_after_construction_are_checked_when_a_model_is_built(config):
    config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="num_hidden_layers must be an integer .*, got 0"):
        RoFormerForMaskedLM(config)


@pytest.mark.parametrize("fields", FOREIGN, ids=str)
def test_what_stock_cannot_express_is_saved_as_the_second_type(fields, tmp_path):
    config = RoFormerConfig(**SIZES, **fields)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "roformer_plus"
    for again in (
        RoFormerConfig.from_pretrained(tmp_path),
        transformers.AutoConfig.from_pretrained(tmp_path),
        transformers.AutoConfig.for_model(**saved),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),  # as multiprocessing hands it to a worker
    ):
        assert type(again) is RoFormerConfig
        assert {k: getattr(again, k) for k in fields} == {k: getattr(config, k) for k in fields}
        assert again.to_dict()["model_type"] == "roformer_plus"


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 500.0), ("partial_rotary_factor", 0.5)])
def test_settings_of_the_rotation_may_be_set_by_their_own_names(name, value, config, tmp_path):
    config.save_pretrained(tmp_path)
    setattr(config, name, value)
    for changed in (
        config,
        RoFormerConfig(**SIZES, **{name: value}),
        RoFormerForMaskedLM(config).config,
    ):
        assert changed.rope_parameters[name] == value
        assert not changed.is_stock
        assert name not in changed.to_dict()
    loaded = RoFormerConfig.from_pretrained(tmp_path, **{name: value})
    assert getattr(loaded, name) == loaded.rope_parameters[name] == value
    with pytest.raises(ValueError, match=f"rope_parameters.{name} must"):
        setattr(config, name, -1.0)
    assert config.rope_parameters[name] == value


def test_the_type_follows_later_edits(config):
    assert config.to_dict()["model_type"] == "roformer"
    config.use_bias = False
    assert config.to_dict()["model_type"] == "roformer_plus"
    config.use_bias = True
    assert config.to_dict()["model_type"] == "roformer"
    config.rope_parameters["rope_theta"] = 500.0
    assert copy.deepcopy(config).to_dict()["model_type"] == "roformer_plus"


def test_a_stock_configuration_gets_no_key_that_stock_does_not_know(config):
    known = transformers.RoFormerConfig().to_dict().keys() | {"summary_type", "use_cache"}
    assert config.to_dict().keys() <= known | {"is_decoder", "add_cross_attention"}


def test_the_callers_rope_settings_are_not_changed():
    settings = {"rope_type": "linear", "factor": 2.0}
    RoFormerConfig(**SIZES, rope_parameters=settings)
    assert settings == {"rope_type": "linear", "factor": 2.0}


def test_rope_settings_given_later_are_completed_and_checked(config, tmp_path):
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert config.rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(ValueError, match="factor must be given with rope_type linear"):
        config.rope_parameters = {"rope_type": "linear"}
    assert config.rope_parameters["rope_type"] == "dynamic"
    config.rope_parameters = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}  # what the weights know stays
    assert (config.rope_theta, config.partial_rotary_factor) == (500.0, 0.5)
    RoFormerModel(config).save_pretrained(tmp_path / "trained")
    model = RoFormerModel.from_pretrained(tmp_path / "trained", rope_parameters={})
    assert model.config.rope_parameters == {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5
    }  # fmt: skip
    config.rope_parameters = None
    assert config.is_stock
    RoFormerModel(config).save_pretrained(tmp_path)
    longer = {"rope_type": "linear", "factor": 2.0}
    model = RoFormerModel.from_pretrained(tmp_path, rope_parameters=longer)
    assert model.config.rope_parameters == longer | {"rope_theta": 10000.0}
    model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="factor must be a number >= 1, got 0.5"):
        RoFormerModel.from_pretrained(tmp_path, rope_parameters=longer | {"factor": 0.5})


def test_old_spellings_of_rope_settings_are_understood():
    scaled = RoFormerConfig(**SIZES, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2})
    rope = {"rope_type": "linear", "factor": 2, "rope_theta": 500.0}
    assert scaled.rope_parameters == rope


def test_a_folder_without_summary_type_means_the_last_token(config, tmp_path):
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    assert RoFormerConfig.from_pretrained(tmp_path).summary_type == "first"
    fields = json.loads(path.read_text())
    assert fields.pop("summary_type") == "first"
    path.write_text(json.dumps(fields))
    assert RoFormerConfig.from_pretrained(tmp_path).summary_type == "last"
    assert RoFormerConfig.from_json_file(path).summary_type == "last"


def test_stock_auto_classes_refuse_the_second_type_until_roformer_is_imported(tmp_path):
    RoFormerForMaskedLM(
        RoFormerConfig(**SIZES, num_hidden_layers=1, intermediate_size=8, norm_type="rms_norm")
    ).save_pretrained(tmp_path)
    code = f"""
import transformers
load = lambda: transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})
try:
    load()
except ValueError as error:
    assert "roformer_plus" in str(error)
else:
    raise AssertionError("loaded by stock")
import roformer
assert type(load()) is roformer.RoFormerForMaskedLM
assert load().config.norm_type == "rms_norm"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
