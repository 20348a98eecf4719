"""Training by transformers' `Trainer` with default options: pretraining and classification."""

import tempfile
from typing import Any

import numpy as np
import transformers
from transformers import (
    BertTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import roformer
from train.bench.baselines import (
    MASK_RATE,
    STOCK,
    VOCAB_SIZE,
    BenchBatch,
    Step,
    Workload,
    make_baseline,
)

STEPS = 3
"""Steps of one call of `Trainer.train`."""

MRPC_LENGTHS = (53, 15, 20, 100)
"""Mean, standard deviation, minimum and maximum of the lengths of pairs in MRPC, in tokens."""


def make_pretraining_step(name: str, workload: Workload, batch: BenchBatch) -> Step:
    """Return a function that trains a model for `STEPS` steps on masked tokens."""
    tokenizer = make_tokenizer()
    rows = [{"input_ids": x} for x in batch.input_ids.tolist()] * STEPS
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_RATE)
    return make_trainer(make_baseline(name, workload), rows, collator, tokenizer, workload).train


def make_classification_step(name: str, workload: Workload, batch: BenchBatch) -> Step:
    """Return a function that fine-tunes a model for `STEPS` steps on rows as long as MRPC's."""
    config = make_baseline(name, workload).config
    classes = transformers if name == STOCK else roformer
    rng = np.random.default_rng(0)
    mean, deviation, low, high = MRPC_LENGTHS
    lengths = rng.normal(mean, deviation, workload.batch * STEPS).clip(low, high).astype(int)
    rows = [
        {"input_ids": rng.integers(5, VOCAB_SIZE, length).tolist(), "label": int(length) % 2}
        for length in lengths
    ]
    model = classes.RoFormerForSequenceClassification(config)
    return make_trainer(model, rows, None, make_tokenizer(), workload).train


def make_trainer(
    model: PreTrainedModel,
    rows: list[dict[str, Any]],
    collator: Any,
    tokenizer: BertTokenizer,
    workload: Workload,
) -> Trainer:
    """Build a Trainer that saves and logs nothing; no collator means Trainer's own."""
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=STEPS,
        per_device_train_batch_size=workload.batch,
        bf16=workload.bf16,
        use_cpu=workload.device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, data_collator=collator, train_dataset=rows, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_tokenizer() -> BertTokenizer:
    """Build a tokenizer of `VOCAB_SIZE` entries, for the ids of padding and masks."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = special + [f"w{n}" for n in range(VOCAB_SIZE - len(special))]
    return BertTokenizer(vocab={name: n for n, name in enumerate(names)})
