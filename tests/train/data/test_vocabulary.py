"""The learned vocabulary: the same bytes every time, a real BERT tokenizer, picklable."""

import copy
import dataclasses
import re
from functools import partial
from types import SimpleNamespace

from transformers import AutoTokenizer, BertTokenizer

from tiny import command, refused
from train.data import vocabulary
from train.data.vocabulary import Vocab
from train.settings import CorpusSettings


def test_two_processes_learn_byte_identical_files(corpus_folder, tmp_path):
    text = str(corpus_folder / "train.jsonl")
    done = command(
        "-m", "train.data.corpus", f"--corpus.train={text}",
        f"--corpus.validation={corpus_folder / 'validation.jsonl'}",
        f"--corpus.tokenizer={tmp_path / 'a'}", "--corpus.vocabulary_size=120",
        f"--corpus.cache={tmp_path / 'tokens'}",
    )  # fmt: skip
    assert re.search(r"^train: [\d,]+ documents, [\d,]+ tokens \(", done.stdout, re.MULTILINE)
    settings = CorpusSettings(train=text, tokenizer=str(tmp_path / "b"), vocabulary_size=120)
    vocabulary.train_if_missing(settings)
    for file in ("vocab.txt", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    pieces = (tmp_path / "a" / "vocab.txt").read_text().splitlines()
    assert tuple(pieces[:5]) == vocabulary.SPECIAL_TOKENS
    assert len(set(pieces)) == len(pieces) <= 120
    assert any(piece.startswith("##") for piece in pieces)


def test_the_saved_tokenizer_is_a_bert_one_for_any_auto_class(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    pair = tokenizer("The CAT sees", "a dog")
    assert tokenizer.decode(pair["input_ids"]) == "[CLS] the cat sees [SEP] a dog [SEP]"
    assert pair["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]
    clone = copy.deepcopy(tokenizer)  # by the pickle protocol
    assert clone("the moon")["input_ids"] == tokenizer("the moon")["input_ids"]


def test_a_bare_vocab_txt_is_read_in_its_own_case(tmp_path):
    file = tmp_path / "vocab.txt"
    for words in (["Hello", "World"], ["hello", "world"]):
        pieces = [*vocabulary.SPECIAL_TOKENS, "[unused1]", *words, "h", "##o"]
        file.write_text("\n".join(pieces) + "\n")
        assert vocabulary.load_tokenizer(str(file)).tokenize("Hello World") == words
    load = partial(vocabulary.load_tokenizer, str(tmp_path))
    refused(load, "corpus.tokenizer must be a folder", f"got '{tmp_path}'")


def test_ids_may_have_gaps():
    pieces = {piece: 2 * i for i, piece in enumerate([*vocabulary.SPECIAL_TOKENS, "a"])}
    assert Vocab.from_tokenizer(BertTokenizer(vocab=pieces)).size == 11


def test_a_missing_damaged_or_slow_tokenizer_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    damaged = partial(vocabulary.load_tokenizer, str(tmp_path))
    refused(damaged, "corpus.tokenizer must be a folder", "(Expecting property name")
    (tmp_path / "tokenizer.json").unlink()
    refused(damaged, "corpus.tokenizer must be a folder", "special tokens alone")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\na\n")
    refused(partial(vocabulary.load_tokenizer, str(tmp_path / "vocab.txt")), "UNK")
    load = partial(vocabulary.load_tokenizer, str(tmp_path / "none"))
    refused(partial(load, key="model"), "model must be a folder")
    slow = SimpleNamespace(is_fast=False)
    monkeypatch.setattr(vocabulary, "check_has_vocabulary", lambda tokenizer: None)
    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", lambda name: slow)
    refused(load, "corpus.tokenizer must be a fast tokenizer")


def test_a_vocabulary_is_not_learned_under_a_name_of_the_hub(tmp_path, monkeypatch):
    """The folder would be taken for the hub's tokenizer, there and in every later command."""
    (tmp_path / "text.txt").write_text("the cat sees the moon\n")
    monkeypatch.chdir(tmp_path)
    for name in ("bert-base-uncased", "junnyu/roformer_chinese_base"):
        settings = CorpusSettings(train="text.txt", tokenizer=name, vocabulary_size=100)
        learn = partial(vocabulary.train_if_missing, settings)
        refused(learn, "corpus.tokenizer must", f"got '{name}'; write ./{name}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]
    (tmp_path / "there").mkdir()
    for name in ("./words", "there/words", "runs/words", "some/new/words"):
        vocabulary.train_if_missing(dataclasses.replace(settings, tokenizer=name))
        assert (tmp_path / name / "tokenizer_config.json").is_file()


def test_a_size_is_kept_even_with_many_characters_and_a_larger_one_refused(tmp_path):
    texts = ["".join(chr(0x100 + i) for i in range(300)) + " the cat the cat" for _ in range(3)]
    pieces = vocabulary.train_wordpiece(lambda: iter(texts), 120)
    assert len(pieces) <= 120
    assert {"t", "##e"} <= set(pieces)
    pieces = [*vocabulary.SPECIAL_TOKENS, *map(chr, range(0x4E00, 0x4E64))]
    vocabulary.save_tokenizer(pieces, tmp_path / "larger")
    settings = CorpusSettings(tokenizer=str(tmp_path / "larger"), vocabulary_size=100)
    refused(lambda: vocabulary.train_if_missing(settings), "must be at least the 105", "got 100")


def test_nothing_is_learned_from_nothing(tmp_path):
    text, words = tmp_path / "blank.txt", tmp_path / "v"
    text.write_text("\n")
    settings = CorpusSettings(train=str(text), tokenizer=str(words), vocabulary_size=100)
    learn = partial(vocabulary.train_if_missing, settings)
    refused(learn, "corpus.train must hold text to learn from, got none")
    assert not words.exists()


def test_without_a_tokenizer_each_text_gets_a_vocabulary_of_its_own(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sees the moon\n")
    settings = CorpusSettings(train=str(tmp_path / "text.txt"), cache=str(tmp_path / "tokens"))
    learn = partial(vocabulary.train_if_missing, settings)
    refused(learn, "corpus.tokenizer must be given, or corpus.vocabulary_size")
    settings = dataclasses.replace(settings, vocabulary_size=100)
    first = vocabulary.train_if_missing(settings)
    assert "v" not in vocabulary.load_tokenizer(first).get_vocab()
    assert vocabulary.train_if_missing(settings) == first
    (tmp_path / "text.txt").write_text("a dog likes a river\n")
    other = vocabulary.train_if_missing(settings)
    assert other != first
    assert "v" in vocabulary.load_tokenizer(other).get_vocab()
    assert vocabulary.train_if_missing(dataclasses.replace(settings, vocabulary_size=200)) != other
