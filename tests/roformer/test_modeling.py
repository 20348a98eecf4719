"""Our RoFormer beside transformers' own, on the same checkpoints, and what ours does better."""

import copy
import logging

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import roformer
import tiny
from roformer import RoFormerForCausalLM, RoFormerForMaskedLM, RoFormerModel
from roformer.configuration_roformer import POSITION_ENCODINGS
from roformer.heads import RoFormerClassificationHead
from tiny import assert_near, build, enlarge, hidden, inputs_with_labels, rope_config, tiny_config

PAIRS = [
    (head, getattr(transformers, head.__name__))
    for head in (*tiny.HEADS, RoFormerModel)
    if head is not RoFormerForCausalLM or tiny.STOCK_IS_CAUSAL
]
CHANGES = {"rotary_value": True, "embedding_size": 16, "tie_word_embeddings": False}
MORE = {"num_labels": 5, "sparse_prediction": True}
FIELDS = [{}, *({name: value} for name, value in CHANGES.items()), CHANGES | MORE]


def outputs_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Whatever a head returns, padding left out, as a tuple that the configuration asks for."""
    model.config.return_dict = False
    mask, outputs = inputs["attention_mask"].bool(), model(**inputs)
    assert type(outputs) is tuple
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    return [value[mask] if value.shape[:2] == mask.shape else value for value in tensors]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_checkpoints_give_equal_outputs_and_gradients(ours, stock, fields, saver, tmp_path):
    first, second = (ours, stock) if saver == "ours" else (stock, ours)
    values = {"vocab_size": 60, "summary_type": "first", "is_decoder": ours is RoFormerForCausalLM}
    saved = enlarge(first(first.config_class(**tiny.TINY_MODEL | values | fields)))
    saved.save_pretrained(tmp_path)
    loaded, report = second.from_pretrained(tmp_path, output_loading_info=True)
    missing = report.pop("missing_keys")
    assert not any(report.values())
    assert all(name.endswith("encoder.embed_positions.weight") for name in missing)
    assert len(missing) == (saver == "ours")
    loaded.eval()
    torch.manual_seed(1)
    mask = (torch.arange(40) < torch.tensor([[30], [12], [40]])).long()
    inputs = inputs_with_labels(ours, torch.randint(0, 60, (3, 40)), mask)
    inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    compared = [outputs_of(model, inputs) for model in (saved, loaded)]
    assert len(compared[0]) == len(compared[1])
    for a, b in zip(*compared):
        largest = a.abs().max().item()
        assert largest > 0.1
        torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, largest), rtol=0)
    for outputs in compared:
        sum(x.sum() for x in outputs if x.requires_grad).backward()
    gradients = {n: p.grad for n, p in saved.named_parameters() if p.grad is not None}
    assert gradients
    for name, gradient in gradients.items():
        limit = 1e-4 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(loaded.get_parameter(name).grad, gradient, atol=limit, rtol=0)


def test_multiple_choice_reads_the_last_token_as_stock_does(config, tmp_path):
    ours = build(roformer.RoFormerForMultipleChoice, config)
    ours.save_pretrained(tmp_path)
    stock = transformers.RoFormerForMultipleChoice.from_pretrained(tmp_path).eval()
    ids = torch.randint(1, 60, (2, 3, 9))  # stock takes the last token of the row: no padding here
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"type_vocab_size": 0}, "token_type"),
        ({"use_bias": False}, "bias"),
        ({"norm_type": "rms_norm"}, "LayerNorm"),
    ],
)
def test_variants_have_no_weights_that_they_do_not_use(fields, part):
    model = RoFormerForMaskedLM(tiny_config(**fields))
    assert not any(part in name for name, _ in model.named_parameters())


def test_rms_norm_is_the_formula_without_gain(config):
    config.norm_type = "rms_norm"
    x = torch.randn(3, 32, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()
    torch.testing.assert_close(RoFormerModel(config).embeddings.LayerNorm(x), expected)


@pytest.mark.parametrize("rotary_value", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_other_pairing_of_coordinates_is_the_same_model(rotary_value, share, tmp_path):
    config = rope_config("default", partial_rotary_factor=share)
    config.rotary_value = rotary_value
    model, ids = enlarge(RoFormerForMaskedLM(config)), torch.randint(0, 60, (2, 30))
    state = model.state_dict()
    halves = roformer.convert_rope_layout(state, config)
    name = "roformer.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(state[name], halves[name])
    other = copy.copy(config)
    other.rope_interleave = False
    converted = RoFormerForMaskedLM(other).eval()
    converted.load_state_dict(halves)
    converted.save_pretrained(tmp_path)
    edited = RoFormerForMaskedLM(copy.copy(config)).eval()
    edited.load_state_dict(halves)
    edited.config.rope_interleave = False
    for one in (converted, edited, RoFormerForMaskedLM.from_pretrained(tmp_path).eval()):
        assert_near(one(ids).logits, model(ids).logits, 1e-4)
    back = roformer.convert_rope_layout(halves, other)
    assert all(torch.equal(state[name], value) for name, value in back.items())


@pytest.mark.parametrize("fields", [{"position_encoding": "alibi"}, {"linear_attention": "favor"}])
def test_what_has_no_order_of_coordinates_is_not_converted(fields):
    model = RoFormerModel(tiny_config(**fields))
    with pytest.raises(ValueError, match="^position_encoding must be rope"):
        roformer.convert_rope_layout(model.state_dict(), model.config)


@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
def test_a_configuration_of_stocks_class_will_do(ours, stock, config, tmp_path):
    model = ours(config)
    model.save_pretrained(tmp_path)
    stock_config = transformers.RoFormerConfig.from_pretrained(tmp_path)
    again = ours.from_pretrained(tmp_path, config=stock_config, attn_implementation="eager")
    assert type(again.config) is roformer.RoFormerConfig
    assert again.config._attn_implementation == "eager"
    assert again.config.to_dict()["summary_type"] == "last"
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    with pytest.raises(ValueError, match="config must be a RoFormerConfig, got .*BertConfig"):
        ours(transformers.BertConfig())


@pytest.mark.parametrize("encoding", [x for x in POSITION_ENCODINGS if x != "none"])
def test_position_ids_are_obeyed(encoding):
    model = build(RoFormerModel, tiny_config(position_encoding=encoding))
    ids, order = torch.randint(0, 60, (2, 30)), torch.randperm(30)
    straight = hidden(model, ids)
    assert_near(hidden(model, ids[:, order], position_ids=order), straight[:, order], 1e-4)
    gaps = torch.arange(30) * 2
    stretched = hidden(model, ids, position_ids=gaps)
    assert (stretched - straight).abs().max() > 0.1
    sparse = torch.randint(0, 60, (2, 59))
    sparse[:, gaps] = ids
    mask = torch.zeros(2, 59)
    mask[:, gaps] = 1  # the same gaps, as masked tokens in between
    assert_near(stretched, hidden(model, sparse, attention_mask=mask)[:, gaps], 1e-4)


@pytest.mark.parametrize("rope", ["default", *tiny.ROPES])
@pytest.mark.parametrize("shift", [700, 100_000, -50, -7])
def test_shifting_all_positions_changes_nothing(rope, shift):
    model = build(RoFormerModel, rope_config(rope))
    ids = torch.randint(0, 60, (2, 30))
    assert_near(hidden(model, ids, position_ids=torch.arange(30) + shift), hidden(model, ids), 1e-4)


def test_the_length_that_counts_is_the_rows():
    model = build(RoFormerModel, rope_config("dynamic"))
    short, long = torch.randint(0, 60, (1, 12)), torch.randint(0, 60, (1, 200))
    separate = [hidden(model, ids) for ids in (short, long)]
    padded = torch.cat((F.pad(short, (0, 188)), long))
    mask = torch.arange(200) < torch.tensor([[12], [200]])
    together = hidden(model, padded, attention_mask=mask)
    assert_near(together[:1, :12], separate[0], 2e-4)
    assert_near(together[1:], separate[1], 2e-4)
    torch.testing.assert_close(hidden(model, short), separate[0])  # nothing was stored
    left = hidden(model, padded.flip(1), attention_mask=mask.flip(1))[:1, -12:]
    assert_near(left, hidden(model, short.flip(1)), 2e-4)


@pytest.mark.parametrize("rope", tiny.ROPES)
def test_rope_settings_reach_the_attention(rope):
    ids = torch.randint(0, 60, (1, 200))
    outputs = [build(RoFormerModel, rope_config(r))(ids)[0] for r in ("default", rope)]
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


def test_casting_the_model_leaves_angles_exact(config):
    seen = []
    model = RoFormerModel(config).bfloat16()
    model.encoder.layer[0].register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    model(torch.randint(0, 60, (1, 1024)))
    cos, sin = seen[0]
    assert cos.dtype == sin.dtype == torch.float32
    assert len(cos[0, :, 1].unique()) > 1000  # in bfloat16 positions would collide


def test_a_state_of_stock_loads_strictly(config):
    stock = transformers.RoFormerModel(transformers.RoFormerConfig(**config.to_dict()))
    state = stock.state_dict()
    RoFormerModel(config).load_state_dict(state)
    assert "encoder.embed_positions.weight" in state  # the caller's own stays whole
    with pytest.raises(RuntimeError, match="Unexpected key"):
        RoFormerModel(config).load_state_dict(state | {"more": torch.zeros(1)})


def test_a_checkpoint_goes_on_as_a_causal_model_which_says_so(config, tmp_path, caplog):
    masked = build(RoFormerForMaskedLM, config)
    masked.save_pretrained(tmp_path)
    causal, report = RoFormerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    weights = masked.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in causal.state_dict().items())
    causal.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        RoFormerForCausalLM.from_pretrained(tmp_path)
        assert not caplog.records
        RoFormerForMaskedLM.from_pretrained(tmp_path, is_decoder=False)
        assert not caplog.records
        for head in (RoFormerForMaskedLM, roformer.RoFormerForSequenceClassification):
            caplog.clear()
            head.from_pretrained(tmp_path)
            assert "config.is_decoder is True" in caplog.text


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_heads_never_read_padding(side, config):
    ids, sides = torch.randint(1, 60, (1, 10)), (6, 0) if side == "left" else (0, 6)
    padded, mask = F.pad(ids, sides), F.pad(torch.ones_like(ids), sides)
    model = build(roformer.RoFormerForSequenceClassification, config)
    assert_near(model(padded, attention_mask=mask).logits, model(ids).logits, 1e-4)
    for which in ("first", "last"):
        config.summary_type = which
        model = build(roformer.RoFormerForMultipleChoice, config)
        found = model(padded[:, None], attention_mask=mask[:, None]).logits
        assert_near(found, model(ids[:, None]).logits, 1e-4)


def test_wholly_masked_batches_are_computed(kernel, config):
    model = RoFormerModel._from_config(config, attn_implementation=kernel).eval()
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert model(ids, attention_mask=torch.zeros_like(ids))[0].isfinite().all()


def test_heads_of_a_decoder_that_predict_no_next_token_keep_no_cache(config):
    config.is_decoder = True
    model = RoFormerForMaskedLM(config)
    seen = []
    model.roformer.register_forward_hook(lambda m, args, out: seen.append(out.past_key_values))
    model(torch.zeros(1, 5, dtype=torch.long))
    assert seen == [None]


@pytest.mark.parametrize("fields", [{}, {"embedding_size": 16}, {"eos_token_id": 80}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_survives_saving(tied, fields, tmp_path):
    model = build(RoFormerForMaskedLM, tiny_config(tie_word_embeddings=tied, **fields))
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 70, (2, 9))
    for package in (roformer, transformers):
        again = package.RoFormerForMaskedLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_weights_can_stay_on_disk(config, tmp_path):
    model = build(RoFormerForMaskedLM, config)
    model.save_pretrained(tmp_path / "model")
    places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offloaded"}
    lazy = RoFormerForMaskedLM.from_pretrained(tmp_path / "model", **places)
    ids = torch.randint(0, 60, (2, 9))
    torch.testing.assert_close(lazy(ids).logits, model(ids).logits)


def test_token_types_of_one_row_are_those_of_all(kernel, config):
    model = build(RoFormerModel, config, kernel)
    ids, mask = torch.randint(5, 60, (3, 6)), torch.ones(3, 6)
    types = torch.tensor([[0] * 3 + [1] * 3])
    mask[1, 4:] = 0
    whole = model(ids, mask, types.expand(3, -1)).last_hidden_state
    torch.testing.assert_close(model(ids, mask, types).last_hidden_state, whole)


def test_importing_changes_auto_classes_for_the_second_type_only(config, tmp_path):
    RoFormerForMaskedLM(config).save_pretrained(tmp_path / "stock")
    config.norm_type = "rms_norm"
    RoFormerForMaskedLM(config).save_pretrained(tmp_path / "plus")
    code = """
