"""Command line: YAML files and flags to a settings dataclass, errors of one line, exit codes.

Several `--config` files are merged; later files override earlier ones, and flags
(`--optim.steps 100`) override files.
"""

import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

import jsonargparse
import yaml

from train.settings import InputError

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

SettingsT = TypeVar("SettingsT")


def run_command(
    main: Callable[[SettingsT], object],
    settings: type[SettingsT],
    argv: Sequence[str] | None = None,
    default_config: str | None = None,
    examples: str = "",
) -> None:
    """Parse the settings and run a command; an `InputError` is one line and exit code 2.

    Args:
        main: The command, called with its settings.
        settings: Dataclass of the settings.
        argv: Flags; None means the command line's.
        default_config: YAML read, and printed, when no `--config` is given.
        examples: Text at the beginning of `--help`.
    """
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        flags = list(sys.argv[1:] if argv is None else argv)
        parsed = parse_settings(settings, flags, default_config, examples)
        if default_config is not None and not _names_config(flags) and is_local_main:
            values = yaml.safe_load(Path(default_config).read_text(encoding="utf-8"))
            print(f"no --config: flags change the settings of {default_config}:")
            print(yaml.safe_dump(values, sort_keys=False, default_flow_style=None), end="")
        main(parsed)
    except InputError as error:
        if is_local_main:
            print(f"error: {error}", file=sys.stderr)
        torch = sys.modules.get("torch")  # a report runs without it, and starts sooner
        if torch is not None and torch.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # threads of torch.distributed can abort a normal exit
        sys.exit(2)


def progress_interval() -> float:
    """Return the seconds between two updates of a progress bar: longer if it goes to a file."""
    return 0.1 if sys.stderr.isatty() else 30.0


class _StrictParser(jsonargparse.ArgumentParser):
    """Parser that raises its errors and accepts no abbreviated flags.

    Args:
        examples: Text at the beginning of `--help`.
        settings: Dataclass that is filled.
    """

    def __init__(
        self, *args: Any, examples: str = "", settings: type | None = None, **kwargs: Any
    ) -> None:
        usage = "%(prog)s [--config FILE ...] [--KEY VALUE ...]"
        super().__init__(*args, **({"usage": usage} | kwargs | {"allow_abbrev": False}))
        self.examples, self.settings = examples, settings

    def format_help(self, *args: Any) -> str:
        """Return the help, without the flags that read a section from a file of its own."""
        for action in self._actions:
            if action.help == "Path to a configuration file.":
                is_whole = action.dest == "config"
                action.help = "YAML file of settings; may be repeated." if is_whole else SUPPRESS
        return self.examples + super().format_help(*args)

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raise the message as one line instead of printing the usage and exiting."""
        raise InputError(" ".join(message.split()).removeprefix("Parser key ")) from ex

    def parse_args(self, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:  # type: ignore[override]
        """Parse; in YAML jsonargparse accepts null for every type, and anything for a section."""
        parsed = super().parse_args(*args, **kwargs)
        for key, kind in _field_types(self.settings) if self.settings else ():
            value, found = parsed.get(key), key in parsed
            if is_dataclass(kind) and found and not isinstance(value, jsonargparse.Namespace):
                self.error(f'"{key}": must be a section. Got value: {value}')
            if value is None and found and NoneType not in get_args(kind):
                self.error(f'"{key}": must not be null')
        return parsed


def _field_types(settings: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and type of every setting, sections before what they hold."""
    for name, kind in get_type_hints(settings).items():
        yield f"{prefix}{name}", kind
        if is_dataclass(kind):
            yield from _field_types(cast(type, kind), f"{prefix}{name}.")


def _names_config(flags: Sequence[str]) -> bool:
    return any(flag.split("=")[0] == "--config" for flag in flags)


def parse_settings(
    settings: type[SettingsT],
    argv: Sequence[str] | None = None,
    default_config: str | None = None,
    examples: str = "",
) -> SettingsT:
    """Read YAML files and flags.

    Args:
        settings: The frozen dataclass to fill.
        argv: Flags; None means the command line's.
        default_config: YAML file read if no `--config` is given; `--help` then shows its values.
        examples: Text at the beginning of `--help`.

    Returns:
        An instance of `settings`.

    Raises:
        InputError: A key, type or value is wrong; the message is one line.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    defaults = [] if default_config is None or _names_config(flags) else [default_config]
    return jsonargparse.auto_cli(
        settings,
        args=flags,
        parser_class=_StrictParser,
        as_positional=False,
        default_config_files=defaults,
        examples=examples,
        settings=settings,
    )
