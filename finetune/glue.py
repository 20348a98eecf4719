"""Fine-tune one model on one task with one seed: `accelerate launch finetune/glue.py`.

Read `main`, then `fine_tune`: that is the whole run. The score is the last epoch's on the
validation split: nothing is selected by the split that is reported. Each run appends one line.
"""

import dataclasses
import math
import time
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import roformer
from finetune.examples import Examples, epoch_batches, load_examples, require_fit
from finetune.metrics import GlueMetric
from finetune.results import KEY, append_result
from finetune.settings import GlueSettings
from finetune.tasks import TASKS, Task
from train import counter
from train.launch import run_command, start_accelerator
from train.optim import adamw, rate_factor, set_rate
from train.settings import InputError, require

Scores = dict[str, dict[str, float]]  # split -> metric -> value


def main(settings: GlueSettings, accelerator: Accelerator | None = None) -> dict[str, Any]:
    """Fine-tune, score, append the line.

    Args:
        settings: The run.
        accelerator: One that exists, when a process makes several runs; None starts one.

    Returns:
        The line.

    Raises:
        InputError: Settings, model and data do not fit together, or the loss became infinite.
    """
    started, task = time.perf_counter(), TASKS[settings.task]
    prepare_transformers()
    accelerator = accelerator or start_accelerator()
    config, tokenizer = load_description(settings, task)
    data = {
        split: load_examples(task, split, settings.glue_dir, tokenizer, settings.length)
        for split in ("train", *task.validations)
    }
    model = load_model(settings, config)
    scores, history = fine_tune(settings, model, data, accelerator)
    result = {
        **describe(settings, config, data),
        "metrics": scores,
        "headline": headline(task, scores),
        "loss": history[-1]["loss"],
        "history": history,
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - started, 2),
        "precision": accelerator.mixed_precision,
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
    }
    if accelerator.is_main_process:
        save(settings, model, tokenizer)
        append_result(settings.output, result)
    return result


def fine_tune(
    settings: GlueSettings,
    model: PreTrainedModel,
    data: dict[str, Examples],
    accelerator: Accelerator,
) -> tuple[Scores, list[dict[str, float]]]:
    """The loop: train in place, score after each epoch.

    Returns:
        The last epoch's scores, and each epoch's mean training loss and headline.
    """
    task, train = TASKS[settings.task], data["train"]
    rank, processes = accelerator.process_index, accelerator.num_processes
    steps = settings.epochs * math.ceil(len(train) / settings.batch_size)
    factor = rate_factor(settings.schedule, round(settings.warmup_share * steps), steps)
    optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    step, history = 0, []
    bar = progress(settings, steps, accelerator)
    for epoch in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for rows in epoch_batches(train.lengths, settings.batch_size, settings.seed, epoch):
            torch.manual_seed(int(counter.bits(settings.seed, step, rank)) >> 1)
            set_rate(optimizer, settings.learning_rate * factor(step))
            mine = rows[rank::processes]
            batch = train.batch(mine if len(mine) else rows[:1], accelerator.device)
            labels = batch.pop("labels")[: len(mine)]
            loss = summed_loss(model(**batch).logits[: len(mine)], labels)
            # gradients are averaged over processes: this makes it the mean over the global batch
            accelerator.backward(loss * processes / len(rows))
            norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip_norm)
            require_finite(norm, settings.learning_rate)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            bar.set_postfix(loss=f"{loss.item() / max(1, len(mine)):.3f}", refresh=False)
            bar.update()
            step += 1
        scores = {
            split: score(task, predict(model, data[split], settings, accelerator), data[split])
            for split in task.validations
        }
        mean_loss = accelerator.reduce(total).item() / len(train)
        history.append({"loss": mean_loss, "headline": headline(task, scores)})
    bar.close()
    return scores, history


def prepare_transformers() -> None:
    """Our RoFormer behind the Auto classes; no bars and load reports beside the loop's own bar."""
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load_description(settings: GlueSettings, task: Task) -> tuple[Any, Any]:
    """Configuration, with the task's head, and tokenizer, checked to fit each other and the length.

    Raises:
        InputError: One of them cannot be read, or they do not fit.
    """
    names = task.labels or ("value",)
    try:
        config = AutoConfig.from_pretrained(
            settings.model,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            problem_type="single_label_classification" if task.labels else "regression",
        )
    except (OSError, ValueError) as error:
        raise unreadable("model", settings.model, "a config.json", error) from error
    name = settings.tokenizer or settings.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise unreadable("tokenizer", name, "a tokenizer", error) from error
    require_fit(config, tokenizer, settings.length)
    return config, tokenizer


