"""The token store: what is built, reused, checked, made again and reported."""

import itertools
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import transformers

import train.data.corpus
from launched_runs import killed_at
from tiny import refused, sentences
from tiny_tokens import TEXTS, corpus, texts
from train.data import vocabulary
from train.data.corpus import TokenStore, describe_stores, tokenize_corpus
from train.data.documents import check_text_files, read_documents
from train.settings import CorpusSettings, TextSettings


def everything(store: TokenStore) -> np.ndarray:
    """The ids of all documents, read one by one as the loader does."""
    bounds = itertools.pairwise([0, *store.document_ends.tolist()])
    return np.concatenate([store.read(start, end - start) for start, end in bounds])


def state(store: TokenStore) -> list[tuple[str, int]]:
    """Names of the shards and when they were written."""
    return [(shard.name, shard.stat().st_mtime_ns) for shard in store.shards]


def contents(store: TokenStore) -> dict[str, bytes]:
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for f in store.shards for p in f.iterdir()}


def test_a_store_is_reused_until_text_or_tokenizer_change(written, tokenize, tmp_path, monkeypatch):
    file = written / "c.txt"
    monkeypatch.setattr("train.data.documents.CACHED_BYTES", 0)
    first = tokenize(file)
    before = state(first)
    with monkeypatch.context() as patch:
        patch.setattr("train.data.corpus.hashlib.file_digest", Mock(side_effect=AssertionError))
        again = tokenize(file)  # which is not read
    assert again.name == first.name
    assert state(again) == before
    pieces = [*vocabulary.SPECIAL_TOKENS, "the", "cat", "dog", "a", "river", "."]
    vocabulary.save_tokenizer(pieces, tmp_path / "other")
    assert tokenize(file, vocabulary.load_tokenizer(str(tmp_path / "other"))).name != first.name
    file.write_text(file.read_text().replace("the moon", "the king"))  # as long as before
    assert tokenize(file).name != first.name


