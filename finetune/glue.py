"""Fine-tune one model on one task with one seed: `accelerate launch finetune/glue.py`.

Read `main`, then `fine_tune`: that is the whole run. The score is the last epoch's on the
validation split: nothing is selected by the split that is reported. Each run appends one line.
"""

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray
from safetensors import SafetensorError
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
from finetune.data import (
    Examples,
    data_of,
    epoch_batches,
    find_file,
    load_examples,
    require_fit,
)
from finetune.metrics import GlueMetric
from finetune.publish.model_card import check_save_folder, save_model
from finetune.results import (
    RUN_KEY,
    RunLocks,
    append_result,
    delete_stale_predictions,
    hash_weights,
    prediction_file,
    write_predictions,
)
from finetune.settings import GlueSettings
from finetune.tasks import TASKS, Task
from train.data import stateless_rng
from train.loop.launch import run_command, start_accelerator
from train.loop.optim import MIN_LOSS_SCALE, adamw, schedule_factor, set_learning_rate
from train.loop.run_log import git_commit
from train.settings import InputError, require

Data = dict[str, Examples]  # split -> rows; AX is the split "ax" of mnli
Logits = dict[str, NDArray[np.float32]]  # split -> [N, outputs]
Scores = dict[str, dict[str, float]]  # split -> metric -> value
Watch = Callable[[int, int, float], None]  # steps made, steps in all, loss
LOOK_EVERY = 20
"""Steps between two looks at the loss: each makes the host wait for the device."""


class DivergedError(ArithmeticError):
    """The loss, a gradient or a logit is no longer a number."""


