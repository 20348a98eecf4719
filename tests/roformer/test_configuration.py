"""What a configuration refuses, and what later edits do to it; `test_variants.py` saves them."""

import copy

import pytest
import transformers

from roformer import RoFormerConfig, RoFormerForMaskedLM, RoFormerForMultipleChoice, RoFormerModel
from tiny import ROPES, rope_config

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("num_hidden_layers", {"num_hidden_layers": 2.0}),
        ("hidden_act", {"hidden_act": "gleu"}),
        ("add_cross_attention", {"add_cross_attention": True}),
        ("random_features", {"random_features": 7}),
        ("layer_norm_eps", {"layer_norm_eps": "1e-12"}),
        ("is_decoder", {"is_decoder": "no"}),
        ("position_encoding", {"position_encoding": "rotary"}),
        ("rotary_value", {"position_encoding": "t5", "rotary_value": True}),
        ("position_encoding", {"linear_attention": "elu", "position_encoding": "t5"}),
        ("rotary_value", {"linear_attention": "elu", "rotary_value": True}),
        ("add_cross_attention",
         {"linear_attention": "elu", "is_decoder": True, "add_cross_attention": True}),
    ],
)  # fmt: skip
def test_a_field_that_breaks_its_rule_is_named(key, fields):
    with pytest.raises(ValueError, match=f"^{key} must .*got {fields[key]!r}$"):
        RoFormerConfig(**(SIZES | fields))


@pytest.mark.parametrize("size", [32, 36, 37])
def test_any_hidden_size_makes_a_configuration_and_only_a_model_refuses_it(size):
    """As transformers' class with its default of 12 heads."""
    config = RoFormerConfig(hidden_size=size)
    with pytest.raises(ValueError, match="^hidden_size must be a multiple of 2"):
        RoFormerModel(config)


@pytest.mark.parametrize(
    ("rope", "key", "settings"),
    [
        ("ntk", "rope_type", {}),
        ("default", "factor", {"factor": 2.0}),
        *(("linear", "factor", {"factor": x}) for x in (0, 0.5)),
        ("linear", "factor", {"factor": True}),
        ("linear", "factor", {"factor": None}),
        ("default", "rope_theta", {"rope_theta": 0}),
        ("default", "rope_theta", {"rope_theta": None}),
        ("default", "rope_theta", {"rope_theta": float("inf")}),
        ("yarn", "original_max_position_embeddings", {"original_max_position_embeddings": 0}),
        ("yarn", "beta_fast", {"original_max_position_embeddings": 9, "beta_fast": "x"}),
        ("default", "partial_rotary_factor", {"partial_rotary_factor": 0.45}),
        ("default", "partial_rotary_factor", {"partial_rotary_factor": "0.5"}),
        ("dynamic", "partial_rotary_factor", {"partial_rotary_factor": 0.125}),
    ],
)
def test_a_rope_setting_that_breaks_its_rule_is_named(rope, key, settings):
    value = {"rope_type": rope} | settings
    with pytest.raises(ValueError, match=f"rope_parameters.{key} must .*got ") as error:
        rope_config(rope, **settings)
    assert str(error.value).endswith(repr(value[key]))


@pytest.mark.parametrize(
    ("key", "rope", "fields"),
    [
        ("rotary_value", "yarn", {"rotary_value": True}),
        ("rope_parameters", "linear", {"position_encoding": "none"}),
        ("rope_parameters.rope_type", "yarn", {"linear_attention": "elu"}),
        ("rope_parameters.rope_type", "linear", {"linear_attention": "favor"}),
    ],
)
def test_a_rope_type_that_cannot_be_combined_is_refused(key, rope, fields):
    with pytest.raises(ValueError, match=f"^{key} must "):
        RoFormerConfig(**SIZES, rope_parameters=ROPES[rope], **fields)


def test_another_summary_is_refused_by_the_head_that_reads_it():
    config = RoFormerConfig(**SIZES, summary_type="mean")
    RoFormerForMaskedLM(config)
    with pytest.raises(ValueError, match="summary_type must .*got 'mean'"):
        RoFormerForMultipleChoice(config)


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 500.0), ("partial_rotary_factor", 0.5)])
def test_settings_of_the_rotation_may_be_set_by_their_own_names(name, value, config):
    setattr(config, name, value)
    of_a_model = RoFormerForMaskedLM(config).config
    for changed in (config, RoFormerConfig(**SIZES, **{name: value}), of_a_model):
        assert changed.rope_parameters[name] == value
        assert changed.to_dict()["model_type"] == "roformer_plus"
        assert name not in changed.to_dict()
    setattr(config, name, -1.0)
    with pytest.raises(ValueError, match=f"rope_parameters.{name} must"):
        RoFormerModel(config)


def test_type_and_keys_are_stocks_until_an_edit_that_stock_does_not_know(config):
    known = transformers.RoFormerConfig().to_dict().keys() | {"summary_type", "use_cache"}
    assert config.to_dict().keys() <= known | {"is_decoder", "add_cross_attention"}
    assert config.to_dict()["model_type"] == "roformer"
    config.use_bias = False
    assert config.to_dict()["model_type"] == "roformer_plus"
    config.use_bias = True
    assert config.to_dict()["model_type"] == "roformer"
    config.rope_parameters["rope_theta"] = 500.0
    assert copy.deepcopy(config).to_dict()["model_type"] == "roformer_plus"


def test_given_rope_settings_are_not_changed_and_may_have_their_old_spelling():
    settings = {"rope_type": "linear", "factor": 2.0}
    RoFormerConfig(**SIZES, rope_parameters=settings)
    assert settings == {"rope_type": "linear", "factor": 2.0}
    scaled = RoFormerConfig(**SIZES, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2})
    assert scaled.rope_parameters == {"rope_type": "linear", "factor": 2, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"factor": 4.0}, "factor"),
        ({"rope_thetta": 500.0}, "rope_thetta"),
        ({"rope_type": "dynamc"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
    ],
)
def test_a_misspelt_rope_setting_given_later_is_refused_at_once(value, key, config):
    before = config.rope_parameters
    with pytest.raises(ValueError, match=f"rope_parameters.{key} must"):
        config.rope_parameters = value
    assert config.rope_parameters == before


def test_rope_settings_given_later_keep_the_angles_of_the_weights(config, tmp_path):
    longer = {"rope_type": "dynamic", "factor": 2.0}
    config.rope_parameters = longer
    assert config.rope_parameters == longer | {"rope_theta": 10000.0}
    angles = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config.rope_parameters = angles
    config.rope_parameters = longer
    assert config.rope_parameters == longer | angles
    RoFormerModel(config).save_pretrained(tmp_path)
    model = RoFormerModel.from_pretrained(tmp_path, rope_parameters={"type": "linear", "factor": 3})
    assert model.config.rope_parameters == {"rope_type": "linear", "factor": 3} | angles
    model = RoFormerModel.from_pretrained(tmp_path, rope_parameters={})
    assert model.config.rope_parameters == {"rope_type": "default"} | angles
    with pytest.raises(ValueError, match="rope_parameters.factor must .*got 0.5"):
        RoFormerModel.from_pretrained(tmp_path, rope_parameters=longer | {"factor": 0.5})


@pytest.mark.parametrize(("name", "value"), [("sparse_prediction", True), ("pad_token_id", None)])
def test_a_field_comes_back_from_its_file(name, value, config, tmp_path):
    setattr(config, name, value)
    config.save_pretrained(tmp_path)
    assert getattr(RoFormerConfig.from_pretrained(tmp_path), name) == value
