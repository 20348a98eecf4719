"""Control without a network: what the words of a task alone give, by scikit-learn.

    python -m finetune.simple_features --tasks '[cola, rte]' --glue_dir glue

A single text is the tf-idf vector of its words, where a Chinese character is a word. A pair of
texts is two numbers: the cosine of their tf-idf vectors and the share of their words that both have
(Jaccard). A class is predicted by logistic regression, a value by linear regression, fitted to the
training split with scikit-learn's defaults; nothing is selected. The grid makes these controls with
`--controls true`.
"""

import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import sklearn
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression

from finetune.data import Columns, read_split_columns
from finetune.metrics import score_fields
from finetune.results import (
    RUN_KEY,
    SIMPLE_FEATURES,
    Result,
    inputs_differ,
    prediction_file,
    read_finished,
    run_key,
    run_lock,
    write_result,
)
from finetune.run_info import data_fields, hash_data
from finetune.settings import GridSettings, check_output, normalize_paths
from finetune.tasks import Task, load_task
from train.command_line import run_command
from train.loop.launch import git_commit
from train.settings import first_line

WORD = r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]{2,}"
"""scikit-learn's words, and each Chinese character, as between them there are no spaces."""


@dataclass(frozen=True)
class SimpleFeaturesSettings:
    """Score simple features on tasks and append a result for each."""

    tasks: list[str]
    """Tasks by name, or YAML files of your own tasks."""
    glue_dir: str | None = None
    """Folder of the data, as for finetune/glue.py; null reads the hub."""
    output: str = "runs/results.jsonl"
    """Results file of the runs that are compared."""
    test: bool = False
    """Also predict the test rows of your own tasks."""

    def __post_init__(self) -> None:
        check_output(self.output)
        normalize_paths(self, "glue_dir", "tasks")
        for task in self.tasks:
            load_task(task)


def score_tasks(settings: SimpleFeaturesSettings | GridSettings) -> None:
    """Score each task that has no result for the data as they are.

    A task that has no features is left out with a warning.
    """
    for name in settings.tasks:
        task = load_task(name)
        key = dict.fromkeys(RUN_KEY) | {"model": SIMPLE_FEATURES, "task": name, "seed": 0}
        key |= {"glue_dir": settings.glue_dir, "random_weights": False}
        inputs = {"weights": None, **hash_data(task, settings.glue_dir, settings.test)}
        with run_lock(settings.output, key):
            earlier = read_finished(settings.output).get(run_key(key))
            is_current = earlier is not None and not inputs_differ(inputs, earlier)
            if settings.test and task.test is not None:
                is_current &= prediction_file(settings.output, key, "test").exists()
            if not is_current:
                score_task(task, settings, key | inputs)


def score_task(
    task: Task, settings: SimpleFeaturesSettings | GridSettings, identity: Result
) -> None:
    """Fit, score, write the predictions, append the result and print it.

    `identity` are the fields of its key and the hashes of its inputs.
    """
    started = time.perf_counter()
    splits = ["train", *task.validation_splits]
    splits += ["test"] if settings.test and task.test is not None else []
    columns = {split: read_split_columns(task, split, settings.glue_dir) for split in splits}
    labels = {split: columns[split]["label"] for split in splits}
    try:
        logits = predict(task, columns)
    except ValueError as error:  # scikit-learn's: one class, or texts without words
        print(f"warning: {task.name} has no simple features: {first_line(error)}", file=sys.stderr)
        return
    folder = [] if settings.glue_dir is None else ["--glue_dir", settings.glue_dir]
    command = ["python", "-m", "finetune.simple_features", "--tasks", f"[{identity['task']}]"]
    command += [*folder, *(["--test", "true"] if "test" in splits else [])]
    result = {
        **identity,
        "model_type": SIMPLE_FEATURES,
        **data_fields(task, labels),
        "versions": {"scikit-learn": sklearn.__version__, "commit": git_commit()},
        "command": shlex.join(command),
        "status": "done",
        **score_fields(task, logits, labels),
        "seconds": round(time.perf_counter() - started, 2),
    }
    write_result(settings.output, result, labels, logits)
    score = f"{100 * result['headline']:.1f}"
    print(f"{identity['task']} {SIMPLE_FEATURES}: {score}", flush=True)


def predict(task: Task, columns: dict[str, Columns]) -> dict[str, NDArray[np.float32]]:
    """Fit to `train` and predict the other splits.

    Returns:
        Split -> log probabilities [N, num_labels], or values [N, 1] for a regression.
    """
    train = columns["train"]
    texts = [text for name in task.columns for text in train[name]]
    vectorizer = TfidfVectorizer(token_pattern=WORD).fit(texts)
    inputs = {split: features(vectorizer, task, found) for split, found in columns.items()}
    rest = [split for split in columns if split != "train"]
    if task.is_regression:
        linear = LinearRegression().fit(inputs["train"], train["label"])
        return {s: linear.predict(inputs[s]).astype(np.float32)[:, None] for s in rest}
    model = LogisticRegression(max_iter=1000).fit(inputs["train"], train["label"])
    logits = {}
    for s in rest:
        logits[s] = np.full((inputs[s].shape[0], task.num_labels), -np.inf, np.float32)
        logits[s][:, model.classes_] = model.predict_log_proba(inputs[s])
    return logits


def features(vectorizer: TfidfVectorizer, task: Task, columns: Columns) -> Any:
    """Compute the features of N rows: sparse [N, words] for one text, [N, 2] for a pair."""
    vectors = [vectorizer.transform(columns[name]) for name in task.columns]
    if len(vectors) == 1:
        return vectors[0]
    first, second = vectors  # rows have norm 1
    cosine = _row_sums(first.multiply(second))
    shared, either = first.sign().multiply(second.sign()), (first + second).sign()
    overlap = _row_sums(shared) / np.maximum(1, _row_sums(either))
    return np.stack([cosine, overlap], axis=1)


def _row_sums(matrix: scipy.sparse.sparray) -> NDArray[np.float64]:
    return np.asarray(matrix.sum(axis=1), dtype=np.float64).ravel()


if __name__ == "__main__":
    run_command(score_tasks, SimpleFeaturesSettings)
