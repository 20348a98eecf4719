"""The commands on real text and real GLUE, from the folder named by ROFORMER_DATA."""

import json
import shutil

import numpy as np
import pytest

from tiny import command, log_rows
from train.data import vocabulary
from train.data.batching import SequenceIndex, StepDataset
from train.data.corpus import tokenize_corpus
from train.data.documents import read_documents
from train.data.masking import Vocab
from train.loop.run_log import sequence_lengths
from train.settings import CorpusSettings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("batch", "micro"), [(64, 8), (256, 64)])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_wikipedia_batches_are_at_least_98_percent_text(real_data, tmp_path, packed, batch, micro):
    tokenizer = vocabulary.load_tokenizer(str(real_data / "vocab" / "bert-base-uncased.txt"))
    corpus = CorpusSettings(
        train=str(real_data / "corpus" / "wikipedia" / "validation.parquet"), cache=str(tmp_path)
    )
    sequences = SequenceIndex(tokenize_corpus(corpus, "train", tokenizer), 512)
    steps = StepDataset(
        sequences, Vocab.from_tokenizer(tokenizer), batch, micro, 0.15, 0, packed=packed
    )
    number = len(sequences) // batch
    batches = [rows for step in range(number) for rows in steps[step]]
    real = sum(int(sequence_lengths(rows).sum()) for rows in batches)
    assert real > 0.9 * batch * number * sequences.mean_length
    assert real / sum(rows["input_ids"].numel() for rows in batches) > 0.98


def test_20_megabytes_are_tokenized_twice_to_the_same_bytes(real_data, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.corpus.BATCHES_PER_SHARD", 4)
    tokenizer = vocabulary.load_tokenizer(str(real_data / "vocab" / "bert-base-uncased.txt"))
    source = CorpusSettings(
        train=str(real_data / "corpus" / "wikipedia" / "train-00000-of-00004.parquet")
    )
    texts = read_documents(source, "train")
    with (tmp_path / "slice.jsonl").open("w") as stream:
        while stream.tell() < 20_000_000:
            stream.write(json.dumps({"text": next(texts)}) + "\n")
    stores = [
        tokenize_corpus(
            CorpusSettings(train=str(tmp_path / "slice.jsonl"), cache=str(tmp_path / name)),
            "train",
            tokenizer,
        )
        for name in ("first", "second")
    ]
    assert len(stores[0].shards) >= 4
    for one, other in zip(*(sorted(s.folder.parent.rglob("*.*")) for s in stores)):
        assert one.read_bytes() == other.read_bytes(), one
    names = [
        [p.relative_to(s.folder.parent) for p in s.folder.parent.rglob("*.bin")] for s in stores
    ]
    assert sorted(names[0]) == sorted(names[1])


def test_wikipedia_to_rte_by_the_readmes_commands(real_data, tmp_path):
    launch = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
    launch += ("configs/accelerate/cpu.yaml",)
    (tmp_path / "text").mkdir()
    shutil.copy(real_data / "corpus" / "wikipedia" / "validation.parquet", tmp_path / "text")
    done = command(
        *launch, "train/pretrain.py", "--config", "configs/pretrain/small.yaml",
        "--config", "configs/model/roformer-tiny.yaml", "--corpus.train", tmp_path / "text",
        "--corpus.validation", "2%", "--run.name", "tiny", "--run.folder", tmp_path,
        "--corpus.cache", tmp_path / "tokens", "--optim.tokens", "null", "--optim.steps", "60",
        "--optim.warmup_steps", "10", "--run.log_every", "20",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = log_rows(tmp_path / "tiny")
    assert losses[60] < losses[20] - 0.5
    done = command(
        *launch, "finetune/glue.py", "--model", tmp_path / "tiny" / "model", "--task", "rte",
        "--epochs", "1", "--glue_dir", real_data / "glue", "--output", tmp_path / "results.jsonl",
        "--cache", tmp_path / "tokens",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["official"]
    assert np.isfinite(line["headline"])
    done = command("-m", "finetune.report", tmp_path / "results.jsonl")
    assert "RTE" in done.stdout
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "report-official-scores.png").exists()
