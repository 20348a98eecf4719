"""The fine-tuned model as a folder for anyone: weights, tokenizer, model card; and sending it.

    python -m finetune.publish.model_card --folder tuned/rte --push_to_hub user/name
    python -m finetune.publish.model_card --folder tuned/rte --push_to_hub user/name --dry_run false

Sending is a command of its own and lists by default: what is published cannot be taken back, and a
grid must not do it by a flag. The card says what the results line says. Data with rows missing go
under their own label and without the metadata by which the hub would rank them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from finetune.results import RECIPE_FIELDS, run_name
from finetune.tasks import HUB_DATA, TASKS
from train.loop.atomic_dir import check_writable, write_dir_atomically
from train.loop.launch import run_command
from train.settings import InputError, require

MARK = "<!-- written by finetune/publish/model_card.py -->"
EXAMPLE = ("A man is playing a guitar.", "Somebody makes music.")
FILES = (
    "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "*.model",
)  # fmt: skip
"""All that a saved model can consist of; nothing else is ever replaced or sent."""

METRICS = {
    "accuracy": ("accuracy", "accuracy"),
    "f1": ("f1", "F1"),
    "matthews": ("matthews_correlation", "Matthews correlation"),
    "pearson": ("pearsonr", "Pearson correlation"),
    "spearman": ("spearmanr", "Spearman correlation"),
}
"""Our metric -> its name on the hub and in print."""

# a failed request, an absent connection: the class differs with the version of huggingface_hub
_UNREACHABLE = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


@dataclass(frozen=True)
class PushSettings:
    """Send a folder written by `--save` to the hub, or say what would be sent."""

    folder: str
    """Folder that `--save` of finetune/glue.py named."""
    push_to_hub: str
    """Where it goes: user/name."""
    private: bool = True
    """Whether a repository that is made for it can be seen by its owner alone."""
    dry_run: bool = True
    """List what would be sent and send nothing, without touching the network."""


@dataclass(frozen=True)
class Parcel:
    """What a push sends.

    Attributes:
        repo_id: Where it goes.
        private: Whether only its owner may see it.
        files: Name -> size in bytes.
        left_out: Name -> why it stays here.
    """

    repo_id: str
    private: bool
    files: dict[str, int]
    left_out: dict[str, str]

    def __str__(self) -> str:
        """The list, one file a line."""
        seen = "private" if self.private else "public"
        lines = [f"{constants.ENDPOINT}/{self.repo_id} ({seen})"]
        lines += [f"{size:>14,} {name}" for name, size in self.files.items()]
        lines += [f"{sum(self.files.values()):>14,} bytes in {len(self.files)} files"]
        lines += [f"stays here: {name} ({why})" for name, why in self.left_out.items()]
        return "\n".join(lines)


def save_model(folder: str, model: Any, tokenizer: Any, line: dict[str, Any]) -> None:
    """Write model, tokenizer and card, whole or not at all; an earlier save is replaced.

    Args:
        folder: Where to.
        model: The fine-tuned model, its label names in its configuration.
        tokenizer: Its tokenizer.
        line: The results line of the run, which was scored.

    Raises:
        InputError: The folder holds something else, or cannot be written.
    """
    assert line["status"] == "done", "a run without scores has no card"
    check_save_folder(folder)
    target = Path(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what the last batch set is not the tokenizer's own
        backend.no_truncation()
        backend.no_padding()
    try:
        with write_dir_atomically(target, replace=True) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            saved = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
            model_card(line, saved["model_type"]).save(unfinished / "README.md")
    except (OSError, SafetensorError) as error:
        raise InputError(f"save must name a folder that can be written, got {error}") from error


def check_save_folder(folder: str) -> None:
    """Refuse to save where anything but an earlier save is, or nothing can be.

    Raises:
        InputError: The folder holds something else, or could not be made.
    """
    path = Path(folder)
    if not path.exists():
        check_writable(path.parent, "save")
        return
    require(path.is_dir(), "save", "must name a folder", f"the file {folder}", "choose another")
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in names if not _is_known(name)]
    card = path / "README.md"
    ours = card.is_file() and MARK in card.read_text(encoding="utf-8", errors="replace")
    if names and (foreign or not ours):
        found = f"{folder} with {(foreign or names)[0]}"
        rule = "must name a new folder or one that holds an earlier save alone"
        raise InputError(f"save {rule}, got {found}; choose another")


def model_card(line: dict[str, Any], model_type: str) -> ModelCard:
    """The card of a run.

    Args:
        line: Its results line.
        model_type: What the saved config.json says: it may differ from the line's, see
            `RoFormerConfig`.
    """
    sections = (
        [f"# {_title(line)}", _subject(line), *_warnings(line)],
        ["## Scores", *_scores(line)],
        ["## Use", *_usage(line, model_type)],
        ["## Training", *_training(line)],
        ["## Data", _data(line)],
        ["## Licence", _licence(line)],
        [MARK],
    )
    text = "\n\n".join(part for section in sections for part in section)
    return ModelCard(f"---\n{card_data(line).to_yaml()}\n---\n\n{text}\n")


def card_data(line: dict[str, Any]) -> ModelCardData:
    """The card's metadata; GLUE is named in it only for the official rows."""
    official = line["official"]
    tags = [line["model_type"]]
    tags += [tag for tag in ("collapsed", "random_weights") if line[tag]]
    return ModelCardData(
        language="en",
        license="unknown",  # of the weights; the text says what is known
        library_name="transformers",
        pipeline_tag="text-classification",
        base_model=line["model"] if _has_base(line) else None,
        datasets=[HUB_DATA] if official else None,
        tags=[*tags, "glue"] if official else tags,
        metrics=[METRICS[name][0] for name in TASKS[line["task"]].metrics],
        model_name=_title(line),
        eval_results=[
            EvalResult(
                task_type="text-classification",
                dataset_type=HUB_DATA if official else line["label"],
                dataset_name=f"glue/{line['task']}" if official else line["label"],
                dataset_config=line["task"] if official else None,
                dataset_split=split,
                metric_type=METRICS[name][0],
                metric_value=value,
                metric_name=f"{METRICS[name][1]}, development set",
            )
            for split, values in line["metrics"].items()
            for name, value in values.items()
        ],
    )


