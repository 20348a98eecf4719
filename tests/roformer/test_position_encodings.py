"""The encodings that RoPE is compared with: each against its paper's equation, and its limits."""

import math

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from roformer import RoFormerForCausalLM, RoFormerForMaskedLM, RoFormerModel
from roformer.configuration_roformer import POSITION_ENCODINGS
from roformer.position_encodings import alibi_slopes, sinusoidal_embeddings, t5_buckets
from tiny import TINY_MODEL, assert_near, enlarge, hidden, model_of, tiny_config
from train.loop.language_model import load_bert_weights
from train.settings import InputError

B, L, V = 2, 12, 60
IDS = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def bert() -> transformers.BertForMaskedLM:
    config = transformers.BertConfig(**TINY_MODEL, vocab_size=V)
    return enlarge(transformers.BertForMaskedLM(config))


def test_with_learned_positions_it_is_transformers_bert(bert):
    model = RoFormerForMaskedLM(tiny_config(position_encoding="learned")).eval()
    load_bert_weights(model, bert)
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    ours, theirs = (m(IDS, attention_mask=mask).logits[mask.bool()] for m in (model, bert))
    assert_near(ours, theirs)


def test_sinusoids_are_those_of_the_paper():
    table = sinusoidal_embeddings(torch.arange(-3, 50), 32)
    for p in (-3, 0, 1, 17, 49):
        for i in range(16):
            angle = p / 10000 ** (2 * i / 32)
            found = table[p + 3, 2 * i : 2 * i + 2].tolist()
            assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


def test_sinusoids_are_added_to_words_of_their_size():
    model = model_of("sinusoidal")
    embeddings = model.embeddings.word_embeddings(IDS) * 32**0.5
    embeddings = embeddings + sinusoidal_embeddings(torch.arange(L), 32)
    embeddings = embeddings + model.embeddings.token_type_embeddings.weight[0]
    found = model.embeddings(IDS, None, None, torch.arange(L)[None])
    assert_near(found, model.embeddings.LayerNorm(embeddings))


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_transformers_t5s(causal):
    between = torch.arange(-700, 701)
    theirs = T5Attention._relative_position_bucket(-between, bidirectional=not causal)
    assert torch.equal(t5_buckets(between, causal), theirs)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 20])
def test_slopes_are_transformers_blooms(heads):
    row = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [H, 1, 2]: slope times key
    assert alibi_slopes(heads) == pytest.approx(row[:, 0, 1].tolist())


def transformer_xl_score(model, q, k, h, m, n):
    """The four terms: content and position, each against the query and against a bias."""
    relative = model.encoder.layer[0].attention.self.relative
    u, v, w = (x.double() for x in (relative.u, relative.v, relative.key_of_distance.weight))
    r = (w @ sinusoidal_embeddings(torch.tensor(m - n), 32).double()).view(2, 16)[h]
    return q @ k + q @ r + u[h] @ k + v[h] @ r


def t5_score(model, q, k, h, m, n):
    """One number for each head and bucket, outside the scaling of the product."""
    table = model.score_bias.relative_attention_bias.weight.double()
    bucket = T5Attention._relative_position_bucket(torch.tensor(n - m))
    return q @ k + table[bucket, h] * 16**0.5


def alibi_score(model, q, k, h, m, n):
    """The distance times the slope of the head."""
    return q @ k - (1 / 16, 1 / 256)[h] * abs(m - n) * 16**0.5


@torch.no_grad()
@pytest.mark.parametrize(
    ("encoding", "equation"),
    [("transformer_xl", transformer_xl_score), ("t5", t5_score), ("alibi", alibi_score)],
)
def test_scores_are_those_of_the_papers_equation(encoding, equation):
    """Attention of one layer in float64, pair of tokens by pair."""
    model, seen = model_of(encoding), {}
    attention = model.encoder.layer[0].attention.self
    attention.register_forward_hook(
        lambda module, given, found: seen.update(embeddings=given[0], context=found[0])
    )
    model(IDS)
    attention.double()
    given = seen["embeddings"][0].double()
    layers = attention.query, attention.key, attention.value
    q, k, v = (layer(given).unflatten(-1, (2, 16)) for layer in layers)
    expected = torch.zeros_like(v)
    for h in range(2):
        for m in range(L):
            scores = torch.stack([equation(model, q[m, h], k[n, h], h, m, n) for n in range(L)])
            expected[m, h] = torch.softmax(scores / 16**0.5, dim=0) @ v[:, h]
    assert_near(seen["context"][0].double(), expected.flatten(-2), 1e-5)


@pytest.mark.parametrize("encoding", POSITION_ENCODINGS)
def test_a_checkpoint_without_an_encodings_weights_gets_drawn_ones(encoding, tmp_path):
    model_of("rope").save_pretrained(tmp_path)
    model = RoFormerModel.from_pretrained(tmp_path, position_encoding=encoding)
    saved = load_file(tmp_path / "model.safetensors")
    drawn = {name: x for name, x in model.named_parameters() if name not in saved}
    assert bool(drawn) == (encoding in ("learned", "t5", "transformer_xl"))
    for name, weight in drawn.items():
        assert 0.01 < weight.std() < 0.03, name


def test_a_table_of_positions_ends_and_others_do_not():
    long = torch.randint(5, V, (1, 70))
    for encoding in POSITION_ENCODINGS:
        model = model_of(encoding)
        if encoding == "learned":
            with pytest.raises(ValueError, match="inputs must have at most .* = 64 tokens .* 70"):
                model(long)
            with pytest.raises(ValueError, match="position_ids must .* got 69"):
                model(long, position_ids=torch.arange(70))
            assert model.config.has_position_limit
        else:
            assert hidden(model, long).isfinite().all()
            assert not model.config.has_position_limit


def test_what_an_encoding_cannot_do_is_refused_by_name(bert):
    decoder = RoFormerForCausalLM(tiny_config(position_encoding="alibi"))
    with pytest.raises(ValueError, match="past_key_values must .* got a StaticCache"):
        decoder.generate(IDS, max_new_tokens=4, cache_implementation="static", pad_token_id=0)
    learned, first = model_of("learned"), torch.arange(-1, L - 1)[None]
    with pytest.raises(ValueError, match="position_ids must .* got -1"):
        learned(IDS, position_ids=first)
    with pytest.raises(InputError, match="must need no weights that a BERT lacks"):
        load_bert_weights(RoFormerForMaskedLM(tiny_config(position_encoding="t5")), bert)


def test_half_precision_adds_no_bias_to_infinity():
    """Two large negative values of float16 are -inf together, and a row of them is nan."""
    model = model_of("t5", is_decoder=True)
    torch.nn.init.constant_(model.score_bias.relative_attention_bias.weight, -30.0)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    assert hidden(model.half(), IDS, attention_mask=mask)[mask.bool()].isfinite().all()
