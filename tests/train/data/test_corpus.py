"""The token store: what is built, reused, checked, made again and reported."""

import dataclasses
import hashlib
import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import transformers
from small_files import corpus, texts

import train.data.corpus
from tiny import sentences
from train.data import vocabulary
from train.data.corpus import TokenizeSettings, TokenStore, describe_stores, main, tokenize_corpus
from train.data.documents import check_disjoint_files, read_documents
from train.settings import CorpusSettings, HeldOutSettings, InputError


def everything(store: TokenStore) -> np.ndarray:
    """The ids of all documents, read one by one as the loader does."""
    starts = [0, *store.document_ends[:-1].tolist()]
    return np.concatenate(
        [store.read(a, b - a) for a, b in zip(starts, store.document_ends.tolist())]
    )


def state(store: TokenStore) -> list[tuple[str, int]]:
    """Names of the shards and when they were written."""
    return [(shard.name, shard.stat().st_mtime_ns) for shard in store.shards]


def contents(store: TokenStore) -> dict[str, bytes]:
    """All files of a store by name."""
    folders = (store.folder, *store.shards)
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for f in folders for p in f.iterdir()}


def test_a_store_is_reused_until_text_or_tokenizer_changes(written, tmp_path, tokenizer):
    settings = corpus(str(written / "c.txt"), tmp_path)
    first = tokenize_corpus(settings, "train", tokenizer)
    before = state(first)
    again = tokenize_corpus(settings, "train", tokenizer)
    assert again.folder == first.folder
    assert state(again) == before
    pieces = [*vocabulary.SPECIAL_TOKENS, "the", "cat", "dog", "a", "river", "."]
    vocabulary.save_tokenizer(pieces, tmp_path / "other")
    other = vocabulary.load_tokenizer(str(tmp_path / "other"))
    assert tokenize_corpus(settings, "train", other).folder != first.folder
    (written / "c.txt").write_text("a dog sees her friend .\n")
    assert tokenize_corpus(settings, "train", tokenizer).folder != first.folder


def test_a_file_that_joins_a_corpus_is_the_only_one_that_is_tokenized(
    written, tmp_path, tokenizer, monkeypatch
):
    first = tokenize_corpus(corpus(str(written), tmp_path), "train", tokenizer)
    before = state(first)
    (written / "d.txt").write_text("her friend hears a song .\n")
    encoded = []
    encode = train.data.corpus._encode
    monkeypatch.setattr("train.data.corpus._encode", lambda t, k: encoded.extend(t) or encode(t, k))
    joined = tokenize_corpus(corpus(str(written), tmp_path), "train", tokenizer)
    assert encoded == ["her friend hears a song .\n"]
    assert state(joined)[: len(before)] == before
    assert joined.folder.name != first.folder.name
    assert len(joined.document_ends) == len(first.document_ends) + 1


def test_a_file_is_read_again_only_when_it_changed(written, tmp_path, tokenizer, monkeypatch):
    settings = corpus(str(written / "c.txt"), tmp_path)
    first = tokenize_corpus(settings, "train", tokenizer)

    def refuse(*arguments):
        raise AssertionError("the file was read")

    digest = hashlib.file_digest
    monkeypatch.setattr("train.data.corpus.hashlib.file_digest", refuse)
    assert tokenize_corpus(settings, "train", tokenizer).folder == first.folder
    monkeypatch.setattr("train.data.corpus.hashlib.file_digest", digest)
    text = (written / "c.txt").read_text()
    (written / "c.txt").write_text(text.replace("the moon", "the king"))  # as long as before
    assert tokenize_corpus(settings, "train", tokenizer).folder != first.folder


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of two batches of a few documents."""
    monkeypatch.setattr("train.data.corpus.BATCH_CHARACTERS", 200)
    monkeypatch.setattr("train.data.corpus.BATCHES_PER_SHARD", 2)


def test_shards_hold_the_tokens_of_the_documents_in_order(
    corpus_folder, tmp_path, tokenizer, small_shards
):
    settings = corpus(str(corpus_folder / "validation.jsonl"), tmp_path)
    store = tokenize_corpus(settings, "train", tokenizer)
    assert len(store.shards) > 5
    assert store.dtype == np.uint16
    expected = list(read_documents(settings, "train"))
    ids = np.split(everything(store), store.document_ends)[:-1]
    expected = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert [list(i) for i in ids] == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_build_killed_at_any_moment_goes_on_to_the_same_bytes(
    corpus_folder, tmp_path, tokenizer, small_shards, monkeypatch
):
    lines = (corpus_folder / "validation.jsonl").read_text().splitlines(keepends=True)
    source = str(tmp_path / "text.jsonl")
    Path(source).write_text("".join(lines[:16]))
    whole = tokenize_corpus(corpus(source, tmp_path / "whole"), "train", tokenizer)
    killed = 0
    while True:
        settings = corpus(source, tmp_path / f"killed-{killed}")
        if not killed_at(killed + 1, lambda s=settings: tokenize_corpus(s, "train", tokenizer)):
            break
        killed += 1
        finished = [p for p in Path(settings.cache).glob("*-*") if not p.name.startswith(".")]
        times = sorted(p.stat().st_mtime_ns for p in finished)
        store = tokenize_corpus(settings, "train", tokenizer)
        assert contents(store) == contents(whole)
        assert sorted(p.stat().st_mtime_ns for p in store.shards)[: len(times)] == times
    assert killed > 3 * len(whole.shards)


def killed_at(moment: int, build) -> bool:
    """Whether a forked child that does `build` was killed, at its n-th batch, write or rename."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    seen = itertools.count(1)

    def deadly(function):
        def call(*arguments, **options):
            if next(seen) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    train.data.corpus._encode = deadly(train.data.corpus._encode)
    for name in ("rename", "write_text"):
        setattr(Path, name, deadly(getattr(Path, name)))
    build()
    os._exit(0)


