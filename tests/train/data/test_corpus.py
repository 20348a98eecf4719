"""Reading every format, the token store, and one line for everything that cannot be read."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from tqdm import tqdm

import train.data.corpus
from train.data import demo_corpus, vocabulary
from train.data.corpus import TokenizeSettings, describe_store, main, tokenize_corpus
from train.data.documents import check_disjoint_files, read_documents, read_source
from train.data.token_store import TokenStore
from train.settings import CorpusSettings, InputError

TEXTS = ["the cat sees the moon .", "a dog likes a river . " * 30, "my sister hears the song ."]


def corpus(source, tmp_path, **changes) -> CorpusSettings:
    return CorpusSettings(train=source, cache=str(tmp_path / "tokens"), **changes)


def texts(source: Path, tmp_path: Path) -> list[str]:
    """The documents of a training text."""
    return list(read_documents(corpus(str(source), tmp_path), "train"))


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


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"id": [0, 1, 2], "text": TEXTS}), folder / "a.parquet")
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder


@pytest.mark.parametrize("packed", ["", "gzip", "zstd"])
@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl", "c.txt"])
def test_every_format_gives_the_same_documents(written, tmp_path, name, packed):
    file = written / name
    if packed and name != "a.parquet":  # which is packed inside
        file = pack(file, packed)
    assert [t.strip() for t in texts(file, tmp_path)] == [t.strip() for t in TEXTS]


def pack(file: Path, kind: str) -> Path:
    """The file packed, beside it."""
    packed = file.with_name(file.name + {"gzip": ".gz", "zstd": ".zst"}[kind])
    with pa.CompressedOutputStream(str(packed), kind) as stream:
        stream.write(file.read_bytes())
    return packed


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_damaged_archive_is_one_line_that_names_it(written, tmp_path, tokenizer, kind):
    packed = pack(written / "b.jsonl", kind)
    whole = packed.read_bytes()
    for wrong in (whole[:-3], b"?" + whole[1:]):
        packed.write_bytes(wrong)
        message = f"corpus.train must be a readable file, got .*{packed.name}: .*; mend the file"
        with pytest.raises(InputError, match=message) as caught:
            tokenize_corpus(corpus(str(packed), tmp_path), "train", tokenizer)
        assert "\n" not in str(caught.value)


def test_archives_that_were_joined_are_read_to_the_end(written, tmp_path):
    packed = pack(written / "b.jsonl", "gzip")
    packed.write_bytes(packed.read_bytes() * 2)
    assert len(texts(packed, tmp_path)) == 6


def test_folders_globs_and_lists_are_read_in_order(written, tmp_path):
    assert len(texts(written, tmp_path)) == 9
    assert len(texts(written / "*.*l*", tmp_path)) == 3
    both = [str(written / "c.txt"), str(written / "a.parquet")]
    assert len(list(read_documents(corpus(both, tmp_path), "train"))) == 6


def test_a_store_is_reused_until_text_or_tokenizer_changes(written, tmp_path, tokenizer):
    settings = corpus(str(written / "c.txt"), tmp_path)
    first = tokenize_corpus(settings, "train", tokenizer)
    before = state(first)
    again = tokenize_corpus(settings, "train", tokenizer)
    assert again.folder == first.folder
    assert state(again) == before
    pieces = [*vocabulary.SPECIAL_TOKENS, "the", "cat", "dog", "a"]
    vocabulary.save_tokenizer(pieces, tmp_path / "other")
    other = vocabulary.load_tokenizer(str(tmp_path / "other"))
    assert tokenize_corpus(settings, "train", other).folder != first.folder
    (written / "c.txt").write_text("a dog sees her friend .\n")
    assert tokenize_corpus(settings, "train", tokenizer).folder != first.folder


def test_a_file_that_joins_a_corpus_is_the_only_one_that_is_tokenised(
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


def test_what_killed_builds_left_is_swept_and_a_running_one_is_not(written, tmp_path, tokenizer):
    settings = corpus(str(written / "c.txt"), tmp_path)
    (shard,) = tokenize_corpus(settings, "train", tokenizer).shards
    shutil.rmtree(shard)
    old, young = (shard.with_name(f".{shard.name}.{name}") for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "tokens.bin").touch()
    os.utime(old, (0, 0))
    tokenize_corpus(settings, "train", tokenizer)
    assert (old.exists(), young.exists()) == (False, True)


def test_a_shard_cut_short_by_a_power_failure_is_made_again(
    corpus_folder, tmp_path, tokenizer, small_shards
):
    settings = corpus(str(corpus_folder / "validation.jsonl"), tmp_path)
    store = tokenize_corpus(settings, "train", tokenizer)
    before = contents(store)
    files = [store.shards[2] / "tokens.bin", store.shards[3] / "documents.bin"]
    files += [store.shards[4] / "manifest.json", store.folder / "documents.bin"]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
        assert contents(tokenize_corpus(settings, "train", tokenizer)) == before


def test_tokenizers_that_cut_words_in_python_are_told_apart_by_their_rules(written, tmp_path):
    def chinese(*words: str, **options: bool) -> transformers.PreTrainedTokenizerBase:
        pieces = {piece: i for i, piece in enumerate([*vocabulary.SPECIAL_TOKENS, *words])}
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
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith("train: 9 documents, ")
        assert f", {made} of 3 shards made from " in line
        assert "MB/s a core on" in line


def test_a_bar_says_how_many_documents_a_second(written, tmp_path, tokenizer, capsys, monkeypatch):
    at_once = {"delay": 0, "mininterval": 0}  # otherwise it shows itself after a second
    monkeypatch.setattr("train.data.corpus.tqdm", lambda **given: tqdm(**(given | at_once)))
    number = len(tokenize_corpus(corpus(str(written), tmp_path), "train", tokenizer).document_ends)
    said = capsys.readouterr().err
    assert re.search(rf"tokenising train: {number} documents \[.* documents/s\]", said)


def test_empty_files_and_null_texts_are_no_documents_and_no_error(written, tmp_path, tokenizer):
    (written / "d.jsonl").write_text("")
    (written / "e[0].jsonl").write_text('{"text": null}\n')
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), written / "f.parquet")
    (written / "folder.txt").mkdir()
    assert len(texts(written, tmp_path)) == 10
    assert texts(written / "e[0].jsonl", tmp_path) == [""]


def test_a_txt_without_blank_lines_is_cut_not_held_in_memory(tmp_path):
    (tmp_path / "long.txt").write_text("a line of text .\n" * 200_000)
    found = texts(tmp_path / "long.txt", tmp_path)
    assert len(found) == 4
    assert sum(map(len, found)) == 17 * 200_000


def test_a_tokenizers_saved_truncation_does_not_cut_documents(written, tmp_path, tokenizer_folder):
    tokenizer = vocabulary.load_tokenizer(str(tokenizer_folder))
    whole = tokenize_corpus(corpus(str(written / "c.txt"), tmp_path), "train", tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(tmp_path / "truncating")
    again = vocabulary.load_tokenizer(str(tmp_path / "truncating"))
    store = tokenize_corpus(corpus(str(written / "c.txt"), tmp_path / "x"), "train", again)
    assert everything(store).tolist() == everything(whole).tolist()


@pytest.mark.parametrize(
    ("train", "weights"), [("a.txt", [1.0, 2.0]), (["a.txt", "b.txt"], [1.0]), ("a.txt", [0.0])]
)
def test_weights_that_do_not_fit_the_names_are_refused(train, weights):
    with pytest.raises(InputError, match="corpus.weights must be a positive number for each of"):
        CorpusSettings(train=train, weights=weights)


def test_parts_follow_the_names_and_hub_data_sets_stand_among_files(
    written, tmp_path, tokenizer, monkeypatch
):
    splits = {part: [{"text": "the moon"}] for part in ("train", "validation")}
    monkeypatch.setattr("train.data.documents.datasets.load_dataset", lambda *a, **k: splits)
    names = [str(written), "owner/name", str(written / "c.txt")]
    store = tokenize_corpus(corpus(names, tmp_path), "train", tokenizer)
    assert store.source_documents == (9, 1, 3)
    weighed = tokenize_corpus(corpus(names, tmp_path, weights=[1.0, 2.0, 3.0]), "train", tokenizer)
    assert weighed.source_documents == store.source_documents


BAD_FILES = {
    "t.csv": (b"text\nx\n", "corpus.train must be .*t.csv"),
    "latin.txt": (b"caf\xe9 au lait", "corpus.train must be UTF-8, got line 1 of .*latin.txt"),
    "latin.jsonl": (b'{"text": "caf\xe9"}', "corpus.train must be UTF-8, got line 1 of .*latin"),
    "blank.txt": (b"\n\n", "corpus.train must hold text, got .*blank.txt"),
    "column.jsonl": (
        b'{"text": "x"}\n{"body": "x"}\n',
        "corpus.text_column .* line 2 of .*'text'; it has body",
    ),
    "broken.parquet": (b"PAR1 nothing", "corpus.train .* got .*broken.parquet"),
    "torn.jsonl": (b'{"text": "x"}\n{"text": ', "corpus.train .* got line 2 of .*torn"),
    "numbers.jsonl": (b'{"text": 5}\n', "corpus.text_column .* line 1 of .*with 5;"),
}

BAD_NAMES = [
    ("/nowhere/x", "corpus.train must exist, got '/nowhere/x'"),
    ("{0}/empty", "corpus.train must hold .*.parquet.* files, got none in"),
    ("{0}/none-*.parquet", "corpus.train must match a file, got none for"),
    ("{0}/lists.parquet", r"corpus.text_column .*with \[1\];"),
    ([], "corpus.train must name a source, got an empty list"),
    (["no-such/dataset"], "corpus.train must be a folder, file, glob or hub data set"),
    ("no-such/dataset", "corpus.train must be a folder, file, glob or hub data set"),
    *(("{0}/" + name, message) for name, (_, message) in BAD_FILES.items()),
]


@pytest.mark.parametrize(("source", "message"), BAD_NAMES)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, tokenizer, source, message):
    (tmp_path / "empty").mkdir()
    for name, (content, _) in BAD_FILES.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"text": [[1]]}), tmp_path / "lists.parquet")
    source = source.format(tmp_path) if isinstance(source, str) else source
    with pytest.raises(InputError, match=message) as caught:
        tokenize_corpus(corpus(source, tmp_path), "train", tokenizer)
    assert "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "tokens").glob("*")}
    assert left <= {"hashes"}  # hashes of files are valid whatever their content


def test_a_hub_data_set_is_read_as_a_stream(tmp_path, monkeypatch):
    def load_dataset(name, configuration, streaming):
        assert (name, configuration, streaming) == ("owner/name", "small", True)
        return {"validation": [{"text": text} for text in TEXTS] + [{"text": None}]}

    monkeypatch.setattr("train.data.documents.datasets.load_dataset", load_dataset)
    settings = CorpusSettings(validation="owner/name:small", cache=str(tmp_path))
    assert list(read_documents(settings, "validation")) == [*TEXTS, ""]
    missing = CorpusSettings(validation="owner/name:small", text_column="body", cache=str(tmp_path))
    with pytest.raises(InputError, match="corpus.text_column must name a column of owner/name"):
        list(read_documents(missing, "validation"))


def test_a_hub_data_set_without_held_out_text_gives_its_first_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.data.documents.HELD_OUT_DOCUMENTS", 2)
    file = tmp_path / "owner" / "name" / "train.jsonl"  # `datasets` reads a folder in the same way
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in "abcde"))
    for part, texts in (("train", ["c", "d", "e"]), ("validation", ["a", "b"])):
        assert list(read_source("owner/name", part, "text")) == texts
    file.rename(file.with_name("test.jsonl"))
    with pytest.raises(InputError, match="hub data set with a train split"):
        list(read_source("owner/name", "train", "text"))


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
    settings = CorpusSettings(cache=str(tmp_path))
    assert list(read_documents(settings, "validation")) == held_out


def test_docstrings_are_read_without_running_the_file(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Top."""\nraise SystemExit\nclass A:\n  """In A."""\n  def f(x):\n    """In f."""\n'
    )
    assert list(demo_corpus.docstrings(file)) == ["Top.", "In A.", "In f."]
    file.write_text('def broken(:\n  """x"""')
    assert list(demo_corpus.docstrings(file)) == []