def load_model(settings: GlueSettings, config: Any) -> PreTrainedModel:
    """The model in float32 with a head drawn from the seed; with all weights so for the control.

    Raises:
        InputError: The folder has no weights, they are not this architecture's, or it has no such
            head or attention kernel.
    """
    torch.manual_seed(settings.seed)
    options = {"attn_implementation": settings.attention, "dtype": torch.float32}
    try:
        if settings.random_weights:
            return AutoModelForSequenceClassification.from_config(config, **options)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            settings.model,
            config=config,
            ignore_mismatched_sizes=True,  # the head of another task is replaced
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        found = "weights with a sequence-classification head"
        raise unreadable("model", settings.model, found, error) from error
    fresh = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    share = sum(sizes.get(name, 0) for name in fresh) / sum(sizes.values())
    rule = "must hold the weights of its config.json"
    found = f"{settings.model} without {share:.0%} of them"
    require(share < 0.5, "model", rule, found, "use --random_weights true for a control")
    return model


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the rows of squared error, for one output, or cross-entropy; logits [B, outputs]."""
    if labels.is_floating_point():
        return F.mse_loss(logits.float().squeeze(-1), labels, reduction="sum")
    return F.cross_entropy(logits.float(), labels, reduction="sum")


@torch.no_grad()
def predict(
    model: PreTrainedModel, examples: Examples, settings: GlueSettings, accelerator: Accelerator
) -> NDArray[np.float32]:
    """Logits of all rows, [N, outputs], the same in every process.

    Each process fills its own rows of a table of zeros and the tables are summed, so that every row
    counts once, however many rows and processes there are.

    Raises:
        InputError: A logit is not finite.
    """
    model.eval()
    table = torch.zeros(len(examples), TASKS[settings.task].outputs, device=accelerator.device)
    order = np.argsort(examples.lengths, kind="stable")
    for start in range(0, len(order), settings.batch_size):
        rows = order[start : start + settings.batch_size]
        mine = rows[accelerator.process_index :: accelerator.num_processes]
        batch = examples.batch(mine if len(mine) else rows[:1], accelerator.device)
        batch.pop("labels")
        places = torch.from_numpy(mine).to(table.device)
        table[places] = model(**batch).logits.float()[: len(mine)]
    logits = accelerator.reduce(table).cpu().numpy()
    require_finite(logits, settings.learning_rate)
    return logits


def score(task: Task, logits: NDArray, examples: Examples) -> dict[str, float]:
    """The task's metrics on one split; logits [N, outputs]."""
    predictions = logits[:, 0] if task.labels is None else logits.argmax(axis=1)
    return GlueMetric(task.name).compute(predictions=predictions, references=examples.labels)


def majority(task: Task, train: Examples, examples: Examples) -> dict[str, float]:
    """The metrics of always saying the training split's commonest class, or its mean value."""
    labels = train.labels
    constant = labels.mean() if task.labels is None else np.bincount(labels).argmax()
    predictions = np.full(len(examples), constant)
    return GlueMetric(task.name).compute(predictions=predictions, references=examples.labels)


def headline(task: Task, scores: Scores) -> float:
    """The task's one number: the headline metric, averaged over MNLI's two validation splits."""
    return float(np.mean([metrics[task.headline] for metrics in scores.values()]))


def describe(settings: GlueSettings, config: Any, data: dict[str, Examples]) -> dict[str, Any]:
    """What a line says of a run beside its outcome: the key, data, baseline, versions, settings."""
    task, values = TASKS[settings.task], dataclasses.asdict(settings)
    rows = {split: len(examples) for split, examples in data.items()}
    guess = {split: majority(task, data["train"], data[split]) for split in task.validations}
    return {
        **{name: values[name] for name in KEY},
        "model_type": config.model_type,
        "label": task.label(rows),
        "official": task.is_official(rows),
        "rows": rows,
        "headline_metric": task.headline,
        "majority_metrics": guess,
        "majority": headline(task, guess),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": values,
    }


def save(settings: GlueSettings, model: PreTrainedModel, tokenizer: Any) -> None:
    """Write the fine-tuned model and its tokenizer where the settings ask for it."""
    if settings.save is not None:
        model.save_pretrained(settings.save)
        tokenizer.save_pretrained(settings.save)


def progress(settings: GlueSettings, steps: int, accelerator: Accelerator) -> tqdm:
    """The run's bar, shown by one process and only on a terminal."""
    control = ", random weights" if settings.random_weights else ""
    title = f"{settings.task} seed {settings.seed} {settings.model}{control}"
    return tqdm(total=steps, desc=title, disable=None if accelerator.is_main_process else True)


def require_finite(values: Tensor | NDArray, learning_rate: float) -> None:
    """Stop a run whose numbers are no longer numbers, before the optimiser spreads them.

    Raises:
        InputError: A value is infinite or not a number.
    """
    finite = bool(torch.isfinite(torch.as_tensor(values)).all())
    found = f"{learning_rate} and a run that diverged"
    require(finite, "learning_rate", "must keep gradients and logits finite", found, "lower it")


def unreadable(key: str, name: str, needed: str, error: Exception) -> InputError:
    """The one-line error for a folder or hub id that transformers could not use."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return InputError(
        f"{key} must be a folder or hub id with {needed}, got {name!r} ({reason}); check the path"
    )


def summary(result: dict[str, Any]) -> str:
    """A results line in words."""
    control = ", random weights," if result["random_weights"] else ""
    return (
        f"{result['label']} {result['model']}{control} rate {result['learning_rate']:g} "
        f"seed {result['seed']}: {result['headline_metric']} {100 * result['headline']:.1f} "
        f"(majority {100 * result['majority']:.1f}), {result['seconds']:.0f} s"
    )


def command(settings: GlueSettings) -> None:
    """One run and its outcome in one line."""
    accelerator = start_accelerator()
    accelerator.print(summary(main(settings, accelerator)))
    accelerator.end_training()


if __name__ == "__main__":
    run_command(command, GlueSettings)