DAMAGES = {
    "cut": lambda data: data[:-1],
    "every second byte": lambda data: bytes(b ^ (i % 2) for i, b in enumerate(data)),
    "all ones": lambda data: b"\xff" * len(data),
    "second half empty": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_the_cache_is_made_again(
    corpus_folder, tmp_path, tokenizer, small_shards, monkeypatch, damage
):
    monkeypatch.setattr("train.data.corpus.PAGE", 8)  # so that files have more than 16
    settings = corpus(str(corpus_folder / "validation.jsonl"), tmp_path)
    store = tokenize_corpus(settings, "train", tokenizer)
    before = contents(store)
    files = [store.shards[2] / "tokens.bin", store.shards[3] / "documents.bin"]
    files += [store.shards[4] / "hashes.bin", store.shards[5] / "manifest.json"]
    for file in [*files, store.folder / "documents.bin"]:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        assert contents(tokenize_corpus(settings, "train", tokenizer)) == before


def test_tokenizers_that_cut_words_in_python_are_told_apart_by_their_rules(written, tmp_path):
    def chinese(*words: str, **options: bool) -> transformers.PreTrainedTokenizerBase:
        pieces = [*vocabulary.SPECIAL_TOKENS, *words, "a", "river", ".", "likes"]
        pieces = {piece: i for i, piece in enumerate(pieces)}
        return transformers.RoFormerTokenizer(vocab=pieces, **options)

    settings = corpus(str(written / "c.txt"), tmp_path)
    store = tokenize_corpus(settings, "train", chinese("the", "cat", "moon"))
    assert 5 in everything(store)
    assert tokenize_corpus(settings, "train", chinese("the", "cat", "moon")).folder == store.folder
    assert tokenize_corpus(settings, "train", chinese("the", "moon", "cat")).folder != store.folder
    kept = chinese("the", "cat", "moon", do_lower_case=False)
    assert tokenize_corpus(settings, "train", kept).folder != store.folder


def test_the_command_says_how_much_was_done(written, tmp_path, tokenizer_folder, capsys):
    settings = corpus(str(written), tmp_path, tokenizer=str(tokenizer_folder))
    (tmp_path / "held-out.txt").write_text("the river sees a song .\n")
    settings = dataclasses.replace(settings, validation=str(tmp_path / "held-out.txt"))
    for made in (3, 0):
        main(TokenizeSettings(settings))
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].startswith("train: 9 documents, ")
        assert f", {made} of 3 shards made from " in lines[0]


def test_a_tokenizers_saved_truncation_does_not_cut_documents(written, tmp_path, tokenizer_folder):
    tokenizer = vocabulary.load_tokenizer(str(tokenizer_folder))
    whole = tokenize_corpus(corpus(str(written / "c.txt"), tmp_path), "train", tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(tmp_path / "truncating")
    again = vocabulary.load_tokenizer(str(tmp_path / "truncating"))
    store = tokenize_corpus(corpus(str(written / "c.txt"), tmp_path / "x"), "train", again)
    assert everything(store).tolist() == everything(whole).tolist()


def test_parts_follow_the_names_and_hub_data_sets_stand_among_files(
    written, tmp_path, tokenizer, monkeypatch
):
    splits = {part: [{"text": "the moon"}] for part in ("train", "validation")}
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: splits)
    names = [str(written), "owner/name", str(written / "c.txt")]
    store = tokenize_corpus(corpus(names, tmp_path), "train", tokenizer)
    assert store.source_documents == (9, 1, 3)
    weighed = tokenize_corpus(corpus(names, tmp_path, weights=[1.0, 2.0, 3.0]), "train", tokenizer)
    assert weighed.source_documents == store.source_documents


