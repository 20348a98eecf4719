"""Our RoFormer beside transformers' own, on the same checkpoints, and what ours does better."""

import logging

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import roformer
from roformer import (
    RoFormerConfig,
    RoFormerForCausalLM,
    RoFormerForMaskedLM,
    RoFormerForMultipleChoice,
    RoFormerForQuestionAnswering,
    RoFormerForSequenceClassification,
    RoFormerForTokenClassification,
    RoFormerModel,
)
from roformer.heads import RoFormerClassificationHead
from tiny import ROPES, STOCK_IS_CAUSAL, command, enlarge, rope_config

PAIRS = [
    (getattr(roformer, name), getattr(transformers, name))
    for name in roformer.__all__
    if name.startswith("RoFormerFor") or name == "RoFormerModel"
    if name != "RoFormerForCausalLM" or STOCK_IS_CAUSAL
]
VARIANTS = [
    {},
    {"rotary_value": True},
    {"embedding_size": 16},
    {"tie_word_embeddings": False},
    {"embedding_size": 16, "rotary_value": True, "tie_word_embeddings": False, "num_labels": 5},
]


def batch(vocab: int = 60, length: int = 40) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, 30:] = 0
    mask[1, 12:] = 0
    types = torch.randint(0, 2, (3, length))
    ids = torch.randint(0, vocab, (3, length))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def inputs_for(model: type, stock: bool = False) -> dict[str, torch.Tensor]:
    """Arguments with labels, shaped for that head; the position of padding where stock obeys it."""
    inputs = batch()
    name = model.__name__
    if "MaskedLM" in name or "CausalLM" in name:
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        return inputs | {"labels": labels}
    if "TokenClassification" in name:
        labels = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
        return inputs | {"labels": labels}
    if "SequenceClassification" in name:
        return inputs | {"labels": torch.tensor([0, 1, 1])}
    if "QuestionAnswering" in name:
        return inputs | {
            "start_positions": torch.tensor([3, 0, 39]),
            "end_positions": torch.tensor([5, 11, 99]),  # beyond the text: left out of the loss
        }
    if "MultipleChoice" in name:
        choices = {k: torch.stack((v, v.flip(0)), dim=1) for k, v in inputs.items()}
        return choices | {"labels": torch.tensor([0, 1, 1])}
    return inputs


def fields_for(model: type, fields: dict) -> dict:
    return fields | ({"is_decoder": True} if "CausalLM" in model.__name__ else {})


