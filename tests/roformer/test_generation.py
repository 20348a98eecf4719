"""Causal models: no attention to the future, and a cache does not change the result."""

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import EncoderDecoderModel, StaticCache

import roformer
from roformer import RoFormerForCausalLM, RoFormerForMaskedLM
from roformer.configuration_roformer import FEATURE_MAPS, POSITION_BIASES
from tiny import ROPES, STOCK_IS_CAUSAL, VARIANTS, assert_near, build, enlarge, tiny_config

WITH_CACHE = {name: x for name, x in VARIANTS.items() if name not in FEATURE_MAPS} | {
    "rotary_value": {"rotary_value": True},
    **{rope: {"rope_parameters": ROPES[rope]} for rope in ("linear", "yarn", "llama3")},
}
"""What has a cache: neither linear attention nor the rope type that depends on the length."""


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": ROPES["dynamic"]}], ids=str)
@pytest.mark.parametrize("how", ["plain", "padded", "cached"])
def test_no_token_sees_the_future(how, kernel, rope):
    model = build(RoFormerForCausalLM, tiny_config(**rope), kernel)
    ids = torch.randint(1, 60, (2, 20))
    changed = ids.clone()
    changed[:, 11] = (ids[:, 11] + 7) % 60
    options = {"use_cache": how == "cached" and not rope}
    if how == "padded":
        options["attention_mask"] = torch.ones(2, 20).index_fill(1, torch.arange(3), 0)
    a, b = (model(x, **options).logits[:, 3:] for x in (ids, changed))
    torch.testing.assert_close(a[:, :8], b[:, :8], atol=0, rtol=0)
    assert ((a[:, 8:] - b[:, 8:]).abs().amax(-1) > 1e-3).all()  # and every later one sees it


def test_a_causal_model_is_causal_whatever_its_configuration_says(config):
    model = RoFormerForCausalLM(config)
    assert model.config.is_decoder
    assert model.roformer.config.is_decoder
    assert not config.is_decoder  # the caller's is left alone


@pytest.mark.parametrize("fields", WITH_CACHE.values(), ids=WITH_CACHE)
def test_token_by_token_with_a_cache_gives_the_logits_of_one_call(fields, kernel):
    length, config = 94, tiny_config(max_position_embeddings=94, **fields)
    model = build(RoFormerForCausalLM, config, kernel)
    ids = torch.randint(0, 60, (2, length))
    mask = torch.ones(2, length)
    mask[0, :4] = 0  # left padding
    whole = model(ids, attention_mask=mask, use_cache=False)
    assert whole.past_key_values is None
    past, pieces = None, []
    for a, b in ((0, 5), (5, 6), (6, 90), (90, length)):
        output = model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=past)
        past = output.past_key_values
        pieces.append(output.logits)
    assert_near(torch.cat(pieces, dim=1)[mask.bool()], whole.logits[mask.bool()], 2e-4)


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        pytest.param(fields, how, id=f"{name} {how}")
        for name, fields in (VARIANTS | WITH_CACHE).items()
        for how in (
            {},
            {"num_beams": 3},
            {"do_sample": True, "temperature": 0.7},
            {"cache_implementation": "static"},
        )
        if not ("cache_implementation" in how and name in (*POSITION_BIASES, *FEATURE_MAPS))
    ],
)
def test_neither_a_cache_nor_padding_on_the_left_changes_a_generated_token(fields, how):
    model = build(RoFormerForCausalLM, tiny_config(**fields))
    ids = torch.randint(1, 60, (2, 7))
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0} | how

    def generate(ids: torch.Tensor, mask: torch.Tensor, **more: object) -> torch.Tensor:
        torch.manual_seed(4)
        return model.generate(ids, attention_mask=mask, **(options | more))

    tokens = generate(ids, mask)
    assert tokens.shape == (2, 15)
    assert torch.equal(generate(ids, mask, use_cache=False, cache_implementation=None), tokens)
    if not options["do_sample"]:
        assert torch.equal(generate(ids[:1, 3:], mask[:1, 3:]), tokens[:1, 3:])


@pytest.mark.parametrize(
    ("options", "padded"),
    [({}, True), ({"num_beams": 2}, False), ({"cache_implementation": "static"}, True)],
    ids=str,
)
def test_a_compiled_decoder_generates_the_same_tokens(options, padded):
    causal = build(RoFormerForCausalLM, tiny_config(num_hidden_layers=1))
    causal.generation_config.pad_token_id = 0
    ids = torch.randint(1, 60, (2, 6))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :2] = mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False} | options
    expected = causal.generate(ids, **options)
    causal.forward = torch.compile(causal.forward, backend="eager")
    assert torch.equal(causal.generate(ids, **options), expected)
    torch._dynamo.reset()


