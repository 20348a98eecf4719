"""Model folders for publication: writing a fine-tuned model with its card, sending a folder.

    python -m finetune.publish.model_card --folder tuned/rte --push_to_hub user/name
    python -m finetune.publish.model_card --folder tuned/rte --push_to_hub user/name --dry_run false

Sending is a command of its own that only lists files by default, because publication cannot be
undone. A card contains what the line in results.jsonl contains. Data with rows missing keep their
own label and get no metadata by which the hub would rank them.
"""

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, cast

import jinja2
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from finetune.results import RECIPE_FIELDS, run_name
from finetune.tasks import HUB_DATA, TASKS
from train.atomic_dir import check_writable, write_dir_atomically
from train.command_line import run_command
from train.settings import InputError, first_line, require

TEMPLATES = Path(__file__).parent / "templates"
MARK = "<!-- written by finetune/publish/model_card.py -->"
EXAMPLE = ("A man is playing a guitar.", "Somebody makes music.")
MODEL_FILES = (
    "README.md", "config.json", "generation_config.json", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "*.model",
)  # fmt: skip
"""Names of the files of a saved model; nothing else is ever replaced or sent."""

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
    """Send a model folder to the hub, or list what would be sent."""

    folder: str
    """Folder written by `--save` of finetune/glue.py or by finetune.publish.pretrained."""
    push_to_hub: str
    """Repository: user/name."""
    private: bool = True
    """Make the repository private if it has to be created."""
    dry_run: bool = True
    """List what would be sent and send nothing, without network access."""


def main(settings: PushSettings) -> None:
    """List the files, and send them if asked to."""
    files, skipped = list_files(settings.folder, settings.push_to_hub)
    if not settings.dry_run:
        print(f"sent to {push(settings.folder, settings.push_to_hub, settings.private)}")
        return
    visibility = "private" if settings.private else "public"
    target = f"{constants.ENDPOINT}/{settings.push_to_hub} ({visibility})"
    print(f"nothing was sent; --dry_run false sends to {target}")
    for name, size in files.items():
        print(f"{size:>14,} {name}")
    print(f"{sum(files.values()):>14,} bytes in {len(files)} files")
    for name, why in skipped.items():
        print(f"not sent: {name} ({why})")
    print("README.md is sent unchanged: read it first, its command names your paths")


def save_model(folder: str, model: Any, tokenizer: Any, result: dict[str, Any]) -> None:
    """Write model, tokenizer and card, completely or not at all; an earlier save is replaced.

    Args:
        folder: Folder to make.
        model: The fine-tuned model, with label names in its configuration.
        tokenizer: Its tokenizer.
        result: The run's line in results.jsonl, with scores.

    Raises:
        InputError: The folder holds something else, or cannot be written.
    """
    assert result["status"] == "done", "a run without scores has no card"
    check_save_folder(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the settings of the last batch do not belong to the tokenizer
        backend.no_truncation()
        backend.no_padding()
    try:
        with write_dir_atomically(Path(folder), replace=True) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            saved = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
            finetuned_card(result, saved["model_type"]).save(unfinished / "README.md")
    except (OSError, SafetensorError) as error:
        raise InputError(f"save must name a folder that can be written, got {error}") from error


def check_save_folder(folder: str) -> None:
    """Refuse to save over anything but an earlier save.

    Raises:
        InputError: The folder holds something else, or could not be made.
    """
    path = Path(folder)
    if not path.exists():
        check_writable(path.parent, "save")
        return
    require(path.is_dir(), "save", "must name a folder", f"the file {folder}", "choose another")
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in names if not _is_model_file(name)]
    card = path / "README.md"
    ours = card.is_file() and MARK in card.read_text(encoding="utf-8", errors="replace")
    found = f"{folder} with {(foreign or names or [''])[0]}"
    rule = "must name a new folder or one that holds only an earlier save"
    require(not names or (ours and not foreign), "save", rule, found, "choose another")