def test_linked_files_and_folders_are_read_once(written, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.txt").write_text("from elsewhere\n")
    (written / "linked").symlink_to(tmp_path / "more")
    (written / "itself").symlink_to(written)
    (written / "again.txt").symlink_to(written / "c.txt")
    plain = ["a.parquet", "b.jsonl", "c.txt"]
    found = texts(written, tmp_path)
    named = corpus([str(written / name) for name in plain], tmp_path)
    assert sorted(found) == sorted([*read_documents(named, "train"), "from elsewhere\n"])
    (written / "lost.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"readable file, got .*lost\.txt"):
        tokenize_corpus(corpus(str(written), tmp_path), "train", vocabulary.byte_tokenizer())


def test_a_glob_may_match_the_folders_that_spark_writes(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.parquet").mkdir()
        pq.write_table(
            pa.table({"text": [text]}), tmp_path / f"{number}.parquet" / "part-0.parquet"
        )
        (tmp_path / f"{number}.parquet" / "_SUCCESS").touch()
    assert texts(tmp_path / "*.parquet", tmp_path) == TEXTS


def test_a_file_that_grows_while_it_is_read_leaves_nothing(tmp_path, monkeypatch):
    file = tmp_path / "growing.txt"
    file.write_text("one\n")

    def reading(*arguments):
        yield from read_source(*arguments)
        file.write_text("one\n\ntwo\n")

    monkeypatch.setattr(train.data.corpus, "read_source", reading)
    with pytest.raises(InputError, match=r"must not change while it is read, got .*growing\.txt"):
        tokenize_corpus(corpus(str(file), tmp_path), "train", vocabulary.byte_tokenizer())
    assert not list((tmp_path / "tokens").glob("*/tokens.bin"))


@pytest.mark.parametrize("line", ['{"text": "\\ud800"}', '{"text": ' + "[" * 100_000])
def test_json_that_is_no_text_is_named_by_its_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n' + line + "\n")
    read = read_documents(corpus(str(tmp_path / "a.jsonl"), tmp_path), "train")
    assert next(read) == "\N{GRINNING FACE}"
    with pytest.raises(InputError, match=r"got line 2 of .*a\.jsonl"):
        next(read)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "{0}"}, "must be 'embedded' for both parts or neither"),
        ({"train": "{0}", "validation": "{0}/c.txt"}, r"no file of corpus\.train, got .*c\.txt"),
        ({"train": ["{0}/a.parquet"], "validation": ["{0}/../text/a.parquet"]}, r"a\.parquet"),
    ],
)
def test_a_model_is_not_measured_on_what_it_learns_from(written, tmp_path, settings, message):
    def filled(value):
        return [filled(x) for x in value] if isinstance(value, list) else value.format(written)

    given = {key: filled(value) for key, value in settings.items()}
    with pytest.raises(InputError, match=message):
        check_disjoint_files(CorpusSettings(**given, cache=str(tmp_path)))


