"""All encodings and feature maps on the same paths: padding, gradients, files, compilers."""

import copy
import json

import pytest
import torch
import transformers

from roformer import RoFormerConfig, RoFormerForMaskedLM, RoFormerModel
from roformer.configuration_roformer import FEATURE_MAPS, POSITION_ENCODINGS
from tiny import VARIANTS, assert_near, build, hidden, model_of, tiny_config

KERNELS = ["eager", "sdpa", "unpadded", "flex_attention"]
ABSOLUTE = ("learned", "sinusoidal")
FOREIGN = [
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 500.0}},
    {"rope_parameters": {"partial_rotary_factor": 0.5}},
    {"rope_interleave": False},
    {"use_bias": False},
    {"norm_type": "rms_norm"},
    {"type_vocab_size": 0},
]
"""What stock cannot express either."""
COMPILED_IN_BFLOAT16 = ("rope", "t5", "elu", "favor")
"""One variant of each kind of code, as compilation takes long."""
IDS = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("flex_without_inductor")
@pytest.mark.parametrize(
    ("variant", "kernel", "fields"),
    [
        *((name, kernel, {}) for name in POSITION_ENCODINGS for kernel in KERNELS),
        ("rope", "flex_attention", {"is_decoder": True, "use_cache": False}),
        *((name, None, {}) for name in FEATURE_MAPS),
        *((name, None, {"position_encoding": "none"}) for name in FEATURE_MAPS),
        *((name, None, {"is_decoder": True}) for name in FEATURE_MAPS),
    ],
)
def test_padding_packing_and_kernels_change_nothing(variant, kernel, fields):
    model, plain = model_of(variant, kernel, **fields), model_of(variant, **fields)
    mask = torch.ones_like(IDS)
    mask[1, 13:] = 0
    separate = torch.cat((hidden(plain, IDS[:1])[0], hidden(plain, IDS[1:, :13])[0]))
    assert_near(hidden(model, IDS, attention_mask=mask)[mask.bool()], separate)
    if variant not in ABSOLUTE:
        left = hidden(model, IDS[1:].roll(7, 1), attention_mask=mask[1:].roll(7, 1))
        assert_near(left[0, 7:], separate[20:], 1e-4)
    row = IDS[mask.bool()][None]
    positions = torch.cat((torch.arange(20), torch.arange(13)))[None]
    cu_seqlens = torch.tensor([0, 20, 33], dtype=torch.int32)
    assert_near(hidden(model, row, position_ids=positions)[0], separate)
    assert_near(hidden(model, row, cu_seq_lens_q=cu_seqlens)[0], separate)


@pytest.mark.parametrize("variant", VARIANTS)
def test_relative_encodings_know_differences_alone_and_a_bag_of_words_none(variant):
    model, order = model_of(variant), torch.randperm(20)
    expected = hidden(model, IDS)
    shifted = hidden(model, IDS, position_ids=torch.arange(20)[None] + 20)
    change = (shifted - expected).abs().max()
    assert change > 1e-2 if variant in ABSOLUTE else change < 1e-4
    change = (hidden(model, IDS[:, order]) - expected[:, order]).abs().max()
    assert change < 1e-4 if variant == "none" else change > 1e-2


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_gets_a_gradient_also_through_a_checkpoint(variant, kernel):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, gradients = model_of(variant, kernel, **no_dropout).train(), []
    for checkpointed in (False, True):
        if checkpointed:
            # transformers renamed it after 5.17
            renamed = getattr(model, "activation_checkpointing_enable", None)
            (renamed or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(IDS).last_hidden_state.pow(3).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        # adding one vector to all keys changes no probability of softmax
        is_free = name.endswith("key.bias") and variant not in FEATURE_MAPS
        assert is_free or gradient.abs().sum() > 0, name
        assert_near(gradients[1][name], gradient, 1e-3)


@pytest.mark.parametrize("fields", [*VARIANTS.values(), *FOREIGN], ids=str)
def test_saved_and_loaded_it_is_the_same_under_the_second_model_type(fields, tmp_path):
    wanted = tiny_config(**fields)
    model = build(RoFormerForMaskedLM, wanted)
    model.save_pretrained(tmp_path)
    again, report = RoFormerForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    saved = json.loads((tmp_path / "config.json").read_text())
    if fields == VARIANTS["rope"]:
        assert (saved["model_type"], "position_encoding" in saved) == ("roformer", False)
        return
    assert saved["model_type"] == "roformer_plus"
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path), RoFormerModel)
    for config in (
        RoFormerConfig.from_pretrained(tmp_path),
        transformers.AutoConfig.from_pretrained(tmp_path),
        transformers.AutoConfig.for_model(**saved),
        copy.deepcopy(wanted),  # by the protocol that multiprocessing uses for a worker
    ):
        assert type(config) is RoFormerConfig
        assert config.to_dict()["model_type"] == "roformer_plus"
        assert all(getattr(config, name) == getattr(wanted, name) for name in fields)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_and_in_half_precision_it_is_near(variant):
    ids = torch.randint(5, 60, (2, 80))  # more than a chunk of linear attention
    model = model_of(variant, "sdpa", num_hidden_layers=1, max_position_embeddings=80)
    exact = hidden(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_near(hidden(compiled, ids), exact)
    half = hidden(model.bfloat16(), ids).float()
    assert (half - exact).abs().mean() < 0.05
    if variant in COMPILED_IN_BFLOAT16:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert (hidden(compiled, ids).float() - half).abs().mean() < 0.025  # rounded elsewhere
