"""Command line: YAML files and flags to a settings dataclass, errors of one line, exit codes.

Several `--config` files are merged; later files override earlier ones, and flags
(`--optim.steps 100`) override files.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import torch
import yaml

from train.settings import InputError, require

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

SettingsT = TypeVar("SettingsT")


def run_command(
    main: Callable[[SettingsT], object],
    settings: type[SettingsT],
    argv: Sequence[str] | None = None,
    default_config: str | None = None,
) -> None:
    """Parse the settings and run a command; an `InputError` is one line and exit code 2.

    Args:
        main: The command, called with its settings.
        settings: Dataclass of the settings.
        argv: Flags; None means the command line's.
        default_config: YAML read when no `--config` is given.
    """
    try:
        main(parse_settings(settings, argv, default_config))
    except InputError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        if torch.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # threads of torch.distributed can abort a normal exit
        sys.exit(2)


def progress_interval() -> float:
    """Return the seconds between two updates of a progress bar: longer if it goes to a file."""
    return 0.1 if sys.stderr.isatty() else 30.0


class _OneLineParser(jsonargparse.ArgumentParser):
    """Parser that raises its errors as `InputError` and accepts no abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raise the message in one line, with the known key that is closest to a misspelt one."""
        line = " ".join(message.split()).removeprefix("Parser key ")
        flag = line.removeprefix("unrecognized arguments: ").split(" ")[0].lstrip("-")
        key = flag.split("=")[0].strip("\"':")
        similar = difflib.get_close_matches(key, self.get_defaults().as_flat().__dict__, n=1)
        hint = f"did you mean {similar[0]}?" if similar and similar[0] != key else "see --help"
        raise InputError(f"{line}; {hint}") from ex


def parse_settings(
    settings: type[SettingsT], argv: Sequence[str] | None = None, default_config: str | None = None
) -> SettingsT:
    """Read YAML files and flags.

    Args:
        settings: The frozen dataclass to fill.
        argv: Flags; None means the command line's.
        default_config: YAML file read if no `--config` is given.

    Returns:
        An instance of `settings`.

    Raises:
        InputError: A key, type or value is wrong; the message is one line.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    if default_config is not None and not any(flag.split("=")[0] == "--config" for flag in flags):
        flags = ["--config", default_config, *flags]
    for flag, next_flag in zip(flags, [*flags[1:], ""]):
        name, equals, value = flag.partition("=")
        if name == "--config":
            _check_unique_keys(value if equals else next_flag)
        _check_whole_field(name)
    try:
        return jsonargparse.auto_cli(
            settings, args=flags, parser_class=_OneLineParser, as_positional=False
        )
    except (TypeError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())
        raise InputError(
            f"settings must be sections of keys in UTF-8, got {found}; see --help"
        ) from error


def _check_unique_keys(file: str) -> None:
    """Refuse a YAML file with a repeated key, of which the parser would use only the last."""
    try:
        nodes = [yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.SafeLoader)]
    except (OSError, ValueError, yaml.YAMLError):
        return  # the parser reports it
    for node in nodes:  # the list grows by the children of each node
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            repeated = ", ".join(sorted({str(key) for key in keys if keys.count(key) > 1}))
            require(not repeated, file, "must say a key once", repeated, "join the two")
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def _check_whole_field(flag: str) -> None:
    """Refuse a flag for one key of a dictionary in `model.config`, which would drop the others."""
    field, _, key = flag.removeprefix("--model.config.").partition(".")
    if key and flag.startswith("--model.config."):
        remedy = f"write --model.config.{field} '{{KEY: VALUE}}'"
        raise InputError(
            f"model.config.{field} must be given as a whole, got its key {key} alone; {remedy}"
        )