def _title(line: dict[str, Any]) -> str:
    return run_name(line).rpartition("-")[0]


def _has_base(line: dict[str, Any]) -> bool:
    """Whether the weights come from a model of the hub."""
    if line["random_weights"] or Path(line["model"]).exists():
        return False
    try:
        validate_repo_id(line["model"])
    except HFValidationError:
        return False
    return True


def _subject(line: dict[str, Any]) -> str:
    millions = line["parameters"] / 1e6
    names = TASKS[line["task"]].labels
    answers = (
        "a value from 0 to 5"
        if names is None
        else ", ".join(f"{index} {name}" for index, name in enumerate(names))
    )
    return (
        f"`{line['model']}` ({line['model_type']}, {millions:.1f} M parameters) fine-tuned on "
        f"{line['label']} with seed {line['seed']}. It answers: {answers}."
    )


def _warnings(line: dict[str, Any]) -> list[str]:
    """What a reader must know before any number."""
    said = {
        "**WARNING: THIS MODEL LEARNED NOTHING.** It gives one answer for all rows of a "
        "validation split (collapsed): its scores are those of a constant.": line["collapsed"],
        "**Not pretrained.** All weights were random when training began: only the architecture "
        "and the tokenizer come from the model named above. It is a control.": line[
            "random_weights"
        ],
        "**Not the official data.** Rows are missing or differ, so these scores cannot be "
        "compared with published ones.": not line["official"],
        f"**Started from MNLI.** Training began from this model fine-tuned on MNLI "
        f"(`{line['mnli']}`), not from the pretrained model alone.": line["mnli"] is not None,
    }
    return [f"> {text}" for text, holds in said.items() if holds]


def _scores(line: dict[str, Any]) -> list[str]:
    names = TASKS[line["task"]].metrics
    header = ["development set", "rows", *(METRICS[name][1] for name in names)]
    rows = []
    for split, values in line["metrics"].items():
        for who, scores in (("", values), (", majority baseline", line["majority_metrics"][split])):
            cells = [f"{100 * scores[name]:.1f}" for name in names]
            rows.append([f"{split}{who}", f"{line['rows'][split]:,}", *cells])
    note = (
        "Metrics x 100 after the last epoch; the epoch was not chosen by them. This is the "
        "development set, whose labels are public, not the test set. One seed: on small tasks "
        "seeds differ by points. The majority baseline always gives the commonest class of the "
        "training split or, for values, their mean."
    )
    return [_table(header, rows), note]


def _usage(line: dict[str, Any], model_type: str) -> list[str]:
    """Code that runs as it stands in the saved folder."""
    task = TASKS[line["task"]]
    pair = f'{{"text": "{EXAMPLE[0]}", "text_pair": "{EXAMPLE[1]}"}}'
    text = pair if len(task.columns) == 2 else f'"{EXAMPLE[0]}"'
    value = "" if task.labels else ', function_to_apply="none"'
    ours = "import roformer  # knows roformer_plus\n" if model_type == "roformer_plus" else ""
    code = (
        f"{ours}from transformers import pipeline\n\n"
        'classify = pipeline("text-classification", model=".")  # this folder, or its hub id\n'
        f"example = {text}\n"
        f"print(classify(example, truncation=True, max_length={line['length']}{value}))"
    )
    order = "text is " + " and text_pair is ".join(task.columns) + "."
    notes = [f"Inputs: {order}" if len(task.columns) == 2 else f"Input: {order}"]
    if model_type == "roformer":
        notes.append(
            "transformers reads this folder with code of its own. After `import roformer; "
            "roformer.use_for_auto_classes()` the same lines build the class it was trained as: "
            "the same scores, and no limit of length."
        )
    return [f"```python\n{code}\n```", *notes]


