"""From YAML files and flags to a settings dataclass, with errors of one line.

Several `--config` files are merged, later ones win, and flags win over all (`--optim.steps 100`).
"""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

from train.settings import InputError, require

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

SettingsT = TypeVar("SettingsT")


class _OneLineParser(jsonargparse.ArgumentParser):
    """A parser whose complaints are exceptions of one line, and that guesses no abbreviation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **(options | {"allow_abbrev": False}))

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        """Raise what argparse would print."""
        line = " ".join(message.split()).removeprefix("Parser key ")
        typed = (
            line.removeprefix("unrecognized arguments: ").split(" ")[0].lstrip("-").split("=")[0]
        ).strip("\"':")
        known = difflib.get_close_matches(typed, self.get_defaults().as_flat().__dict__, n=1)
        hint = f"did you mean {known[0]}?" if known and known[0] != typed else "see --help"
        raise InputError(f"{line}; {hint}") from ex


def _refuse_repeats(file: str) -> None:
    """Refuse a YAML that says a key twice, of which only the last would count.

    Raises:
        InputError: It does.
    """
    try:
        nodes = [yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.SafeLoader)]
    except (OSError, ValueError, yaml.YAMLError):
        return  # the parser says what is wrong
    for node in nodes:  # which grows
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            twice = sorted({str(key) for key in keys if keys.count(key) > 1})
            require(not twice, file, "must say a key once", ", ".join(twice), "join the two")
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def parse_settings(
    settings: type[SettingsT], argv: Sequence[str] | None = None, default_config: str | None = None
) -> SettingsT:
    """YAML files and flags to settings.

    Args:
        settings: The frozen dataclass to fill.
        argv: Flags; None means the command line's.
        default_config: YAML read when no `--config` is given.

    Returns:
        An instance of `settings`.

    Raises:
        InputError: A key, type or value is wrong; the message is one line.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    if default_config is not None and not any(flag.split("=")[0] == "--config" for flag in flags):
        flags = ["--config", default_config, *flags]
    for flag, value in zip(flags, [*flags[1:], ""]):
        name, equals, given = flag.partition("=")
        if name == "--config":
            _refuse_repeats(given if equals else value)
        field_of, _, inside = name.removeprefix("--model.config.").partition(".")
        whole = not (inside and name.startswith("--model.config."))
        rule, found = "must be given as a whole", f"its key {inside} alone"
        remedy = f"write --model.config.{field_of} '{{KEY: VALUE}}'"
        require(whole, f"model.config.{field_of}", rule, found, remedy)
    try:
        return jsonargparse.auto_cli(
            settings, args=flags, parser_class=_OneLineParser, as_positional=False
        )
    except (TypeError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise InputError(
            f"settings must be sections of keys in UTF-8, got {line}; see --help"
        ) from error
