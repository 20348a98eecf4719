"""Reading every format, folder and name; one line for everything that cannot be read."""

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiny import refused
from tiny_tokens import TEXTS, texts
from train.data import demo_corpus
from train.data.documents import check_text_files, read_documents, read_file
from train.settings import CorpusSettings


@pytest.mark.parametrize("packed", ["", "gzip", "zstd", "byte order mark"])
@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl", "c.txt"])
def test_every_format_gives_the_same_documents(written, tmp_path, name, packed):
    file = written / name
    if packed == "byte order mark" and name != "a.parquet":
        file.write_text(file.read_text(), encoding="utf-8-sig")
    elif packed and name != "a.parquet":  # which is packed inside
        file = pack(file, packed)
    assert [t.strip() for t in texts(file, tmp_path)] == [t.strip() for t in TEXTS]


def pack(file: Path, kind: str) -> Path:
    packed = file.with_name(file.name + {"gzip": ".gz", "zstd": ".zst"}[kind])
    with pa.CompressedOutputStream(str(packed), kind) as stream:
        stream.write(file.read_bytes())
    return packed


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_damaged_archive_is_one_line_that_names_it(written, tokenize, kind):
    packed = pack(written / "b.jsonl", kind)
    whole = packed.read_bytes()
    for wrong in (whole[:-3], b"?" + whole[1:]):
        packed.write_bytes(wrong)
        rule = "corpus.train must be a readable file"
        refused(partial(tokenize, packed), rule, packed.name, "; repair the file")


def test_empty_files_and_null_texts_are_no_documents_and_no_error(written, tmp_path):
    (written / "d.jsonl").write_text("")
    (written / "e[0].jsonl").write_text('{"text": null}\n')
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), written / "f.parquet")
    assert len(texts(written, tmp_path)) == 10
    assert texts(written / "e[0].jsonl", tmp_path) == [""]


def test_a_txt_without_blank_lines_is_cut_not_held_in_memory(tmp_path):
    (tmp_path / "long.txt").write_text("a line of text .\n" * 200_000)
    found = texts(tmp_path / "long.txt", tmp_path)
    assert len(found) == 4
    assert sum(map(len, found)) == 17 * 200_000


BAD_FILES = {
    "t.csv": (b"text\nx\n", "corpus.train must be", "t.csv"),
    "latin.txt": (b"caf\xe9 au lait", "corpus.train must be", "latin.txt", "to UTF-8"),
    "blank.txt": (b"\n\n", "corpus.train must hold text, got", "blank.txt"),
    "b.jsonl": (b'{"text": ""}\n{"b": ""}', "corpus.text_column", "line 2 of", "'text'; it has b"),
    "broken.parquet": (b"PAR1 nothing", "corpus.train", "broken.parquet"),
    "torn.jsonl": (b'{"text": "x"}\n{"text": ', "corpus.train", "got line 2 of", "torn.jsonl"),
    "array.jsonl": (b'[{"text": "x"}]', "corpus.train", "got line 1 of", "array.jsonl: a list"),
    "h.jsonl": (b'{"text": "\\ud83d"}', "corpus.train", "got line 1 of", "h.jsonl: 'utf-8'"),
    "numbers.jsonl": (b'{"text": 5}\n', "corpus.text_column", "line 1 of", "with 5;"),
}

BAD_NAMES = [
    ("{0}/empty", "corpus.train must hold", ".parquet", "got none in"),
    ("none-*", "corpus.train must exist, got 'none-*'"),
    ("{0}/lists.parquet", "corpus.text_column", "with [1];"),
    ([], "corpus.train must name a source, got []"),
    ("no-such/dataset", "corpus.train must be a folder, file, glob or hub data set"),
    *(("{0}/" + name, *words) for name, (_, *words) in BAD_FILES.items()),
]


@pytest.mark.parametrize("case", BAD_NAMES, ids=lambda case: str(case[0]))
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, tokenize, case):
    (tmp_path / "empty").mkdir()
    for name, (content, *_) in BAD_FILES.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"text": [[1]]}), tmp_path / "lists.parquet")
    source, *words = case
    source = source.format(tmp_path) if isinstance(source, str) else source
    refused(partial(tokenize, source), *words)
    left = {path.name for path in (tmp_path / "tokens").glob("*")}
    assert left <= {"hashes"}  # hashes of files are valid whatever their content