def test_a_copy_under_another_name_is_no_held_out_text(written, tmp_path, tokenizer_folder):
    shutil.copy(written / "c.txt", tmp_path / "held-out.txt")
    settings = corpus([str(written / "a.parquet"), str(written / "c.txt")], tmp_path)
    settings = dataclasses.replace(
        settings, validation=str(tmp_path / "held-out.txt"), tokenizer=str(tokenizer_folder)
    )
    with pytest.raises(InputError, match="no file of corpus.train, got copies, of 3 documents"):
        main(TokenizeSettings(settings))


def test_text_that_the_tokenizer_does_not_know_is_said_and_at_last_refused(tmp_path, tokenizer):
    (tmp_path / "half.txt").write_text("the moon \u0e01 \u0e02\n")
    store = tokenize_corpus(corpus(str(tmp_path / "half.txt"), tmp_path), "train", tokenizer)
    found = describe_store("train", store)
    assert found.startswith("train: 1 documents, 4 tokens; warning: 50.0% of them are unknown")
    (tmp_path / "known.txt").write_text("the moon\n")
    store = tokenize_corpus(corpus(str(tmp_path / "known.txt"), tmp_path), "train", tokenizer)
    assert describe_store("train", store) == "train: 1 documents, 2 tokens"
    (tmp_path / "none.txt").write_text("\u0e01 \u0e02\n")
    with pytest.raises(InputError, match="corpus.tokenizer must know the text of corpus.train"):
        tokenize_corpus(corpus(str(tmp_path / "none.txt"), tmp_path), "train", tokenizer)


def test_a_vocabulary_is_read_line_by_line_as_transformers_does(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\N{LINE SEPARATOR}", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    assert vocabulary.load_tokenizer(str(tmp_path / "vocab.txt")).convert_tokens_to_ids(
        ["a", "b"]
    ) == [6, 7]