def described(train: str, held_out: str, tmp_path: Path, tokenizer) -> list[str]:
    """The lines about two txt files with these texts."""
    stores = []
    for part, text in (("train", train), ("validation", held_out)):
        (tmp_path / f"{part}.txt").write_text(text)
        settings = corpus(str(tmp_path / f"{part}.txt"), tmp_path)
        stores.append(tokenize_corpus(settings, "train", tokenizer))
    return list(describe_stores(stores[:1], stores[1]))


def test_held_out_documents_are_no_training_documents(tmp_path, tokenizer):
    own = "\n\n".join(sentences(20, 1) + sentences(20, 2))
    for copies in (sentences(20, 2), ["\n".join(s.split()) for s in sentences(20, 2)]):
        with pytest.raises(InputError, match=r"corpus.validation .*got 100.0% .* 20 of 20 doc"):
            described(own, "\n\n".join(copies), tmp_path, tokenizer)
    few = "\n\n".join([sentences(1, 1)[0], "the king the king " * 30])
    lines = described(own, few, tmp_path, tokenizer)
    assert [line for line in lines if "in 1 of 2 documents; take them out" in line]
    clean = described(own, "the king the king", tmp_path, tokenizer)
    assert not [line for line in clean if "must not be training text" in line]


def test_text_that_the_tokenizer_does_not_know_is_said_and_above_half_refused(tmp_path, tokenizer):
    lines = described("the moon \u0e01 \u0e02\n", "the moon sees\n", tmp_path, tokenizer)
    assert lines[:2] == [
        "train: 1 documents, 4 tokens",
        "warning: corpus.train: 50.0% of its tokens are unknown to corpus.tokenizer",
    ]
    with pytest.raises(InputError, match="corpus.tokenizer .* got 67% unknown tokens"):
        described("the \u0e01 \u0e02\n", "the moon sees\n", tmp_path, tokenizer)


def test_text_cut_into_many_pieces_is_said(tmp_path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*vocabulary.SPECIAL_TOKENS, *letters, *(f"##{x}" for x in letters), "moon", "sees"]
    vocabulary.save_tokenizer(pieces, tmp_path / "letters")
    words = vocabulary.load_tokenizer(str(tmp_path / "letters"))
    warning = "warning: corpus.train: corpus.tokenizer cuts words into 4.0 pieces"
    assert described("loup rouge lac", "moon", tmp_path, words)[1].startswith(warning)
    for text, tokenizer in (("moon sees moon", words), ("loup", vocabulary.byte_tokenizer())):
        assert not [x for x in described(text, "a", tmp_path, tokenizer) if "pieces" in x]


def test_held_out_text_of_a_few_predictions_is_said(tmp_path, tokenizer):
    few = described("the moon", "the cat sees " * 3_000, tmp_path, tokenizer)[-1]
    assert few.startswith("warning: corpus.validation has 9,000 tokens")
    enough = described("the moon", "the cat sees " * 4_000, tmp_path, tokenizer)[-1]
    assert enough == "validation: 1 documents, 12,000 tokens"


def test_a_share_of_the_documents_is_held_out(corpus_folder, tmp_path, tokenizer):
    file = corpus_folder / "train.jsonl"
    settings = corpus(str(file), tmp_path, validation="20%")
    parts = [list(read_documents(settings, part)) for part in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(texts(file, tmp_path))
    assert not set(parts[0]) & set(parts[1])
    assert 0.12 < len(parts[1]) / (len(parts[0]) + len(parts[1])) < 0.28
    # another format, order and case: the same draw
    (tmp_path / "same.txt").write_text(
        "\n\n".join(t.upper() for t in reversed(texts(file, tmp_path)))
    )
    again = corpus(str(tmp_path / "same.txt"), tmp_path, validation="20%")
    found = [text.strip().lower() for text in read_documents(again, "validation")]
    assert found == parts[1][::-1]
    stores = [tokenize_corpus(settings, part, tokenizer) for part in ("train", "validation")]
    assert [len(store.document_ends) for store in stores] == [len(part) for part in parts]
    check_disjoint_files(settings)
    assert not [x for x in describe_stores(stores[:1], stores[1]) if "must not be" in x]


def test_a_share_that_cannot_be_held_out_is_refused(written, tmp_path, tokenizer):
    for share in ("0%", "100%"):
        with pytest.raises(InputError, match="corpus.validation must be text, or a share above"):
            CorpusSettings(validation=share)
    with pytest.raises(InputError, match="corpus.validation must hold text, got 0.1% .*; raise"):
        tokenize_corpus(corpus(str(written), tmp_path, validation="0.1%"), "validation", tokenizer)
    with pytest.raises(InputError, match="corpus.validation must be 'embedded' for both"):
        check_disjoint_files(CorpusSettings(validation="2%"))
    with pytest.raises(InputError, match="corpus.validation must name text for the hub data set"):
        tokenize_corpus(corpus("owner/name", tmp_path, validation="2%"), "train", tokenizer)
    with pytest.raises(InputError, match="corpus.validation must name held-out text, got 2%"):
        HeldOutSettings(validation="2%")