def test_a_file_that_joins_a_corpus_is_all_that_is_tokenized(written, tokenize, monkeypatch):
    grouped = tokenize(written)
    monkeypatch.setattr("train.data.documents.GROUP_BYTES", 0)
    first = tokenize(written)
    assert (len(grouped.shards), len(first.shards)) == (1, 3)  # of small files and of large ones
    assert everything(grouped).tolist() == everything(first).tolist()
    before = state(first)
    (written / "d.txt").write_text("her friend hears a song .\n")
    joined = tokenize(written)
    assert state(joined)[: len(before)] == before
    assert len(joined.shards) == len(before) + 1
    assert joined.name != first.name
    assert len(joined.document_ends) == len(first.document_ends) + 1


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of two batches of a few documents."""
    monkeypatch.setattr("train.data.corpus.BATCH_CHARACTERS", 200)
    monkeypatch.setattr("train.data.corpus.BATCHES_PER_SHARD", 2)


def test_shards_hold_tokens_in_order(corpus_folder, tokenize, tmp_path, tokenizer, small_shards):
    file = corpus_folder / "validation.jsonl"
    store = tokenize(file)
    assert len(store.shards) > 5
    assert store.dtype == np.uint16
    ids = np.split(everything(store), store.document_ends)[:-1]
    expected = tokenizer(texts(file, tmp_path), add_special_tokens=False)["input_ids"]
    assert [list(i) for i in ids] == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_build_killed_at_any_moment_goes_on(
    corpus_folder, tmp_path, tokenizer, small_shards, monkeypatch
):
    encode = train.data.corpus._encode

    def encode_later(texts, tokenizer):
        (tmp_path / "moment").write_bytes(b"")  # a change of files, when the child may be killed
        return encode(texts, tokenizer)

    monkeypatch.setattr("train.data.corpus._encode", encode_later)
    lines = (corpus_folder / "validation.jsonl").read_text().splitlines(keepends=True)
    source = tmp_path / "text.jsonl"
    source.write_text("".join(lines[:8]))
    whole = tokenize_corpus(corpus(source, tmp_path / "whole"), "train", tokenizer)
    killed = 0
    while True:
        settings = corpus(source, tmp_path / f"killed-{killed}")
        build = partial(tokenize_corpus, settings, "train", tokenizer)
        if not killed_at(killed + 1, build):
            break
        killed += 1
        finished = [p for p in Path(settings.cache).glob("*-*") if not p.name.startswith(".")]
        times = sorted(p.stat().st_mtime_ns for p in finished)
        store = build()
        assert contents(store) == contents(whole)
        assert sorted(p.stat().st_mtime_ns for p in store.shards)[: len(times)] == times
    assert killed > 5 * len(whole.shards)


DAMAGES = {
    "cut": lambda data: data[:-1],
    "every second byte": lambda data: bytes(b ^ (i % 2) for i, b in enumerate(data)),
    "all ones": lambda data: b"\xff" * len(data),
    "second half empty": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(corpus_folder, tokenize, small_shards, monkeypatch, damage):
    monkeypatch.setattr("train.data.corpus.PAGE", 8)  # so that files have more than 16
    store = tokenize(corpus_folder / "validation.jsonl")
    before = contents(store)
    files = [store.shards[2] / "tokens.bin", store.shards[3] / "documents.bin"]
    files += [store.shards[4] / "hashes.bin", store.shards[5] / "manifest.json"]
    for damaged in (*([file] for file in files), files):  # one, and several at once
        for file in damaged:
            file.write_bytes(DAMAGES[damage](file.read_bytes()))
        assert contents(tokenize(corpus_folder / "validation.jsonl")) == before


def test_tokenizers_that_cut_words_in_python_are_told_apart_by_their_rules(written, tokenize):
    def chinese(*words: str, **options: bool) -> transformers.PreTrainedTokenizerBase:
        pieces = [*vocabulary.SPECIAL_TOKENS, *words, "a", "river", ".", "likes"]
        pieces = {piece: i for i, piece in enumerate(pieces)}
        return transformers.RoFormerTokenizer(vocab=pieces, **options)

    file = written / "c.txt"
    store = tokenize(file, chinese("the", "cat", "moon"))
    assert 5 in everything(store)
    assert tokenize(file, chinese("the", "cat", "moon")).name == store.name
    assert tokenize(file, chinese("the", "moon", "cat")).name != store.name
    assert tokenize(file, chinese("the", "cat", "moon", do_lower_case=False)).name != store.name


def test_a_saved_truncation_does_not_cut_documents(written, tokenize, tmp_path, tokenizer_folder):
    tokenizer = vocabulary.load_tokenizer(str(tokenizer_folder))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(tmp_path / "truncating")
    truncating = vocabulary.load_tokenizer(str(tmp_path / "truncating"))
    store = tokenize(written / "c.txt", truncating)
    assert len(everything(store)) == len(" ".join(TEXTS).split())  # a word is a token


def test_special_tokens_written_in_a_text_are_characters_of_it(written, tokenize):
    text = "a [MASK] b [SEP]"
    (written / "c.txt").write_text(text)
    store = tokenize(written / "c.txt", vocabulary.byte_tokenizer())
    assert len(everything(store)) == len(text)


def test_names_are_read_in_their_order_each_as_often_as_it_is_given(written, tokenize, monkeypatch):
    splits = {part: [{"text": "the moon"}] for part in ("train", "validation")}
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: splits)
    file = str(written / "c.txt")
    one, hub, all_of_them = (everything(tokenize(x)) for x in (file, "a/b", [file, "a/b", file]))
    assert all_of_them.tolist() == [*one, *hub, *one]


@pytest.fixture
def described(tmp_path, tokenize, tokenizer):
    """A function that returns the lines about two txt files with these texts."""

    def described(train: str, held_out: str, tokenizer=tokenizer) -> list[str]:
        stores = []
        for part, text in (("train", train), ("validation", held_out)):
            (tmp_path / f"{part}.txt").write_text(text)
            stores.append(tokenize(tmp_path / f"{part}.txt", tokenizer))
        return describe_stores(stores[:1], stores[1])

    return described


def test_held_out_documents_are_no_training_documents(described):
    own = "\n\n".join(sentences(20, 1) + sentences(20, 2))
    for copies in (sentences(20, 2), ["\n".join(s.split()) for s in sentences(20, 2)]):
        copied = partial(described, own, "\n\n".join(copies))
        refused(copied, "corpus.validation", "got 100.0%", "20 of 20 documents")
    few = "\n\n".join([sentences(1, 1)[0], "the king the king " * 30])
    assert [line for line in described(own, few) if "in 1 of 2 documents; take them out" in line]
    clean = described(own, "the king the king")
    assert not [line for line in clean if "must not be training text" in line]


def test_text_that_the_tokenizer_does_not_know_is_said_and_above_half_refused(described):
    lines = described("the moon \u0e01 \u0e02\n", "the moon sees\n")
    assert lines[0] == "train: 1 documents, 4 tokens (4 a document)"
    assert lines[1].startswith("warning: corpus.train: 50.0% of its tokens are unknown")
    mostly = partial(described, "the \u0e01 \u0e02\n", "the moon sees\n")
    refused(mostly, "corpus.tokenizer", "got 67% unknown tokens")


def test_text_cut_into_many_pieces_is_said(described, tmp_path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*vocabulary.SPECIAL_TOKENS, *letters, *(f"##{x}" for x in letters), "moon", "sees"]
    vocabulary.save_tokenizer(pieces, tmp_path / "letters")
    words = vocabulary.load_tokenizer(str(tmp_path / "letters"))
    warning = "warning: corpus.train: corpus.tokenizer cuts words into 4.0 pieces"
    assert described("loup rouge lac", "moon", words)[1].startswith(warning)
    for text, tokenizer in (("moon sees moon", words), ("loup", vocabulary.byte_tokenizer())):
        assert not [x for x in described(text, "a", tokenizer) if "pieces" in x]


def test_held_out_text_of_a_few_predictions_is_said(described):
    few = described("the moon", "the cat sees " * 3_000)[-1]
    assert few.startswith("warning: corpus.validation has 9,000 tokens; the loss of so few")
    assert "--corpus.validation 5%" in few
    enough = described("the moon", "the cat sees " * 4_000)[-1]
    assert enough == "validation: 1 documents, 12,000 tokens (12,000 a document)"


def test_a_share_of_the_documents_is_held_out(corpus_folder, tmp_path, tokenizer):
    file = corpus_folder / "train.jsonl"
    settings = corpus(file, tmp_path, validation="20%")
    parts = [list(read_documents(settings, part)) for part in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(texts(file, tmp_path))
    assert not set(parts[0]) & set(parts[1])
    assert 0.12 < len(parts[1]) / (len(parts[0]) + len(parts[1])) < 0.28
    # another format, order and case: the same draw
    copy = tmp_path / "same.txt"
    copy.write_text("\n\n".join(text.upper() for text in reversed(texts(file, tmp_path))))
    again = corpus(copy, tmp_path, validation="20%")
    found = read_documents(again, "validation")
    assert [text.strip().lower() for text in found] == parts[1][::-1]
    again = corpus([str(file)] * 2, tmp_path, validation="20%")  # held out once
    assert list(read_documents(again, "validation")) == parts[1]
    stores = [tokenize_corpus(settings, part, tokenizer) for part in ("train", "validation")]
    assert [len(store.document_ends) for store in stores] == list(map(len, parts))
    evaluated = TextSettings(settings.train, "20%", cache=settings.cache)
    assert tokenize_corpus(evaluated, "validation", tokenizer).name == stores[1].name
    check_text_files(settings)
    assert not [x for x in describe_stores(stores[:1], stores[1]) if "must not be" in x]


def test_a_share_that_cannot_be_held_out_is_refused(written, tokenize):
    for share in ("0%", "100%"):
        attempt = partial(CorpusSettings, validation=share)
        refused(attempt, "corpus.validation must be text, or a share above")
    refused(partial(TextSettings, validation="2%"), "corpus.train must name the text")
    empty = partial(tokenize, written, part="validation", validation="0.1%")
    refused(empty, "corpus.validation must hold text, got 0.1%")
    hub = partial(tokenize, "owner/name", validation="2%")
    refused(hub, "corpus.train must be files", "got 'owner/name'")


def test_another_column_of_a_file_is_another_text(tmp_path, tokenize):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "the cat .", "title": "the moon ."}\n' * 9)
    assert tokenize(file).name != tokenize(file, text_column="title").name