def outputs_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Whatever a head returns, padding left out."""
    mask = inputs["attention_mask"].bool()
    found = []
    for value in model(**inputs, return_dict=False):
        if isinstance(value, torch.Tensor):
            per_token = value.ndim >= 2 and value.shape[:2] == mask.shape
            found.append(value[mask] if per_token and mask.ndim == 2 else value)
    return found


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_checkpoints_give_equal_outputs_and_gradients_both_ways(
    ours, stock, fields, saver, config, tmp_path
):
    first, second = (ours, stock) if saver == "ours" else (stock, ours)
    values = {
        k: v for k, v in config.to_diff_dict().items() if k not in ("model_type", "num_labels")
    }
    saved = enlarge(first(first.config_class(**(values | fields_for(ours, fields)))))
    saved.save_pretrained(tmp_path)
    loaded, report = second.from_pretrained(tmp_path, output_loading_info=True)
    missing = report.pop("missing_keys")
    assert not any(report.values())
    assert all(name.endswith("encoder.embed_positions.weight") for name in missing)
    assert len(missing) == (saver == "ours")
    loaded.eval()
    inputs = inputs_for(ours)
    compared = [outputs_of(model, inputs) for model in (saved, loaded)]
    assert len(compared[0]) == len(compared[1])
    for a, b in zip(*compared):
        largest = a.abs().max().item()
        assert largest > 0.1
        torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, largest), rtol=0)
    for outputs in compared:
        sum(x.sum() for x in outputs if x.requires_grad).backward()
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (saved, loaded)]
    assert any(g is not None for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        if gradient is not None:
            largest = gradient.abs().max().item()
            other = gradients[1][name]
            torch.testing.assert_close(gradient, other, atol=1e-4 * max(1.0, largest), rtol=0)


def test_logits_are_stocks_up_to_the_end_of_its_table(config):
    config.max_position_embeddings = 1536
    ours = enlarge(RoFormerModel(config))
    stock = transformers.RoFormerModel(transformers.RoFormerConfig(**config.to_dict())).eval()
    stock.load_state_dict(ours.state_dict(), strict=False)
    ids = torch.randint(0, 60, (1, 1536))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], stock(ids)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("which", ["first", "last"])
def test_multiple_choice_reads_the_token_that_stock_reads(which, config):
    config.summary_type = which
    ours = enlarge(RoFormerForMultipleChoice(config))
    stock = transformers.RoFormerForMultipleChoice(
        transformers.RoFormerConfig(**config.to_dict())
    ).eval()
    stock.load_state_dict(ours.state_dict(), strict=False)
    ids = torch.randint(1, 60, (2, 3, 9))  # stock takes the last token of the row: no padding here
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{"type_vocab_size": 0}, {"use_bias": False}], ids=str)
def test_variants_keep_their_weights_and_have_no_others(fields, config, tmp_path):
    values = {k: v for k, v in config.to_diff_dict().items() if k != "model_type"}
    model = enlarge(RoFormerForMaskedLM(RoFormerConfig(**(values | fields))))
    names = dict(model.named_parameters())
    if "use_bias" in fields:
        assert not any(name.endswith("bias") for name in names)
    else:
        assert not any("token_type" in name for name in names)
    model.save_pretrained(tmp_path)
    again, report = RoFormerForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    ids = torch.randint(0, 60, (2, 9))
    torch.testing.assert_close(model(ids).logits, again(ids).logits)


def test_rms_norm_is_the_formula_without_gain(config):
    config.norm_type = "rms_norm"
    model = RoFormerModel(config)
    assert not any("LayerNorm" in name for name, _ in model.named_parameters())
    x = torch.randn(3, 32, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()
    torch.testing.assert_close(model.embeddings.LayerNorm(x), expected)


@pytest.mark.parametrize("fields", [{}, {"rotary_value": True}], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_other_pairing_of_coordinates_is_the_same_model(fields, share, tmp_path):
    config = rope_config("default", partial_rotary_factor=share)
    config.rotary_value = fields.get("rotary_value", False)
    model = enlarge(RoFormerForMaskedLM(config))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 60, (2, 30))
    expected = model(ids).logits
    model.set_rope_interleave(False)
    assert not torch.equal(
        before["roformer.encoder.layer.0.attention.self.query.weight"],
        model.roformer.encoder.layer[0].attention.self.query.weight,
    )
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-5)
    model.save_pretrained(tmp_path)
    again = RoFormerForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, expected, atol=1e-4, rtol=1e-5)
    model.set_rope_interleave(True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_part_that_was_converted_is_saved_as_what_it_is(config, tmp_path):
    model = enlarge(RoFormerForMaskedLM(config))
    ids = torch.randint(0, 60, (2, 30))
    model.roformer.set_rope_interleave(False)
    model.save_pretrained(tmp_path)
    again = RoFormerForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.eval()(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_adapters_are_not_permuted_with_the_weights(config):
    model = RoFormerModel(config)
    attention = model.encoder.layer[1].attention.self
    attention.key = nn.Sequential(attention.key)
    before = model.encoder.layer[0].attention.self.query.weight.clone()
    with pytest.raises(ValueError, match="must be called on plain linear layers, got Sequential"):
        model.set_rope_interleave(False)
    assert torch.equal(model.encoder.layer[0].attention.self.query.weight, before)


@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
def test_a_configuration_of_stocks_class_will_do(ours, stock, config, tmp_path):
    model = ours(config)
    model.save_pretrained(tmp_path)
    stock_config = transformers.RoFormerConfig.from_pretrained(tmp_path)
    again = ours.from_pretrained(tmp_path, config=stock_config, attn_implementation="eager")
    assert type(again.config) is RoFormerConfig
    assert again.config._attn_implementation == "eager"
    assert again.config.to_dict()["summary_type"] == "first"
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    with pytest.raises(ValueError, match="config must be a RoFormerConfig, got .*BertConfig"):
        ours(transformers.BertConfig())


@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda c: c.__name__)
def test_tuples_come_out_where_the_configuration_asks_for_them(ours, stock, config):
    model = enlarge(ours(config))
    inputs = inputs_for(ours)
    expected = model(**inputs).to_tuple()
    config.return_dict = False
    assert torch.equal(model(**inputs)[0], expected[0])


def test_the_half_split_layout_is_llamas(config):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from roformer.rotary import apply_rotary, compute_inv_freq, rotary_embeddings

    x = torch.randn(2, 9, 3, 16)
    table = rotary_embeddings(torch.arange(9), compute_inv_freq(16))
    cos, sin = (torch.cat((t, t), dim=-1)[None] for t in table)
    q, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    torch.testing.assert_close(apply_rotary(x, *table, interleave=False), q.transpose(1, 2))


def test_position_ids_are_obeyed(config):
    model = enlarge(RoFormerModel(config))
    ids, order = torch.randint(0, 60, (2, 30)), torch.randperm(30)
    straight = model(ids).last_hidden_state
    torch.testing.assert_close(
        model(ids[:, order], position_ids=order).last_hidden_state, straight[:, order],
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip
    gaps = torch.arange(30) * 2
    stretched = model(ids, position_ids=gaps).last_hidden_state
    assert (stretched - straight).abs().max() > 0.1
    sparse = torch.randint(0, 60, (2, 59))
    sparse[:, gaps] = ids
    mask = torch.zeros(2, 59)
    mask[:, gaps] = 1  # the same gaps, as masked tokens in between
    whole = model(sparse, attention_mask=mask).last_hidden_state[:, gaps]
    torch.testing.assert_close(stretched, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ["default", *ROPES])
@pytest.mark.parametrize("shift", [700, 100_000, -50, -7])
def test_shifting_all_positions_changes_nothing(rope, shift):
    model = enlarge(RoFormerModel(rope_config(rope)))
    ids = torch.randint(0, 60, (2, 30))
    shifted = model(ids, position_ids=torch.arange(30) + shift).last_hidden_state
    torch.testing.assert_close(shifted, model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_the_length_that_counts_is_the_rows(rope):
    model = enlarge(RoFormerModel(rope_config(rope)))
    short, long = torch.randint(0, 60, (1, 12)), torch.randint(0, 60, (1, 200))
    separate = [model(ids).last_hidden_state for ids in (short, long)]
    padded = torch.zeros(2, 200, dtype=torch.long)
    padded[0, :12], padded[1] = short[0], long[0]
    mask = torch.arange(200) < torch.tensor([[12], [200]])
    together = model(padded, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(together[:1, :12], separate[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(together[1:], separate[1], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(model(short).last_hidden_state, separate[0])  # nothing was stored
    left = model(padded.flip(1), attention_mask=mask.flip(1)).last_hidden_state[:1, -12:]
    torch.testing.assert_close(left, model(short.flip(1))[0], atol=2e-4, rtol=1e-4)
    plain = enlarge(RoFormerModel(rope_config("default")))
    assert (plain(long).last_hidden_state - separate[1]).abs().max() > 0.1


@pytest.mark.parametrize("rope", [r for r in ROPES if r not in ("dynamic", "longrope")])
def test_rope_settings_reach_the_attention(rope):
    ids = torch.randint(0, 60, (1, 30))
    outputs = [enlarge(RoFormerModel(rope_config(r)))(ids)[0] for r in ("default", rope)]
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


def test_casting_the_model_leaves_angles_exact(config):
    seen = []
    model = RoFormerModel(config).bfloat16()
    layer = model.encoder.layer[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    model(torch.randint(0, 60, (1, 1024)))
    cos, sin = seen[0]
    assert cos.dtype == sin.dtype == torch.float32
    assert len(cos[0, :, 1].unique()) > 1000  # in bfloat16 positions would collide


def test_a_state_of_stock_loads_strictly(config):
    stock = transformers.RoFormerModel(transformers.RoFormerConfig(**config.to_dict()))
    state = stock.state_dict()
    assert "encoder.embed_positions.weight" in state
    RoFormerModel(config).load_state_dict(state)
    assert "encoder.embed_positions.weight" in state  # the caller's own stays whole
    with pytest.raises(RuntimeError, match="Unexpected key"):
        RoFormerModel(config).load_state_dict(state | {"more": torch.zeros(1)})


def test_a_masked_language_model_that_sees_one_side_says_so(config, tmp_path, caplog):
    RoFormerForCausalLM(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        RoFormerForCausalLM.from_pretrained(tmp_path)
        assert not caplog.records
        RoFormerForMaskedLM.from_pretrained(tmp_path, is_decoder=False)
        assert not caplog.records
        RoFormerForMaskedLM.from_pretrained(tmp_path)
    assert "is_decoder" in caplog.text


def test_labels_are_of_the_tokens_that_are_scored(config):
    model, ids = enlarge(RoFormerForCausalLM(config)), torch.randint(0, 60, (2, 7))
    whole = model(ids)
    expected = F.cross_entropy(whole.logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    found = model(ids, labels=ids[:, 4:], logits_to_keep=3).loss
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"labels must have the shape \[2, 3\], got \[2, 7\]"):
        model(ids, labels=ids, logits_to_keep=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_heads_never_read_padding(side, config):
    ids, start = torch.randint(1, 60, (1, 10)), 6 if side == "left" else 0
    padded = torch.zeros(1, 16, dtype=torch.long)
    padded[:, start : start + 10] = ids
    mask = torch.zeros(1, 16)
    mask[:, start : start + 10] = 1
    model = enlarge(RoFormerForSequenceClassification(config))
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits, model(ids).logits, atol=1e-4, rtol=1e-4
    )
    for which in ("first", "last"):
        config.summary_type = which
        model = enlarge(RoFormerForMultipleChoice(config))
        torch.testing.assert_close(
            model(padded[:, None], attention_mask=mask[:, None]).logits,
            model(ids[:, None]).logits, atol=1e-4, rtol=1e-4,
        )  # fmt: skip


def test_hidden_states_and_attentions_are_returned(config):
    model = RoFormerModel._from_config(config, attn_implementation="eager").eval()
    output = model(torch.randint(0, 60, (2, 7)), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert [a.shape for a in output.attentions] == [(2, 2, 7, 7)] * 2
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 2, 7))


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "unpadded"])
def test_wholly_masked_batches_are_computed(kernel, config):
    model = RoFormerModel._from_config(config, attn_implementation=kernel).eval()
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert model(ids, attention_mask=torch.zeros_like(ids))[0].isfinite().all()


@pytest.mark.parametrize("built", [False, True])
def test_an_edit_that_would_make_a_decoder_of_an_encoder_or_back_is_refused(built, config):
    config.is_decoder = built
    model = RoFormerForMaskedLM(config)
    model.config.is_decoder = not built
    with pytest.raises(ValueError, match=f"is_decoder must stay {built} in a built model, got"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_settings_of_the_rotation_are_checked_when_they_are_used(config):
    model = RoFormerModel(config)
    model.config.rope_parameters["rope_type"] = "yran"
    with pytest.raises(ValueError, match="rope_type must be one of default, .* got 'yran'"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_heads_of_a_decoder_that_predict_no_next_token_keep_no_cache(config, monkeypatch):
    config.is_decoder = True
    model = RoFormerForMaskedLM(config)
    seen = []
    model.roformer.register_forward_hook(lambda m, args, out: seen.append(out.past_key_values))
    model(torch.zeros(1, 5, dtype=torch.long))
    assert seen == [None]


def test_converting_one_model_leaves_another_of_the_same_configuration(config, tmp_path):
    one, other = (enlarge(RoFormerForMaskedLM(config)) for _ in range(2))
    ids = torch.randint(0, 60, (2, 30))
    expected = other(ids).logits
    one.set_rope_interleave(False)
    torch.testing.assert_close(other(ids).logits, expected)
    assert not one.config.is_transformers_compatible
    other.save_pretrained(tmp_path)
    saved = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(saved(ids).logits, expected, atol=1e-4, rtol=1e-4)


FOLDERS = [{}, {"embedding_size": 16}, {"eos_token_id": 80}]


@pytest.mark.parametrize("fields", FOLDERS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_survives_saving(tied, fields, config, tmp_path):
    values = {k: v for k, v in config.to_diff_dict().items() if k != "model_type"} | fields
    model = RoFormerForMaskedLM(RoFormerConfig(**values | {"tie_word_embeddings": tied}))
    model = enlarge(model)
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 70, (2, 9))
    for package in (roformer, transformers):
        again = package.RoFormerForMaskedLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-5)


def test_weights_can_stay_on_disk(config, tmp_path):
    model = enlarge(RoFormerForMaskedLM(config))
    model.save_pretrained(tmp_path / "model")
    lazy = RoFormerForMaskedLM.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    ids = torch.randint(0, 60, (2, 9))
    torch.testing.assert_close(lazy(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kernel", ["sdpa", "unpadded"])
def test_token_types_of_one_row_are_those_of_all(kernel, config):
    model = enlarge(RoFormerModel._from_config(config, attn_implementation=kernel))
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
    done = command("-c", code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_transformers_classes_load_quietly_after_the_auto_classes_build_ours():
    code = (
        "import transformers, roformer; roformer.use_for_auto_classes(); transformers.RoFormerModel"
    )
    done = command("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_head_has_its_auto_class(config):
    heads = {
        "AutoModel": RoFormerModel,
        "AutoModelForMaskedLM": RoFormerForMaskedLM,
        "AutoModelForCausalLM": RoFormerForCausalLM,
        "AutoModelForSequenceClassification": RoFormerForSequenceClassification,
        "AutoModelForTokenClassification": RoFormerForTokenClassification,
        "AutoModelForQuestionAnswering": RoFormerForQuestionAnswering,
        "AutoModelForMultipleChoice": RoFormerForMultipleChoice,
        "AutoModelForTextEncoding": RoFormerModel,
    }
    autos = {
        name: getattr(transformers, name) for name in transformers.__all__ if name[:4] == "Auto"
    }
    mappings = {name: getattr(auto, "_model_mapping", None) for name, auto in autos.items()}
    stock = {name for name, x in mappings.items() if x and transformers.RoFormerConfig in x}
    assert stock == heads.keys()  # one that we lack would build stock's from a folder of ours
    for auto, ours in heads.items():
        assert type(getattr(transformers, auto).from_config(config)) is ours


def test_every_dropout_module_is_used(config):
    """One at a time: the others are turned off."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.5
    ids = torch.arange(5, 17)[None]
    for head in (RoFormerForSequenceClassification, RoFormerForTokenClassification):
        model = head(config).train()
        dropouts = [x for x in model.named_modules() if isinstance(x[1], torch.nn.Dropout)]
        assert len(dropouts) == 2 + 3 * config.num_hidden_layers
        for name, dropout in dropouts:
            for _, other in dropouts:
                other.train(other is dropout)
            assert not torch.equal(model(ids).logits, model(ids).logits), name


def test_the_classification_head_drops_before_both_projections(config):
    config.hidden_dropout_prob = 0.5
    head, given = RoFormerClassificationHead(config).train(), []
    for layer in (head.dense, head.out_proj):
        layer.register_forward_pre_hook(lambda layer, args: given.append(args[0]))
    head(torch.ones(8, config.hidden_size))
    assert [0.3 < (x == 0).float().mean() < 0.7 for x in given] == [True, True]
