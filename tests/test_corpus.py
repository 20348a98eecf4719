"""Reading every format, the token store, and one line for everything that cannot be read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train import docstrings, vocabulary
from train.corpus import documents, tokenise
from train.settings import CorpusSettings, InputError

TEXTS = ["the cat sees the moon .", "a dog likes a river . " * 30, "my sister hears the song ."]


def corpus(source, tmp_path, **changes) -> CorpusSettings:
    return CorpusSettings(train=source, cache=str(tmp_path / "tokens"), **changes)


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"id": [0, 1, 2], "text": TEXTS}), folder / "a.parquet")
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl", "c.txt"])
def test_every_format_gives_the_same_documents(written, tmp_path, name):
    found = [t.strip() for t in documents(corpus(str(written / name), tmp_path), "train")]
    assert found == [t.strip() for t in TEXTS]


def test_folders_globs_and_lists_are_read_in_order(written, tmp_path):
    assert len(list(documents(corpus(str(written), tmp_path), "train"))) == 9
    assert len(list(documents(corpus(str(written / "*.*l*"), tmp_path), "train"))) == 3
    both = [str(written / "c.txt"), str(written / "a.parquet")]
    assert len(list(documents(corpus(both, tmp_path), "train"))) == 6


def test_stored_tokens_are_the_tokenizers(written, tmp_path, tokenizer):
    store = tokenise(corpus(str(written / "a.parquet"), tmp_path), "train", tokenizer)
    ids = np.split(store.tokens, store.ends)[:-1]
    expected = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert [list(i) for i in ids] == expected
    assert store.tokens.dtype == np.uint16


def test_a_store_is_reused_until_text_or_tokenizer_changes(written, tmp_path, tokenizer):
    settings = corpus(str(written / "c.txt"), tmp_path)
    first = tokenise(settings, "train", tokenizer)
    before = (first.folder / "tokens.bin").stat().st_mtime_ns
    again = tokenise(settings, "train", tokenizer)
    assert again.folder == first.folder
    assert (again.folder / "tokens.bin").stat().st_mtime_ns == before
    (written / "c.txt").write_text("a dog sees her friend .\n")
    assert tokenise(settings, "train", tokenizer).folder != first.folder


def test_empty_files_and_null_texts_are_no_documents_and_no_error(written, tmp_path, tokenizer):
    (written / "d.jsonl").write_text("")
    (written / "e[0].jsonl").write_text('{"text": null}\n')
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), written / "f.parquet")
    (written / "folder.txt").mkdir()
    assert len(list(documents(corpus(str(written), tmp_path), "train"))) == 10
    assert list(documents(corpus(str(written / "e[0].jsonl"), tmp_path), "train")) == [""]


def test_a_txt_without_blank_lines_is_cut_not_held_in_memory(tmp_path):
    (tmp_path / "long.txt").write_text("a line of text .\n" * 200_000)
    found = list(documents(corpus(str(tmp_path / "long.txt"), tmp_path), "train"))
    assert len(found) == 4
    assert sum(map(len, found)) == 17 * 200_000


def test_a_tokenizers_saved_truncation_does_not_cut_documents(written, tmp_path, tokenizer_folder):
    tokenizer = vocabulary.load(str(tokenizer_folder))
    whole = tokenise(corpus(str(written / "c.txt"), tmp_path), "train", tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(tmp_path / "truncating")
    again = vocabulary.load(str(tmp_path / "truncating"))
    store = tokenise(corpus(str(written / "c.txt"), tmp_path / "x"), "train", again)
    assert store.tokens.tolist() == whole.tokens.tolist()


def test_the_same_text_gives_the_same_bytes(written, tmp_path, tokenizer):
    stores = [
        tokenise(corpus(str(written), tmp_path / name), "train", tokenizer) for name in ("x", "y")
    ]
    for name in ("tokens.bin", "documents.bin"):
        first, second = ((store.folder / name).read_bytes() for store in stores)
        assert first == second


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: "/nowhere/x", "corpus.train must exist, got '/nowhere/x'; check the path"),
        (lambda p: str(p / "empty"), "corpus.train must hold .*.parquet.* files, got none in"),
        (lambda p: str(p / "none-*.parquet"), "corpus.train must match a file, got none for"),
        (
            lambda p: str(p / "t.csv"),
            "corpus.train must be .*.parquet.* files, got .*t.csv; convert",
        ),
        (lambda p: str(p / "latin.txt"), "must be UTF-8, got line 1 of .*latin.txt.*; convert"),
        (lambda p: str(p / "latin.jsonl"), "must be UTF-8, got line 1 of .*latin.jsonl.*; convert"),
        (lambda p: str(p / "blank.txt"), "corpus.train must hold text, got .*blank.txt with none"),
        (
            lambda p: str(p / "column.jsonl"),
            "corpus.text_column must name a column .*'text'; it has body",
        ),
        (
            lambda p: str(p / "broken.parquet"),
            "corpus.train must be readable parquet, got .*broken",
        ),
        (lambda p: str(p / "torn.jsonl"), "must hold one JSON object a line, got line 2 of .*torn"),
        (
            lambda p: str(p / "numbers.jsonl"),
            "corpus.text_column must name a column of text .*with 5;",
        ),
        (lambda p: str(p / "lists.parquet"), r"must name a column of text .*with \[1\];"),
        (lambda p: [], "corpus.train must name a source, got an empty list"),
        (
            lambda p: ["no-such/dataset"],
            "corpus.train must be a folder, file, glob or hub data set",
        ),
        (lambda p: "no-such/dataset", "corpus.train must be a folder, file, glob or hub data set"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, tokenizer, make, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.csv").write_text("text\nx\n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (tmp_path / "latin.jsonl").write_bytes('{"text": "caf\xe9"}\n'.encode("latin-1"))
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "column.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "torn.jsonl").write_text('{"text": "x"}\n{"text": ')
    (tmp_path / "numbers.jsonl").write_text('{"text": 5}\n')
    pq.write_table(pa.table({"text": [[1]]}), tmp_path / "lists.parquet")
    with pytest.raises(InputError, match=message) as caught:
        tokenise(corpus(make(tmp_path), tmp_path), "train", tokenizer)
    assert "\n" not in str(caught.value)
    left = tmp_path / "tokens"
    assert not left.exists() or not list(left.iterdir())


def test_a_hub_data_set_is_read_as_a_stream(tmp_path, monkeypatch):
    def load_dataset(name, configuration, split, streaming):
        assert (name, configuration) == ("owner/name", "small")
        assert (split, streaming) == ("validation", True)
        return iter([{"text": text} for text in TEXTS] + [{"text": None}])

    monkeypatch.setattr("train.corpus.datasets.load_dataset", load_dataset)
    settings = CorpusSettings(validation="owner/name:small", cache=str(tmp_path))
    assert list(documents(settings, "validation")) == [*TEXTS, ""]
    missing = CorpusSettings(validation="owner/name:small", text_column="body", cache=str(tmp_path))
    with pytest.raises(InputError, match="corpus.text_column must name a column of owner/name"):
        list(documents(missing, "validation"))


def test_the_embedded_corpus_is_deterministic_unique_and_split_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "MEGABYTES", 0.3)
    first = list(docstrings.documents())
    assert first == list(docstrings.documents())
    texts = [text for text, _ in first]
    assert len(set(texts)) == len(texts)
    assert 0.25e6 < sum(map(len, texts)) <= 0.3e6
    held_out = [text for text, out in first if out]
    assert held_out
    settings = CorpusSettings(cache=str(tmp_path))
    assert list(documents(settings, "validation")) == held_out


def test_docstrings_are_read_without_running_the_file(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Top."""\nraise SystemExit\nclass A:\n  """In A."""\n  def f(x):\n    """In f."""\n'
    )
    assert list(docstrings.docstrings(file)) == ["Top.", "In A.", "In f."]
    file.write_text('def broken(:\n  """x"""')
    assert list(docstrings.docstrings(file)) == []
