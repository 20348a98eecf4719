"""Command line: YAML files and flags to a settings dataclass, errors of one line, exit codes.

Several `--config` files are merged; later files override earlier ones, and flags
(`--optim.steps 100`) override files, wherever they stand.
"""

import difflib
import json
import os
import re
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

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
) -> None:
    """Parse the settings, from `argv` or the command line, as `parse_settings`, and run a command.

    The name of a `default_config` that is read is printed. An `InputError` is one line and exit
    code 2; every process that meets it prints it, all but the first of a machine with their rank.
    """
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        flags = list(sys.argv[1:] if argv is None else argv)
        parsed = parse_settings(settings, flags, default_config)
        if default_config is not None and not _split_flags(flags)[0] and is_local_main:
            print(f"no --config: the settings of {default_config}, which flags override")
        main(parsed)
        print(end="", flush=True)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # standard output has lost its reader, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        raise
    except InputError as error:
        torch = sys.modules.get("torch")  # a report runs without it, and starts sooner
        is_distributed = torch is not None and torch.distributed.is_initialized()
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK"))
        process = "" if is_local_main else f" (process {rank})"  # the others may not have met it
        print(f"error{process}: {error}", file=sys.stderr)
        if is_distributed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # threads of torch.distributed can abort a normal exit
        sys.exit(2)


def progress_interval() -> float:
    """Return the seconds between two updates of a progress bar: longer if it goes to a file."""
    return 0.1 if sys.stderr.isatty() else 30.0


def _split_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files that `--config` names, and all other flags."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    found, others = parser.parse_known_args(flags)
    return found.config, others


def parse_settings(
    settings: type[SettingsT], flags: Sequence[str], default_config: str | None = None
) -> SettingsT:
    """Fill a frozen dataclass from YAML files and flags.

    The `default_config` is read if no `--config` is given; `--help` then shows its values.

    Raises:
        InputError: A key, type or value is wrong; the message is one line.
    """
    types = dict(_field_types(settings))
    files, others = _split_flags(flags)
    # YAML does not read the surrogates that JSON writes for characters such as emoji
    content = json.dumps(_read_configs(files), ensure_ascii=False)
    merged = [f"--config={content}"] if files else []
    for flag in others:
        section = re.match(r"--(\w+)(\.(?!help$)|=|$)", flag)
        if section and get_origin(types.get(section[1])) is list:
            if section[2] == ".":  # jsonargparse would change the last item alone
                rule = "must be given whole"
                raise InputError(f"{section[1]} {rule}, got {flag}; write it as '[A, B]'")
            # jsonargparse would complete each item by the file's item of the same index
            merged.append(f"--{section[1]}=[]")
    parser = jsonargparse.ArgumentParser(
        default_config_files=[default_config] if default_config and not files else [],
        usage="%(prog)s [--config FILE ...] [--KEY VALUE ...]",
        description=settings.__doc__,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; may be repeated.")
    parser.add_class_arguments(settings, as_group=False)
    try:
        parsed = parser.parse_args([*merged, *others])  # the parser lets the last one win
    except ArgumentError as error:
        raise InputError(_describe_parser_error(str(error), types)) from error
    _check_null(parsed, types)
    values = parser.instantiate(parsed)
    values.pop("config")
    return settings(**vars(values))


def _check_null(parsed: jsonargparse.Namespace, types: dict[str, Any]) -> None:
    """Refuse null for other types, and values for a section, which jsonargparse accepts in YAML."""
    for key, kind in types.items():
        value, is_section = parsed.get(key), is_dataclass(kind)
        fits = isinstance(value, jsonargparse.Namespace) if is_section else value is not None
        if not fits and NoneType not in get_args(kind) and key in parsed:
            raise InputError(_wrong_type(key, kind, str(value)))


def _field_types(settings: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and type of every setting, sections before what they hold."""
    for name, kind in get_type_hints(settings).items():
        yield f"{prefix}{name}", kind
        for part in (kind, *get_args(kind)):
            if is_dataclass(part):
                yield from _field_types(cast(type, part), f"{prefix}{name}.")


def _describe_type(kind: Any) -> str:
    """Name a type: "int or null", "tuple[float, float]", "section"."""
    if is_dataclass(kind):
        return "section"
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    name = re.sub(r"\w+\.", "", name)  # without the modules of the types
    return name.replace(" | ", " or ").replace("None", "null")


def _wrong_type(key: str, kind: Any, found: str) -> str:
    found = found.strip("'\"").replace("None", "null")
    is_count = int in (kind, *get_args(kind)) and re.fullmatch(r"\d+(\.\d+)?e\d+|\d+\.0", found)
    remedy = f"write {float(found):.0f}" if is_count else "see --help"  # 1e9 is a float
    if get_origin(kind) in (list, tuple) and not is_dataclass(get_args(kind)[0]):
        remedy = "write it as '[A, B]'"
    return f"{key} must be of type {_describe_type(kind)}, got {found}; {remedy}"


def _describe_parser_error(message: str, types: dict[str, Any]) -> str:
    """Turn jsonargparse's message into one of ours; `types` are those of `_field_types`."""
    message = " ".join(message.split()).removeprefix("Parser key ")
    noise = r"Problem with given class_path '.*?': | Subclass types expect one of.*"
    message = re.sub(noise, "", message)
    # "optim.steps": Expected a <class 'int'>. Got value: x
    key = ".".join(dict.fromkeys(re.findall(r'"([a-z_.]+)": ', message)))
    value = re.search(r".*(?:[vV]alue: |Unable to load config )(.*)", message)
    if key in types and value:
        return _wrong_type(key, types[key], value[1])
    # unrecognized arguments: --optim.lr=1; or Group 'optim' does not accept option 'lr'
    unknown = re.search(r"(?:unrecognized arguments: -*|[oO]ption ')([\w.-]+)", message)
    section = re.match(r"(?:Group '|\")(\w+)", message)  # in YAML it stands before the key
    word = ".".join(found[1] for found in (section, unknown) if found)
    endings = sorted((key for key in types if key.endswith(f".{word}")), key=len)  # run.name first
    similar = difflib.get_close_matches(word, types, n=1, cutoff=0.8) or endings
    # several values of a flag: a glob that the shell has expanded, or names without brackets
    is_value = re.match(r"unrecognized arguments: (?!-)", message)
    if similar and similar[0] != word and not is_value:
        dashes = "--" if message.startswith("unrecognized arguments: --") else ""
        return f"{message}; did you mean {dashes}{similar[0]}?"
    return f"{message}; {'quote globs, write a list as [A, B]' if is_value else 'see --help'}"


def _read_configs(files: Sequence[str]) -> dict[str, Any]:
    """Read YAML files and merge them key by key, also within `model.config`; later ones win."""
    settings: dict[str, Any] = {}
    for file in files:
        try:
            content = jsonargparse.get_loader("yaml")(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"config must be a file, got {file}; check the path") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            found = " ".join(str(error).split())
            raise InputError(f"{file} must be YAML in UTF-8, got {found}; correct it") from error
        if not isinstance(content, dict):
            rule = "must be a mapping of settings"
            raise InputError(f"{file} {rule}, got {content}; write SECTION: {{KEY: VALUE}}")
        _merge(settings, content)
    return settings


def _merge(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        earlier = settings.get(key)
        if isinstance(value, dict) and isinstance(earlier, dict):
            _merge(earlier, value)
        else:
            settings[key] = value