def _training(line: dict[str, Any]) -> list[str]:
    facts = {"seed": line["seed"], **{name: line[name] for name in RECIPE_FIELDS}}
    facts |= {name: line[name] for name in ("precision", "device", "processes", "seconds")}
    facts |= {"tokenizer": line["tokenizer"] or "the model's", "training loss": line["loss"]}
    facts |= line["versions"]
    rows = [[name, str(value)] for name, value in facts.items()]
    again = "The command that makes it again:"
    return [_table(["setting", "value"], rows), again, f"```sh\n{line['command']}\n```"]


def _data(line: dict[str, Any]) -> str:
    rows = ", ".join(f"{split} {count:,}" for split, count in line["rows"].items())
    title = TASKS[line["task"]].title
    if line["official"]:
        name = f"GLUE's {title} (`{HUB_DATA}`, configuration `{line['task']}`), all official rows"
    elif TASKS[line["task"]].official:
        name = f"`{line['label']}`: rows in the form of {title}, not its official splits"
    else:
        name = f"`{line['label']}`: a demonstration task of this project"
    return f"{name}. Rows: {rows}. The text is English."


def _licence(line: dict[str, Any]) -> str:
    source = "random numbers" if line["random_weights"] else f"`{line['model']}`"
    return (
        "The code that trained this model is under Apache-2.0. That does not cover the weights: "
        f"they were made from {source} and from the data above, each with terms of its own, so "
        "their licence is given as unknown until whoever publishes them settles it."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plan_push(folder: str, repo_id: str, private: bool) -> Parcel:
    """What `push` would send; the network is not touched.

    Raises:
        InputError: The folder is not a saved model with its card, or the name is no user/name.
    """
    try:
        validate_repo_id(repo_id)
        named = repo_id.count("/") == 1
    except HFValidationError:
        named = False
    require(named, "push_to_hub", "must be user/name", repr(repo_id), "see hf.co/new")
    path = Path(folder)
    require(path.is_dir(), "folder", "must be one that --save wrote", folder, "check the path")
    files, left_out = {}, {}
    for entry in sorted(path.iterdir()):
        if entry.is_symlink():
            left_out[entry.name] = "a link"
        elif entry.is_file() and _is_known(entry.name):
            files[entry.name] = entry.stat().st_size
        else:
            left_out[entry.name] = "not part of a saved model"
    found = ", ".join(files) or "none of them"
    for needed in ("README.md", "config.json", "*.safetensors"):
        there = any(fnmatch(name, needed) for name in files)
        require(there, "folder", f"must hold {needed}", found, "write it with --save")
    return Parcel(repo_id, private, files, left_out)


def push(folder: str, repo_id: str, private: bool) -> str:
    """Send the files of `plan_push`.

    Returns:
        The address of the repository.

    Raises:
        InputError: As `plan_push`; or the hub cannot be reached, refuses, or shows publicly what
            was to be private.
    """
    files = plan_push(folder, repo_id, private).files
    login = "log in with `hf auth login`"
    require(get_token() is not None, "push_to_hub", "needs a token", "none", login)
    hub = HfApi()
    try:
        url = hub.create_repo(repo_id, private=private, exist_ok=True)
        # a repository that existed keeps its visibility
        hidden = not private or bool(hub.repo_info(repo_id).private)
        remedy = "change it there, or give --private false"
        require(hidden, "private", f"must be what {repo_id} is", "a public one", remedy)
        hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=[escape(name) for name in files],
            commit_message="Fine-tuned model",
        )
    except _UNREACHABLE as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(
            f"push_to_hub must name a repository you may write to, got {repo_id} ({reason}); "
            f"check the network and {login}"
        ) from error
    return str(url)


def main(settings: PushSettings) -> None:
    """List, and send if asked to."""
    given = (settings.folder, settings.push_to_hub, settings.private)
    if settings.dry_run:
        print(f"nothing was sent; --dry_run false sends to {plan_push(*given)}")
        print("README.md goes as it is: read it first, its command names your paths")
    else:
        print(f"sent to {push(*given)}")


def _is_known(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILES)


if __name__ == "__main__":
    run_command(main, PushSettings)
