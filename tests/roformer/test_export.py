"""Exporters, sentence-transformers, pipelines and tokenizers give the outputs of a direct call."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.export import Dim
from torch.nn import Module
from transformers import AutoTokenizer, PreTrainedTokenizerBase, pipeline

import roformer
from roformer import RoFormerForMaskedLM, RoFormerForSequenceClassification, RoFormerModel
from tiny import ROPES, VARIANTS, assert_near, build, sentences, tiny_config
from train.data import vocabulary

AXES = {0: Dim("batch"), 1: Dim("length")}
EXAMPLE = (2, 10)  # what an exporter sees
OTHERS = [(1, 1), (3, 7), (4, 1), (2, 100)]  # rows, tokens; the configuration says 64 positions
pytestmark = [
    # torch pickles its own tree specifications when it copies an exported program for ONNX
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # all inputs share the axes, which is what was asked for
    pytest.mark.filterwarnings("ignore:# The axis name. .* will not be used, since it shares"),
]

# `model_type` of the saved folder: transformers' own, and the second one, for what stock cannot say
TYPES = {"roformer": {}, "roformer_plus": {"rope_parameters": ROPES["linear"]}}
TEXTS = ["the cat sees the moon .", "a dog likes a river . my sister hears the song ."]
CHINESE = "今天天气非常好。我们去北京大学看书。"
CHINESE_WORDS = ["今", "天", "天", "气", "非常", "好", "。", "我们", "去", "北京大学", "看书", "。"]
CHINESE_VOCABULARY = [*vocabulary.SPECIAL_TOKENS, *sorted({*CHINESE_WORDS, "北京"})]


def padded(rows: int, length: int) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the right; the last one is full."""
    draw = torch.Generator().manual_seed(1000 * rows + length)
    ends = torch.arange(1, rows + 1) * length // rows
    ids, types = (torch.randint(high, (rows, length), generator=draw) for high in (60, 2))
    mask = (torch.arange(length) < ends.clamp(min=1)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.fixture
def tokenizer(tokenizer_folder) -> PreTrainedTokenizerBase:
    """One of this test's own: padding and pipelines leave their settings in it."""
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def saved(folder: Path, model: Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """A folder as a user has it; for the first type with the call that makes it ours."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.config.to_dict()["model_type"] == "roformer":
        roformer.use_for_auto_classes()


def exported(model: Module, inputs: dict[str, Tensor], shapes: dict | None = None) -> Module:
    """An exported program; the model then computes padding, as programs do."""
    shapes = shapes or dict.fromkeys(inputs, AXES)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    model.set_attn_implementation("sdpa")
    return program


@pytest.mark.parametrize(
    ("head", "fields", "is_padded"),
    [
        (RoFormerForMaskedLM, {}, True),
        (RoFormerForSequenceClassification, {}, True),
        (roformer.RoFormerForQuestionAnswering, {}, True),
        (RoFormerModel, {}, False),
        (RoFormerModel, VARIANTS["elu"], True),
        (RoFormerModel, VARIANTS["favor"], True),
        *(  # lengths below and above both limits, 16 and 64
            (RoFormerModel, {"rope_parameters": ROPES[rope]}, True) for rope in ("dynamic", "yarn")
        ),
    ],
)
@torch.no_grad()
def test_an_exported_program_takes_any_batch_length_and_padding(head, fields, is_padded):
    model, inputs = build(head, tiny_config(num_hidden_layers=1, **fields)), padded(*EXAMPLE)
    if not is_padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    program = exported(model, inputs)
    for shape in (EXAMPLE, *OTHERS):
        inputs = padded(*shape)
        assert_near(program(**inputs)[0], model(**inputs)[0])


PACKED = {
    "position_ids": {1: AXES[1]},
    "cu_seq_lens_q": {0: Dim("documents", min=3)},
    "attention_mask": {0: AXES[0], 2: AXES[1], 3: AXES[1]},
}


def packed(key: str, rows: int, first: int, second: int) -> dict[str, Tensor]:
    """Two documents in each row, separated by the input of the given name."""
    inputs = {"input_ids": padded(rows, first + second)["input_ids"]}
    if key == "position_ids":
        value = torch.cat([torch.arange(first), torch.arange(second)])[None]
    elif key == "cu_seq_lens_q":
        value = torch.tensor([0, *[first, second] * rows]).cumsum(0).int()
    else:
        owners = torch.arange(first + second) >= first
        value = (owners[:, None] == owners).repeat(rows, 1, 1, 1)
    return inputs | {key: value}


@pytest.mark.parametrize("key", PACKED)
@torch.no_grad()
def test_an_exported_program_keeps_packed_documents_apart(key):
    model = build(RoFormerModel, tiny_config(num_hidden_layers=1))
    # positions tell documents apart in a batch of one row only
    rows, axes = ((1, 1), PACKED[key]) if key == "position_ids" else ((2, 3), AXES)
    program = exported(model, packed(key, rows[0], 4, 6), {"input_ids": axes, key: PACKED[key]})
    inputs = packed(key, rows[1], 12, 18)
    documents = inputs["input_ids"].split([12, 18], dim=1)
    separate = [model(document).last_hidden_state for document in documents]
    assert_near(program(**inputs)[0], torch.cat(separate, dim=1))


@torch.no_grad()
def test_onnxruntime_computes_the_same_at_any_batch_length_and_position():
    model = build(RoFormerForMaskedLM, tiny_config(num_hidden_layers=1))
    inputs = padded(*EXAMPLE)
    inputs["position_ids"] = torch.arange(EXAMPLE[1]).repeat(EXAMPLE[0], 1)
    shapes = dict.fromkeys(inputs, AXES)
    run = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=shapes, verbose=False)
    model.set_attn_implementation("sdpa")  # computes padding, as exported programs do
    for rows, length in (EXAMPLE, *OTHERS):
        inputs, positions = padded(rows, length), torch.arange(length).repeat(rows, 1)
        expected = model(**inputs)[0]
        for start in (0, 1_000_000):  # scores depend on distances only: inexact angles would show
            assert_near(run(**inputs, position_ids=positions + start)[0], expected, 1e-4)


def mean_pooled(model: RoFormerModel, tokenizer, texts: list[str], length: int) -> Tensor:
    """One text at a time: no padding to be counted by mistake."""
    options = {"truncation": True, "max_length": length, "return_tensors": "pt"}
    return torch.cat([model(**tokenizer(text, **options))[0].mean(1) for text in texts])


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_sentence_transformers_embeds_with_a_saved_encoder(kind, tokenizer, tmp_path, registry):
    from sentence_transformers import SentenceTransformer

    model = build(RoFormerModel, tiny_config(vocab_size=len(tokenizer), **TYPES[kind]))
    saved(tmp_path / "model", model, tokenizer)
    embedder = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert type(embedder[0].auto_model) is RoFormerModel
    texts = [*TEXTS, " ".join(sentences(30, 7))]
    wanted, longer = (mean_pooled(model, tokenizer, texts, length) for length in (64, 150))
    assert (longer[2] - wanted[2]).abs().max() > 0.01
    assert_near(embedder.encode(texts, convert_to_tensor=True), wanted)
    embedder.max_seq_length = 150  # it was the configuration's 64, which limits nothing of ours
    assert_near(embedder.encode(texts, convert_to_tensor=True), longer)


@pytest.fixture(params=["object", *TYPES])
def make_pipeline(request, tokenizer, tmp_path, registry):
    """(task, head) to a pipeline, given a model or its folder, and the model it must agree with."""

    def make(task: str, head: type):
        fields = {"vocab_size": len(tokenizer), "num_labels": 3} | TYPES.get(request.param, {})
        model = build(head, tiny_config(**fields))
        if request.param == "object":
            return pipeline(task, model=model, tokenizer=tokenizer, device="cpu"), model
        saved(tmp_path, model, tokenizer)
        made = pipeline(task, model=str(tmp_path), device="cpu")
        assert type(made.model) is head
        return made, model

    return make


@torch.no_grad()
def test_fill_mask_gives_the_models_probabilities(make_pipeline, tokenizer):
    fill, model = make_pipeline("fill-mask", RoFormerForMaskedLM)
    text = "the cat [MASK] the moon ."
    inputs = tokenizer(text, return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    best = model(**inputs).logits[0, place].softmax(-1).topk(4)
    found = fill(text, top_k=4)
    assert [row["token"] for row in found] == best.indices.tolist()
    assert [row["score"] for row in found] == pytest.approx(best.values.tolist(), abs=1e-5)


@torch.no_grad()
def test_text_classification_gives_the_models_probabilities(make_pipeline, tokenizer):
    classify, model = make_pipeline("text-classification", RoFormerForSequenceClassification)
    for text, rows in zip(TEXTS, classify(TEXTS, batch_size=2, top_k=None)):
        wanted = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist()
        scores = {row["label"]: row["score"] for row in rows}
        expected = {f"LABEL_{i}": value for i, value in enumerate(wanted)}
        assert scores == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_text_generation_continues_with_the_models_best_tokens(make_pipeline, tokenizer):
    generate, model = make_pipeline("text-generation", roformer.RoFormerForCausalLM)
    options = {"batch_size": 2, "max_new_tokens": 6, "do_sample": False, "return_tensors": True}
    found = generate(TEXTS, add_special_tokens=False, **options)  # a prompt does not end in [SEP]
    for text, [row] in zip(TEXTS, found):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert row["generated_token_ids"][-len(ids) :] == ids  # padding on the left


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_chinese_text_passes_through_a_saved_folder_into_the_model(kind, tmp_path, registry):
    pieces = {piece: number for number, piece in enumerate(CHINESE_VOCABULARY)}
    chinese = transformers.RoFormerTokenizer(vocab=pieces)
    model = build(RoFormerModel, tiny_config(vocab_size=len(chinese), **TYPES[kind]))
    saved(tmp_path, model, chinese)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert type(found) is transformers.RoFormerTokenizer
    both = found([CHINESE, "我们看书。"], padding=True, return_tensors="pt")
    rows = [["[CLS]", *CHINESE_WORDS, "[SEP]"], ["[CLS]", "我们", "看书", "。", "[SEP]"]]
    rows[1] += ["[PAD]"] * (len(rows[0]) - len(rows[1]))
    assert [found.convert_ids_to_tokens(ids) for ids in both["input_ids"]] == rows
    together = model(**both).last_hidden_state[1, :5]
    assert_near(together, model(**found("我们看书。", return_tensors="pt"))[0][0])
