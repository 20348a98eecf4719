"""A decoder in the same loop: every next token is predicted, and what is saved generates."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from launched_runs import model_flag
from tiny import VARIANTS, log_rows
from train.command_line import parse_settings
from train.data import vocabulary
from train.data.batching import SequenceIndex
from train.data.corpus import tokenize_corpus
from train.loop.evaluate import EvaluateSettings
from train.loop.evaluate import main as validate
from train.settings import CorpusSettings, InputError, PretrainSettings

BYTES = ["--corpus.tokenizer=bytes", "--corpus.length=64"]


def loss_of_the_text(model, corpus: CorpusSettings, tokenizer) -> tuple[float, int]:
    """Mean loss of the held-out text in float64, one sequence at a time, and number of tokens."""
    sequences = SequenceIndex(tokenize_corpus(corpus, "validation", tokenizer), 64)
    total, number = 0.0, 0
    for start, size in zip(*sequences.locate(np.arange(len(sequences)))):
        text = torch.from_numpy(sequences.store.read(int(start), int(size)).astype(np.int64))
        ids = torch.cat((torch.tensor([tokenizer.cls_token_id]), text))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += F.cross_entropy(logits.double(), text, reduction="sum").item()
        number += len(text)
    return total / number, number


def test_bytes_need_no_vocabulary_and_lose_nothing():
    tokenizer = vocabulary.load_tokenizer("bytes")
    for text in ("The cat, Ünïcode ☃ and\ttabs.\n", "日本", "  two  spaces "):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.cls_token_id
        assert len(ids) - 1 == len(text.encode())
        assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer) == 256 + 5
    pair = tokenizer("a", "b")
    assert tokenizer.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "a", "[SEP]", "b"]
    with pytest.raises(InputError, match="corpus.vocabulary_size must be null for bytes, got 300"):
        vocabulary.train_if_missing(CorpusSettings(tokenizer="bytes", vocabulary_size=300))


@pytest.mark.parametrize(("kernel", "fields"), [("unpadded", {}), ("eager", VARIANTS["favor"])])
def test_a_decoder_trains_resumes_validates_and_generates(kernel, fields, pretrain, pretrain_flags):
    flags = [*BYTES, "--optim.learning_rate=5e-3", "--optim.steps=6", "--model.type=roformer",
             f"--model.attention={kernel}", model_flag(is_decoder=True, **fields)]  # fmt: skip
    whole = pretrain(*flags, "--run.name=whole")
    for _ in range(5):
        run = pretrain(*flags, "--run.max_hours=1e-9")  # a step a launch
    assert max(log_rows(run)) == 5
    pretrain(*flags)
    losses = [log_rows(folder) for folder in (whole, run)]
    assert losses[0] == losses[1]
    assert losses[0][6] < losses[0][1] < 1.2 * math.log(261)
    model = str(run / "model")
    settings = parse_settings(PretrainSettings, [*pretrain_flags, *flags])
    decoder = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected, number = loss_of_the_text(decoder, settings.corpus, tokenizer)
    found = validate(EvaluateSettings(model, settings.corpus, 64, attention="sdpa"))
    logged = log_rows(run, "validation_loss")[6]
    assert [found["validation_loss"], logged] == pytest.approx([expected] * 2, rel=1e-4)
    assert log_rows(run, "validation_tokens")[6] == number
    prompt = tokenizer("the cat ", return_tensors="pt")
    prompt.pop("token_type_ids", None)
    generated = decoder.generate(**prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 1 + 8 + 10)
    assert tokenizer.decode(generated[0], skip_special_tokens=True).startswith("the cat ")