import sys, transformers
auto = transformers.AutoModelForMaskedLM
load = lambda name: auto.from_pretrained(f"{sys.argv[1]}/{name}")
try:
    load("plus")
except ValueError as error:
    assert "roformer_plus" in str(error)
else:
    raise AssertionError("loaded by stock")
import roformer
assert type(load("plus")) is roformer.RoFormerForMaskedLM
assert load("plus").config.norm_type == "rms_norm"
assert type(load("stock")) is transformers.RoFormerForMaskedLM
roformer.use_for_auto_classes()
assert type(load("stock")) is roformer.RoFormerForMaskedLM
if transformers.__version__ != "5.17.0":  # ignores registrations of its own configurations
    config = transformers.RoFormerConfig(num_hidden_layers=1)
    assert type(auto.from_config(config)) is roformer.RoFormerForMaskedLM
"""
    tiny.command("-c", code, tmp_path)


def test_transformers_classes_load_quietly_after_the_auto_classes_build_ours():
    code = "import transformers as t, roformer; roformer.use_for_auto_classes(); t.RoFormerModel"
    done = tiny.command("-c", code)
    assert (done.stdout, done.stderr) == ("", "")


def test_every_auto_class_of_stocks_heads_builds_ours(config):
    autos = [getattr(transformers, name) for name in transformers.__all__ if name[:4] == "Auto"]
    mappings = {auto: getattr(auto, "_model_mapping", None) or {} for auto in autos}
    heads = {auto: x.get(transformers.RoFormerConfig, None) for auto, x in mappings.items()}
    built = {auto: auto.from_config(config) for auto, head in heads.items() if head}
    assert len(built) == 8  # seven heads, one of them as a text encoder, too
    for auto, model in built.items():
        assert type(model) is getattr(roformer, heads[auto].__name__)


@pytest.mark.parametrize("training", [False, True])
def test_each_dropout_module_decides_for_itself(training, kernel, config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.5
    ids = torch.arange(5, 17)[None]
    heads = roformer.RoFormerForSequenceClassification, roformer.RoFormerForTokenClassification
    for head in heads:
        model = build(head, config, kernel).train(training)
        dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        assert len(dropouts) == 2 + 3 * config.num_hidden_layers
        for used in (None, *dropouts):
            for module in dropouts:
                module.train(module is used)
            is_random = not torch.equal(model(ids).logits, model(ids).logits)
            assert is_random == (used is not None)


def test_the_classification_head_drops_before_both_projections(config):
    config.hidden_dropout_prob = 0.5
    head, given = RoFormerClassificationHead(config).train(), []
    for layer in (head.dense, head.out_proj):
        layer.register_forward_pre_hook(lambda layer, args: given.append(args[0]))
    head(torch.ones(8, config.hidden_size))
    assert [0.3 < (x == 0).float().mean() < 0.7 for x in given] == [True, True]
