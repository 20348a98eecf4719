"""The encodings that RoPE is compared with: each against its paper's equation, all on one path."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from roformer import RoFormerConfig, RoFormerForCausalLM, RoFormerForMaskedLM, RoFormerModel
from roformer.configuration_rules import POSITION_BIASES, POSITION_ENCODINGS
from roformer.position_encodings import (
    alibi_slopes,
    sinusoidal_embeddings,
    t5_buckets,
)
from tiny import TINY_MODEL, enlarge
from train.loop.model_init import load_bert_weights
from train.settings import InputError

B, L, V = 2, 12, 60
RELATIVE = ("rope", *POSITION_BIASES)


def config_of(encoding: str, **fields: object) -> RoFormerConfig:
    return RoFormerConfig(vocab_size=V, position_encoding=encoding, **TINY_MODEL | fields)


def model_of(encoding: str, kernel: str = "eager", **fields: object) -> RoFormerModel:
    config = config_of(encoding, **fields)
    return enlarge(RoFormerModel._from_config(config, attn_implementation=kernel))


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(5, V, (B, L))


def hidden(model, *arguments, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(*arguments, **options).last_hidden_state


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- each against its equation


def test_with_learned_positions_it_is_transformers_bert(ids):
    sizes = TINY_MODEL | {"vocab_size": V}
    bert = enlarge(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    model = RoFormerForMaskedLM(config_of("learned")).eval()
    load_bert_weights(model, bert)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 7:] = 0
    with torch.no_grad():
        ours, theirs = (m(ids, attention_mask=mask).logits for m in (model, bert))
    same(ours[0], theirs[0])
    same(ours[1, :7], theirs[1, :7])


def test_sinusoids_are_those_of_the_paper():
    table = sinusoidal_embeddings(torch.arange(-3, 50), 32)
    for p in (-3, 0, 1, 17, 49):
        for i in range(16):
            angle = p / 10000 ** (2 * i / 32)
            found = table[p + 3, 2 * i : 2 * i + 2].tolist()
            assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


def test_sinusoids_are_added_to_words_of_their_size(ids):
    model = model_of("sinusoidal")
    embeddings = model.embeddings.word_embeddings(ids) * 32**0.5 + sinusoidal_embeddings(
        torch.arange(L), 32
    )
    embeddings = embeddings + model.embeddings.token_type_embeddings.weight[0]
    found = model.embeddings(ids, None, None, torch.arange(L)[None])
    same(found, model.embeddings.LayerNorm(embeddings))


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_transformers_t5s(causal):
    between = torch.arange(-700, 701)
    theirs = T5Attention._relative_position_bucket(-between, bidirectional=not causal)
    assert torch.equal(t5_buckets(between, causal), theirs)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 20])
def test_slopes_are_transformers_blooms(heads):
    row = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [H, 1, 2]: slope times key
    assert alibi_slopes(heads) == pytest.approx(row[:, 0, 1].tolist())


def oracle(layer, embeddings: torch.Tensor, scores_of) -> torch.Tensor:
    """Attention of one layer in float64, pair of tokens by pair, [L, H, D]."""
    attention = layer.attention.self
    weights = {k: v.double() for k, v in attention.state_dict().items()}
    q, k, v = (
        (embeddings.double() @ weights[f"{x}.weight"].T + weights[f"{x}.bias"]).view(
            L, attention.num_attention_heads, attention.attention_head_size
        )
        for x in ("query", "key", "value")
    )
    out = torch.zeros_like(v)
    for h in range(attention.num_attention_heads):
        for m in range(L):
            scores = torch.stack([scores_of(q[m, h], k[n, h], h, m, n) for n in range(L)])
            out[m, h] = torch.softmax(scores / attention.attention_head_size**0.5, dim=0) @ v[:, h]
    return out


def test_transformer_xl_is_its_four_terms(ids):
    model = model_of("transformer_xl")
    layer = model.encoder.layer[0]
    relative = layer.attention.self.relative
    u, v, w = (x.double() for x in (relative.u, relative.v, relative.key_of_distance.weight))

    def scores_of(q, k, h, m, n):
        r = (w @ sinusoidal_embeddings(torch.tensor(m - n), 32).double()).view(2, 16)[h]
        return q @ k + q @ r + u[h] @ k + v[h] @ r

    compare_with_oracle(model, layer, ids, scores_of)


def test_t5_adds_one_number_a_head_and_bucket(ids):
    model = model_of("t5")
    table = model.score_bias.relative_attention_bias.weight.double()

    def scores_of(q, k, h, m, n):
        bucket = T5Attention._relative_position_bucket(torch.tensor(n - m))
        return q @ k + table[bucket, h] * 16**0.5  # outside the scaling of the product

    compare_with_oracle(model, model.encoder.layer[0], ids, scores_of)


def test_alibi_takes_off_the_distance(ids):
    model = model_of("alibi")

    def scores_of(q, k, h, m, n):
        return q @ k - (1 / 16, 1 / 256)[h] * abs(m - n) * 16**0.5

    compare_with_oracle(model, model.encoder.layer[0], ids, scores_of)


def compare_with_oracle(model, layer, ids, scores_of) -> None:
    seen = {}
    layer.attention.self.register_forward_hook(
        lambda module, given, found: seen.update(embeddings=given[0], context=found[0])
    )
    hidden(model, ids)
    with torch.no_grad():
        expected = oracle(layer, seen["embeddings"][0], scores_of).flatten(-2)
    same(seen["context"][0].double(), expected, 1e-5)


def test_without_positions_words_are_a_bag(ids):
    order = torch.randperm(L)
    for encoding in POSITION_ENCODINGS:
        model = model_of(encoding)
        moved, straight = hidden(model, ids[:, order]), hidden(model, ids)[:, order]
        if encoding == "none":
            same(moved, straight)
        else:
            assert (moved - straight).abs().max() > 1e-2, encoding


def test_another_encoding_than_the_one_that_was_built_is_refused(ids):
    for built, edited in (("rope", "alibi"), ("none", "rope"), ("t5", "none")):
        model = model_of(built)
        model.config.position_encoding = edited
        with pytest.raises(ValueError, match=f"position_encoding must .* got '{edited}'"):
            model(ids)


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_a_checkpoint_without_an_encodings_weights_gets_drawn_ones(encoding, tmp_path):
    model_of("rope").save_pretrained(tmp_path)
    model = RoFormerModel.from_pretrained(tmp_path, position_encoding=encoding)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in model.named_parameters():
        if name not in saved:
            assert 0.01 < weight.std() < 0.03, name
    assert any(name not in saved for name, _ in model.named_parameters()) == (
        encoding in ("learned", "t5", "transformer_xl")
    )


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_relative_encodings_and_no_others_know_differences_alone(encoding, ids):
    model = model_of(encoding)
    shifted = hidden(model, ids, position_ids=torch.arange(L)[None] + 20)
    if encoding in (*RELATIVE, "none"):
        same(shifted, hidden(model, ids))
    else:
        assert (shifted - hidden(model, ids)).abs().max() > 1e-2


# ---- all on one path


@pytest.mark.usefixtures("flex_without_inductor")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "unpadded", "flex_attention"])
@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_padding_and_kernels_change_nothing(encoding, kernel, ids):
    model, plain = model_of(encoding, kernel), model_of(encoding)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 7:] = 0
    found = hidden(model, ids, attention_mask=mask)
    same(found[0], hidden(plain, ids[:1])[0])
    same(found[1, :7], hidden(plain, ids[1:, :7])[0])


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "unpadded"])
@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_packed_documents_come_out_as_alone(encoding, kernel, ids):
    model, plain = model_of(encoding, kernel), model_of(encoding)
    row = torch.cat((ids[0], ids[1, :7]))[None]
    positions = torch.cat((torch.arange(L), torch.arange(7)))[None]
    cu_seqlens = torch.tensor([0, L, L + 7], dtype=torch.int32)
    separate = torch.cat((hidden(plain, ids[:1])[0], hidden(plain, ids[1:, :7])[0]))
    same(hidden(model, row, position_ids=positions)[0], separate)
    same(hidden(model, row, cu_seq_lens_q=cu_seqlens)[0], separate)


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_a_decoder_generates_with_its_cache_what_it_would_without(encoding, ids):
    config = config_of(encoding, is_decoder=True)
    model = enlarge(RoFormerForCausalLM._from_config(config, attn_implementation="sdpa"))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, :4] = 0  # padding on the left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(ids, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*found)
    whole = model(ids[:1]).logits
    parts = model(ids[:1, :5], use_cache=True)
    after = model(ids[:1, 5:], past_key_values=parts.past_key_values).logits
    same(after, whole[:, 5:])


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_every_weight_gets_a_gradient(encoding, kernel, ids):
    model = model_of(encoding, kernel).train()
    model(ids).last_hidden_state.pow(3).sum().backward()
    # adding one vector to all keys, or to all scores of a query, changes no probability
    free = ("key.bias",)
    for name, parameter in model.named_parameters():
        if not name.endswith(free):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_saved_and_loaded_it_is_the_same_under_the_second_model_type(encoding, ids, tmp_path):
    model = model_of(encoding)
    model.save_pretrained(tmp_path)
    again = RoFormerModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert again.config.position_encoding == encoding
    assert torch.equal(hidden(again, ids), hidden(model, ids))
    saved = json.loads((tmp_path / "config.json").read_text())
    if encoding == "rope":
        assert (saved["model_type"], "position_encoding" in saved) == ("roformer", False)
    else:
        assert (saved["model_type"], saved["position_encoding"]) == ("roformer_plus", encoding)
        assert isinstance(transformers.AutoModel.from_pretrained(tmp_path), RoFormerModel)


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_compiled_and_in_half_precision_it_is_near(encoding, ids):
    model = model_of(encoding, "sdpa", num_hidden_layers=1)
    expected = hidden(model, ids)
    torch._dynamo.reset()
    same(hidden(torch.compile(model, backend="aot_eager", fullgraph=True), ids), expected)
    half = hidden(model.bfloat16(), ids).float()
    assert (half - expected).abs().mean() < 0.04
    if encoding in ("rope", "t5"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert (hidden(compiled, ids).float() - half).abs().mean() < 0.02  # rounded elsewhere


def test_a_table_of_positions_ends_and_others_do_not():
    long = torch.randint(5, V, (1, 70))
    for encoding in POSITION_ENCODINGS:
        model = model_of(encoding)
        if encoding == "learned":
            with pytest.raises(ValueError, match="position_ids must .* got 69"):
                model(long)
            assert model.config.has_position_limit
        else:
            assert hidden(model, long).isfinite().all()
            assert not model.config.has_position_limit


def test_what_an_encoding_cannot_do_is_refused_by_name(ids):
    with pytest.raises(ValueError, match="set_rope_interleave must"):
        model_of("transformer_xl").set_rope_interleave(False)
    decoder = enlarge(RoFormerForCausalLM(config_of("alibi")))
    with pytest.raises(ValueError, match="past_key_values must .* got a StaticCache"):
        decoder.generate(ids, max_new_tokens=4, cache_implementation="static", pad_token_id=0)
    learned, first = model_of("learned"), torch.arange(-1, L - 1)[None]
    with pytest.raises(ValueError, match="position_ids must .* got -1"):
        learned(ids, position_ids=first)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**TINY_MODEL, vocab_size=V))
    with pytest.raises(InputError, match="must need no weights that a BERT lacks"):
        load_bert_weights(RoFormerForMaskedLM(config_of("t5")), bert)


def test_half_precision_adds_no_bias_to_infinity(ids):
    """Two large negative values of float16 are -inf together, and a row of them is nan."""
    model = model_of("t5", is_decoder=True)
    torch.nn.init.constant_(model.score_bias.relative_attention_bias.weight, -30.0)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = hidden(model.half(), ids, attention_mask=mask)
    assert found[mask.bool()].isfinite().all()


def test_transformer_xl_reaches_as_far_as_positions_with_gaps():
    model = model_of("transformer_xl")
    torch.manual_seed(0)
    sparse = torch.randint(5, 60, (2, 5 * L))
    mask = torch.zeros(2, 5 * L, dtype=torch.long)
    mask[:, ::5] = 1  # the same gaps, as masked tokens in between
    gaps = hidden(model, sparse[:, ::5], position_ids=torch.arange(0, 5 * L, 5))
    same(gaps, hidden(model, sparse, attention_mask=mask)[:, ::5])