def test_a_hub_data_set_is_read_as_a_stream(tmp_path, monkeypatch):
    def load_dataset(name, configuration, streaming):
        assert (name, configuration, streaming) == ("owner/name", "small", True)
        return {"validation": [{"text": text} for text in TEXTS] + [{"text": None}]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    settings = CorpusSettings(validation="owner/name:small", cache=str(tmp_path))
    assert list(read_documents(settings, "validation")) == [*TEXTS, ""]
    missing = CorpusSettings(validation="owner/name:small", text_column="body", cache=str(tmp_path))
    read = partial(read_documents, missing, "validation")
    refused(lambda: list(read()), "corpus.text_column must name a column of owner/name")


def test_a_hub_data_set_without_held_out_text_gives_its_first_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.data.documents.HELD_OUT_DOCUMENTS", 2)
    file = tmp_path / "owner" / "name" / "train.jsonl"  # `datasets` reads a folder in the same way
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in "abcde"))
    for part, expected in (("train", ["c", "d", "e"]), ("validation", ["a", "b"])):
        assert list(read_file("owner/name", part, CorpusSettings())) == expected
    file.rename(file.with_name("test.jsonl"))
    read = partial(read_file, "owner/name", "train", CorpusSettings())
    refused(lambda: list(read()), "hub data set with a train split")


def test_the_parts_of_the_embedded_corpus_share_no_text_however_its_lines_are_broken(monkeypatch):
    text = "One docstring in two files. " * 10
    monkeypatch.setattr(demo_corpus, "source_files", lambda: map(Path, "ab"))
    monkeypatch.setattr(demo_corpus, "HELD_OUT_EVERY", 2)
    texts = {"a": [text, "a " * 150], "b": [text.replace(" two", "\ntwo"), "b " * 150]}
    monkeypatch.setattr(demo_corpus, "docstrings", lambda path: texts[path.name])
    found = list(demo_corpus.read_docstrings())
    assert found == [(text, False), ("a " * 150, False), ("b " * 150, True)]


def test_the_embedded_corpus_is_deterministic_unique_and_split_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_corpus, "MEGABYTES", 0.3)
    monkeypatch.setattr(demo_corpus, "PACKAGES", ("jsonargparse",))
    first = list(demo_corpus.read_docstrings())
    assert first == list(demo_corpus.read_docstrings())
    texts = [text for text, _ in first]
    assert len(set(texts)) == len(texts)
    assert 0.25e6 < sum(map(len, texts)) <= 0.3e6
    held_out = [text for text, out in first if out]
    assert held_out
    assert list(read_documents(CorpusSettings(cache=str(tmp_path)), "validation")) == held_out


def test_docstrings_are_read_without_running_the_file(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Top."""\nraise SystemExit\nclass A:\n  """A"""\n  def f(x):\n    """f"""\n')
    assert list(demo_corpus.docstrings(file)) == ["Top.", "A", "f"]
    file.write_text('def broken(:\n  """x"""')
    assert list(demo_corpus.docstrings(file)) == []


def test_folders_and_globs_are_read_and_linked_files_and_folders_once(written, tokenize, tmp_path):
    assert len(texts(written, tmp_path)) == 9
    assert len(texts(written / "*.*l*", tmp_path)) == 3
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.txt").write_text("from elsewhere\n")
    (written / "linked").symlink_to(tmp_path / "more")
    (written / "itself").symlink_to(written)
    (written / "again.txt").symlink_to(written / "c.txt")
    plain = ["a.parquet", "b.jsonl", "c.txt"]
    named = texts([str(written / name) for name in plain], tmp_path)
    assert sorted(texts(written, tmp_path)) == sorted([*named, "from elsewhere\n"])
    (written / "lost.txt").symlink_to(tmp_path / "nothing")
    refused(partial(tokenize, written), "must be a readable file", "lost.txt")


def test_a_model_is_not_measured_on_what_it_learns_from(written, tmp_path):
    folder, file = str(written), str(written / "c.txt")
    for given, *words in (
        ({"train": folder}, "must be 'embedded' for both parts or neither"),
        ({"train": folder, "validation": file}, "no file of corpus.train", file),
        ({"train": [file], "validation": [f"{folder}/../text/c.txt"]}, file),
    ):
        settings = CorpusSettings(**given, cache=str(tmp_path))
        refused(partial(check_text_files, settings), "corpus.validation", *words)