def render_card(template: str, data: ModelCardData, **values: Any) -> ModelCard:
    """Render a model card.

    Args:
        template: File in templates/.
        data: The metadata for the hub.
        values: What the template shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(values)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def finetuned_card(result: dict[str, Any], model_type: str) -> ModelCard:
    """The card of a fine-tuned model.

    Args:
        result: The run's line in results.jsonl.
        model_type: As in the saved config.json; it may differ from that of the line.
    """
    task = TASKS[result["task"]]
    facts = {name: result[name] for name in ("seed", *RECIPE_FIELDS)}
    facts |= {name: result[name] for name in ("precision", "device", "processes", "seconds")}
    facts |= {"tokenizer": result["tokenizer"] or "the model's", "training loss": result["loss"]}
    answers = ", ".join(f"{index} {name}" for index, name in enumerate(task.labels or ()))
    return render_card(
        "finetuned.md.j2",
        finetuned_card_data(result),
        title=_title(result),
        run=result,
        task=task,
        answers=answers or "a value from 0 to 5",
        metrics={name: METRICS[name][1] for name in task.metrics},
        model_type=model_type,
        example=EXAMPLE,
        facts=facts | result["versions"],
        hub_data=HUB_DATA,
        mark=MARK,
    )


def finetuned_card_data(result: dict[str, Any]) -> ModelCardData:
    """The card's metadata; GLUE is named in it only for the official rows."""
    official = result["official"]
    tags = [result["model_type"]]
    tags += [tag for tag in ("collapsed", "random_weights") if result[tag]]
    return ModelCardData(
        language="en",
        license="unknown",  # of the weights; the text says what is known
        library_name="transformers",
        pipeline_tag="text-classification",
        base_model=result["model"] if _is_on_hub(result) else None,
        datasets=[HUB_DATA] if official else None,
        tags=[*tags, "glue"] if official else tags,
        metrics=[METRICS[name][0] for name in TASKS[result["task"]].metrics],
        model_name=_title(result),
        eval_results=[
            EvalResult(
                task_type="text-classification",
                dataset_type=HUB_DATA if official else result["label"],
                dataset_name=f"glue/{result['task']}" if official else result["label"],
                dataset_config=result["task"] if official else None,
                dataset_split=split,
                metric_type=METRICS[name][0],
                metric_value=value,
                metric_name=f"{METRICS[name][1]}, development set",
            )
            for split, values in result["metrics"].items()
            for name, value in values.items()
        ],
    )


def list_files(folder: str, repo_id: str) -> tuple[dict[str, int], dict[str, str]]:
    """List what `push` sends, without network access.

    Returns:
        Name -> size in bytes; and name -> reason of what is not sent.

    Raises:
        InputError: The folder is not a saved model with its card, or `repo_id` is not user/name.
    """
    valid = _is_repo_id(repo_id) and repo_id.count("/") == 1
    require(valid, "push_to_hub", "must be user/name", repr(repo_id), "see hf.co/new")
    path = Path(folder)
    require(path.is_dir(), "folder", "must be one that --save wrote", folder, "check the path")
    files, skipped = {}, {}
    for entry in sorted(path.iterdir()):
        if entry.is_symlink():
            skipped[entry.name] = "a link"
        elif entry.is_file() and _is_model_file(entry.name):
            files[entry.name] = entry.stat().st_size
        else:
            skipped[entry.name] = "not part of a saved model"
    found = ", ".join(files) or "none of them"
    for needed in ("README.md", "config.json", "*.safetensors"):
        present = any(fnmatch(name, needed) for name in files)
        require(present, "folder", f"must hold {needed}", found, "write it with --save")
    return files, skipped


def push(folder: str, repo_id: str, private: bool) -> str:
    """Send the files of `list_files`.

    Returns:
        The address of the repository.

    Raises:
        InputError: As `list_files`; or the hub cannot be reached or refuses, or the repository is
            public and `private` was asked for.
    """
    files, _ = list_files(folder, repo_id)
    login = "log in with `hf auth login`"
    require(get_token() is not None, "push_to_hub", "needs a token", "none", login)
    hub = HfApi()
    try:
        url = hub.create_repo(repo_id, private=private, exist_ok=True)
        # an existing repository keeps its visibility
        hidden = not private or bool(hub.repo_info(repo_id).private)
        remedy = "change it there, or give --private false"
        require(hidden, "private", f"must be the visibility of {repo_id}", "a public one", remedy)
        hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=[escape(name) for name in files],
            commit_message="Add model",
        )
    except _UNREACHABLE as error:
        raise InputError(
            f"push_to_hub must name a repository you may write to, got {repo_id} "
            f"({first_line(error)}); check the network and {login}"
        ) from error
    return str(url)


def _title(result: dict[str, Any]) -> str:
    return run_name(result).rpartition("-")[0]


def _is_on_hub(result: dict[str, Any]) -> bool:
    """Whether the weights come from a model of the hub."""
    local = result["random_weights"] or Path(result["model"]).exists()
    return not local and _is_repo_id(result["model"])


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _is_model_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in MODEL_FILES)


if __name__ == "__main__":
    run_command(main, PushSettings)