def main(
    settings: GlueSettings,
    accelerator: Accelerator | None = None,
    locks: RunLocks | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Fine-tune, score, keep the predictions, append the line.

    Args:
        settings: The run.
        accelerator: One that exists, when a process makes several runs; None starts one.
        locks: The results file, when a process makes several runs.
        watch: Told how far the run is; None shows a bar.

    Returns:
        The line; of a run that diverged it has no scores.

    Raises:
        InputError: Settings, model and data do not fit together.
    """
    started, task = time.perf_counter(), TASKS[settings.task]
    accelerator = accelerator or start_accelerator()
    if settings.save is not None:
        check_save_folder(settings.save)
        sharded, remedy = accelerator.distributed_type.value, "take a configuration without it"
        require(sharded != "FSDP", "save", "must be null with sharded weights", sharded, remedy)
    config, tokenizer = load_config_and_tokenizer(settings, task)
    data = load_data(settings, task, tokenizer)
    model = load_model(settings, config)
    require_run(model, longest(data), task)
    result = describe(settings, config, data, accelerator)
    try:
        losses, logits = fine_tune(settings, model, data, accelerator, watch)
    except DivergedError as error:
        result |= {"status": "diverged", "error": str(error), "metrics": None, "headline": None}
        logits = {}
    else:
        scores = {
            split: score(task, logits[split], data[split]) for split in task.validation_splits
        }
        result |= {
            "status": "done",
            "collapsed": all(is_collapsed(task, logits[split]) for split in task.validation_splits),
            "metrics": scores,
            "headline": headline(task, scores),
            "loss": losses[-1],
            "losses": losses,
        }
    result |= {
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if accelerator.is_main_process:
        delete_stale_predictions(settings.output, result, kept=logits)
        for split, values in logits.items():
            file = prediction_file(settings.output, result, split)
            write_predictions(file, data[split].labels, values)
        append_result(locks or RunLocks(settings.output), result)
        if settings.save is not None and logits:
            save_model(settings.save, model, tokenizer, result)
    return result


def fine_tune(
    settings: GlueSettings,
    model: PreTrainedModel,
    data: Data,
    accelerator: Accelerator,
    watch: Watch | None = None,
) -> tuple[list[float], Logits]:
    """The loop: train in place, then predict; nothing is selected by what is predicted.

    Returns:
        Each epoch's mean training loss, and the logits of every split but train.

    Raises:
        DivergedError: A number is not finite.
    """
    train = data["train"]
    rank, processes = accelerator.process_index, accelerator.num_processes
    steps = settings.epochs * math.ceil(len(train) / settings.batch_size)
    factor = schedule_factor(settings.schedule, round(settings.warmup_share * steps), steps)
    optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    scaler = optimizer.scaler  # of fp16: it leaves steps out to find its scale
    step, losses = 0, []
    watch = watch or progress(settings, steps, accelerator)
    for epoch in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for rows in epoch_batches(train.lengths, settings.batch_size, settings.seed, epoch):
            torch.manual_seed(int(stateless_rng.bits(settings.seed, step, rank)) >> 1)
            set_learning_rate(optimizer, settings.learning_rate * factor(step))
            mine = rows[rank::processes]
            batch = train.batch(mine if len(mine) else rows[:1], accelerator.device)
            labels = batch.pop("labels")[: len(mine)]
            loss = summed_loss(model(**batch).logits[: len(mine)], labels)
            # gradients are averaged over processes: this makes it the mean over the global batch
            accelerator.backward(loss * processes / len(rows))
            norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            # a batch that a loss scaler leaves out does not count
            total += loss.detach() if scaler is None else loss.detach().nan_to_num(0, 0, 0)
            step += 1
            if step % LOOK_EVERY == 0 or step == steps:
                if scaler is None:
                    require_finite(norm, "gradient", step)  # the same in every process
                elif scaler.get_scale() <= MIN_LOSS_SCALE:
                    raise DivergedError(f"gradient not finite at any scale ({step})")
                watch(step, steps, loss.item() / max(1, len(mine)))
        losses.append(accelerator.reduce(total).item() / len(train))
    logits = {
        split: predict(model, data[split], settings, accelerator)
        for split in data
        if split != "train"
    }
    return losses, logits


def prepare_transformers() -> None:
    """Our RoFormer behind the Auto classes; no bars and load reports beside the loop's own bar."""
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load_data(settings: GlueSettings, task: Task, tokenizer: Any) -> Data:
    """Every split the run needs: train, the validation splits, and the test ones if asked for.

    Raises:
        InputError: The data are missing or not what the task says.
    """
    tests = unlabelled(settings) if settings.test else {}
    places = {s: (task, s) for s in ("train", *task.validation_splits)} | tests
    return {
        name: load_examples(*place, settings.glue_dir, tokenizer, settings.length, settings.cache)
        for name, place in places.items()
    }


def unlabelled(settings: GlueSettings) -> dict[str, tuple[Task, str]]:
    """The test splits of a task and, with MNLI, AX, as far as the folder has them: reduced data may
    have none. Each by its name among the predictions.
    """  # noqa: D205 one sentence
    task, folder = TASKS[settings.task], settings.glue_dir
    places = {split: (task, split) for split in task.splits if split.startswith("test")}
    if task.name == "mnli":
        places["ax"] = TASKS["ax"], "test"
    return {k: v for k, v in places.items() if folder is None or find_file(*v, folder) is not None}


def load_config_and_tokenizer(settings: GlueSettings, task: Task) -> tuple[Any, Any]:
    """Configuration, with the task's head, and tokenizer, checked to fit each other and the length.

    Raises:
        InputError: One of them cannot be read, or they do not fit.
    """
    prepare_transformers()
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
    except Exception as error:  # of many kinds, and the Rust library's is bare
        raise unreadable("tokenizer", name, "a tokenizer", error) from error
    require_fit(config, tokenizer, settings.length)
    inputs = tokenizer.model_input_names
    if getattr(config, "type_vocab_size", 0) > 1 and "token_type_ids" not in inputs:
        # transformers' Chinese RoFormerTokenizer leaves out what tells its models two texts apart
        tokenizer.model_input_names = [*inputs, "token_type_ids"]
    return config, tokenizer


def load_model(settings: GlueSettings, config: Any) -> PreTrainedModel:
    """The model in float32 with a head drawn from the seed; with all weights so for the control.

    After MNLI the layers of the head that fit are kept: what BERT calls its pooler is one of them.

    Raises:
        InputError: The folder has no weights, they are not this architecture's, or it has no such
            head or attention kernel.
    """
    torch.manual_seed(settings.seed)
    options = {"attn_implementation": settings.attention, "dtype": torch.float32}
    folder = settings.mnli or settings.model
    try:
        if settings.random_weights:
            return AutoModelForSequenceClassification.from_config(config, **options)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            ignore_mismatched_sizes=True,  # the head of another task is replaced
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        key = "model" if settings.mnli is None else "mnli"
        needed = "weights with a sequence-classification head"
        raise unreadable(key, folder, needed, error) from error
    fresh = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    share = sum(sizes.get(name, 0) for name in fresh) / sum(sizes.values())
    rule = "must hold the weights of its config.json"
    found = f"{folder} without {share:.0%} of them"
    require(share < 0.5, "model", rule, found, "use --random_weights true for a control")
    return model


def longest(data: Data) -> Examples:
    """The split with the longest row: whatever takes that takes all."""
    return max(data.values(), key=lambda examples: int(examples.lengths.max()))


@torch.no_grad()
def require_run(model: PreTrainedModel, examples: Examples, task: Task) -> None:
    """Send the longest and the shortest example through the model, before any work is done.

    Raises:
        InputError: The model cannot take what its tokenizer makes, or its head is not the task's.
    """
    order = np.argsort(examples.lengths, kind="stable")
    batch = examples.batch(order[[-1, 0]])
    batch.pop("labels")
    rule = f"must take the tokenizer's {', '.join(batch)} and give {task.num_labels} logits a row"
    remedy = "check that model and tokenizer belong together, or shorten length"
    try:
        found = str(tuple(model.eval()(**batch).logits.shape))
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        found = next(iter(str(error).splitlines()), type(error).__name__)
    require(found == str((2, task.num_labels)), "model", rule, found, remedy)


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
        DivergedError: A logit is not finite.
    """
    model.eval()
    table = torch.zeros(len(examples), TASKS[settings.task].num_labels, device=accelerator.device)
    order = np.argsort(examples.lengths, kind="stable")
    for start in range(0, len(order), settings.batch_size):
        rows = order[start : start + settings.batch_size]
        mine = rows[accelerator.process_index :: accelerator.num_processes]
        batch = examples.batch(mine if len(mine) else rows[:1], accelerator.device)
        batch.pop("labels")
        places = torch.from_numpy(mine).to(table.device)
        table[places] = model(**batch).logits.float()[: len(mine)]
    logits = accelerator.reduce(table).cpu().numpy()
    require_finite(logits, "logits", len(logits))
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


def is_collapsed(task: Task, logits: NDArray) -> bool:
    """Whether every row gets the same answer: the class most often, or one value."""
    if task.labels is None:
        return float(np.ptp(logits)) < 1e-2  # of values from 0 to 5
    return len(np.unique(logits.argmax(axis=1))) == 1


def describe(
    settings: GlueSettings, config: Any, data: Data, accelerator: Accelerator
) -> dict[str, Any]:
    """What a line says of a run beside its outcome: the key, data, baseline, machine, settings."""
    task, values = TASKS[settings.task], dataclasses.asdict(settings)
    precision, device = accelerator.mixed_precision, accelerator.device.type
    processes = accelerator.num_processes
    rows = {split: len(data[split]) for split in ("train", *task.validation_splits)}
    guess = {split: majority(task, data["train"], data[split]) for split in task.validation_splits}
    return {
        **{name: values[name] for name in RUN_KEY},
        **inputs_of(settings),
        "model_type": config.model_type,
        "label": task.result_label(rows),
        "official": task.is_official(rows),
        "rows": rows,
        "headline_metric": task.headline,
        "majority_metrics": guess,
        "majority": headline(task, guess),
        "precision": precision,
        "device": device,
        "processes": processes,
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": git_commit(),
        },
        "settings": values,
        "command": command_of(settings, precision, device == "cpu", processes),
    }


def inputs_of(settings: GlueSettings) -> dict[str, str | None]:
    """Hashes of what a run reads, as `INPUT_HASHES` names them; None where nothing is local."""
    weights = hash_weights(settings.mnli or settings.model, settings.random_weights)
    return {"weights": weights, "data": data_of(TASKS[settings.task], settings.glue_dir)}


def command_of(settings: GlueSettings, precision: str, cpu: bool, processes: int = 1) -> str:
    """The command that makes a run again; where it writes is left out.

    Sums over rows depend on how many threads share them, so on a CPU their number is in it.
    """
    threads = [f"OMP_NUM_THREADS={torch.get_num_threads()}"] * cpu
    # without a number accelerate takes every GPU there is
    launch = [*threads, "accelerate", "launch", "--num_processes", "1"]
    launch += ["--mixed_precision", precision, *["--cpu"] * cpu]
    if processes > 1:
        launch = [f"ACCELERATE_MIXED_PRECISION={precision}", f"ACCELERATE_USE_CPU={cpu}"]
        launch += [*threads, "torchrun", "--nproc_per_node", str(processes)]
    flags: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default and field.name not in ("output", "cache", "save"):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            flags += [f"--{field.name}", text]
    return shlex.join([*launch, "finetune/glue.py", *flags])


def progress(settings: GlueSettings, steps: int, accelerator: Accelerator) -> Watch:
    """The run's bar, shown by one process and only on a terminal."""
    control = ", random weights" if settings.random_weights else ""
    title = f"{settings.task} seed {settings.seed} {settings.model}{control}"
    bar = tqdm(total=steps, desc=title, disable=None if accelerator.is_main_process else True)

    def watch(step: int, steps: int, loss: float) -> None:
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        bar.update(step - bar.n)
        if step == steps:
            bar.close()

    return watch


def require_finite(values: Tensor | NDArray, name: str, count: int) -> None:
    """Stop a run whose numbers are no longer numbers.

    Raises:
        DivergedError: A value is infinite or not a number.
    """
    if not bool(torch.isfinite(torch.as_tensor(values)).all()):
        raise DivergedError(f"{name} not finite ({count})")


def unreadable(key: str, name: str, needed: str, error: Exception) -> InputError:
    """The one-line error for a folder or hub id that transformers could not use."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return InputError(
        f"{key} must be a folder or hub id with {needed}, got {name!r} ({reason}); check the path"
    )


def summary(result: dict[str, Any]) -> str:
    """A results line in words."""
    control = ", random weights," if result["random_weights"] else ""
    control += " from MNLI" if result["mnli"] else ""
    name = (
        f"{result['task']} {result['model']}{control} rate {result['learning_rate']:g} "
        f"seed {result['seed']}"
    )
    if result["status"] != "done":
        return f"{name}: {result['status']}: {result['error']}"
    collapsed = ", one answer for every row" if result["collapsed"] else ""
    return (
        f"{name}: {result['headline_metric']} {100 * result['headline']:.1f} "
        f"(majority {100 * result['majority']:.1f}{collapsed}), {result['seconds']:.0f} s"
    )


def command(settings: GlueSettings) -> None:
    """One run and its outcome in one line; exit code 1 when it diverged."""
    accelerator = start_accelerator()
    result = main(settings, accelerator)
    accelerator.print(summary(result))
    accelerator.end_training()
    if result["status"] != "done":
        sys.exit(1)


if __name__ == "__main__":
    run_command(command, GlueSettings)