def test_a_compiled_decoder_keeps_its_cache_and_documents_apart():
    causal = build(RoFormerForCausalLM, tiny_config(num_hidden_layers=1))
    ids, packed = torch.randint(1, 60, (1, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]])
    compiled = torch.compile(causal, backend="eager")
    made = compiled(ids, position_ids=torch.arange(6)[None], use_cache=True)
    assert made.past_key_values.get_seq_length() == 6
    found, expected = (model(ids, position_ids=packed).logits for model in (compiled, causal))
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def test_packed_rows_are_refused_behind_a_cache_that_was_emptied(config):
    causal = build(RoFormerForCausalLM, config)
    cache = StaticCache(config=causal.config, max_cache_len=20)
    ids = torch.arange(6)[None]
    causal(ids, past_key_values=cache)
    cache.reset()  # which leaves a tensor for its length
    with pytest.raises(ValueError, match="position_ids must"):
        causal(ids, past_key_values=cache, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match="cu_seq_lens_q must"):
        causal(ids, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize("fields", [{"rope_parameters": ROPES["dynamic"]}, VARIANTS["elu"]])
def test_the_whole_text_is_computed_for_each_token_where_there_is_no_cache(fields, tmp_path):
    build(RoFormerForMaskedLM, tiny_config(**fields)).save_pretrained(tmp_path)
    model = RoFormerForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(1, 60, (1, 60))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for more in ({}, {"use_cache": True}):
        tokens = model.generate(ids, **options, **more)
        for end in range(60, 68):
            assert tokens[0, end] == model(tokens[:, :end]).logits[0, -1].argmax()
    with pytest.raises(ValueError, match="inputs_embeds must be None"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="stateful"):  # an assistant needs a cache
        model.generate(ids, prompt_lookup_num_tokens=2, **options)
    with pytest.raises(ValueError, match="past_key_values must be None"):
        model(ids, past_key_values=transformers.DynamicCache(config=model.config))


def test_only_the_logits_asked_for_are_computed_and_labels_are_theirs(config):
    causal = build(RoFormerForCausalLM, config)
    ids, indices = torch.randint(0, 60, (2, 7)), torch.tensor([1, 5])
    whole = causal(ids).logits
    torch.testing.assert_close(causal(ids, logits_to_keep=indices).logits, whole[:, indices])
    found = causal(ids, labels=ids[:, 4:], logits_to_keep=3)
    torch.testing.assert_close(found.logits, whole[:, 4:])
    expected = F.cross_entropy(whole[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    torch.testing.assert_close(found.loss, expected)
    mask = torch.arange(7) < torch.tensor([[7], [6]])
    losses = []
    for kernel in ("eager", "sdpa", "unpadded"):  # a label at padding is not left out
        causal.set_attn_implementation(kernel)
        inputs = {"attention_mask": mask, "labels": ids[:, 4:], "logits_to_keep": 3}
        losses.append(causal(ids, **inputs).loss)
    assert_near(torch.stack(losses), losses[0].expand(3), 1e-5)
    with pytest.raises(ValueError, match="to match target batch_size"):  # torch's
        causal(ids, labels=ids, logits_to_keep=3)
    for labels, kept in ((ids[:, :3], torch.tensor([0, 3, 6])), (None, ids)):
        with pytest.raises(ValueError, match="logits_to_keep must be a number"):
            causal(ids, labels=labels, logits_to_keep=kept)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_under_gradient_checkpointing_the_whole_text_is_computed_for_each_token():
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    causal = build(RoFormerForCausalLM, tiny_config(**no_dropout)).eval()
    ids, options = torch.randint(1, 60, (2, 7)), {"do_sample": False, "max_new_tokens": 6}
    expected, cache = causal.generate(ids, **options), causal(ids, use_cache=True).past_key_values
    causal.train().gradient_checkpointing_enable()
    assert torch.equal(causal.generate(ids, **options), expected)
    assert causal(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="past_key_values must be None under gradient"):
        causal(ids, past_key_values=cache)


def encoder_decoder(package, **fields: object) -> EncoderDecoderModel:
    values = tiny_config(**fields).to_dict()
    made = {"is_decoder": True, "add_cross_attention": True, "linear_attention": None}
    encoder = package.RoFormerModel(package.RoFormerConfig(**values))
    decoder = package.RoFormerForCausalLM(package.RoFormerConfig(**values | made))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return enlarge(model)


def test_encoder_decoder_models_are_stocks_and_generate():
    ours, stock = (encoder_decoder(package) for package in (roformer, transformers))
    missing, unexpected = stock.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert all("embed_positions" in name for name in missing)
    source, target = torch.randint(1, 60, (2, 11)), torch.randint(1, 60, (2, 6))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    if STOCK_IS_CAUSAL:
        a, b = (m(**inputs, use_cache=False).logits for m in (ours, stock))
        assert_near(a, b, 2e-4)
    options = {"do_sample": False, "max_new_tokens": 8, "decoder_start_token_id": 1}
    options["attention_mask"] = mask
    assert torch.equal(*(ours.generate(source, use_cache=x, **options) for x in (True, False)))


@pytest.mark.parametrize("fields", [{}, {"norm_type": "rms_norm"}, VARIANTS["favor"]], ids=str)
def test_encoder_decoder_models_with_a_resized_vocabulary_survive_saving(fields, tmp_path):
    model = encoder_decoder(roformer, **fields)
    for part in (model.encoder, model.decoder):
        part.resize_token_embeddings(70)
    model.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(60, 70, (2, 6))  # the new ones
    a, b = (m(ids, decoder_input_ids=ids, use_cache=False).logits for m in (model, again))
    assert a.shape == b.shape == (2, 6, 70)
    if STOCK_IS_CAUSAL or fields:
        assert_near(a, b, 2e-4)
    if fields:  # a roformer_plus
        assert type(again.encoder).__module__.startswith("roformer.")


def test_cross_attention_reads_no_padding_and_is_reported(kernel, config):
    config.is_decoder = config.add_cross_attention = True
    model = build(RoFormerForCausalLM, config, kernel)
    ids, source = torch.randint(0, 60, (2, 5)), torch.randn(2, 9, 32)
    mask = (torch.arange(9) < 6).float().expand(2, 9)
    options = {"encoder_hidden_states": source, "encoder_attention_mask": mask}
    changed = source.clone()
    changed[:, 6:] += 1
    a = model(ids, **options).logits
    b = model(ids, **(options | {"encoder_hidden_states": changed})).logits
    assert_near(a, b, 1e-5)
    output = model(ids, **options, output_attentions=True)
    assert [x.shape for x in output.cross_attentions] == [(2, 2, 5, 9)] * 2
    assert [x.shape for x in output.attentions] == [(2, 2, 5, 5)] * 2
