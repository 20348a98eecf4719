"""Hooks of mkdocs: pages of results/, generated reference pages, links, and a completeness check.

Links are written relative to the file on disk, so that they also work in a clone. A link to a page
of the site becomes a link of the site, one to another file of the repository its plain text.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonargparse
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "84"  # width of help texts
PACKAGES = ("roformer", "train", "finetune")
GENERATED = {"reference/settings.md", "reference/command-line.md"} | {
    f"reference/{package}.md" for package in PACKAGES
}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]*)(#[^)\s]*)?\)")


def python_files(package: str) -> list[Path]:
    """Source files of a package, its `__init__` files first in their folder."""
    return sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name))


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def package_page(package: str) -> str:
    """Reference page of a package: every module with its public names."""
    text = [f"# {package}\n"]
    for path in python_files(package):
        if path.name == "__main__.py":
            continue
        text.append(f"## {module_name(path)}\n\n::: {module_name(path)}\n")
        text.append("    options:\n      show_root_heading: false\n")
        text.append("      show_root_toc_entry: false\n")
        if path.name == "__init__.py":
            text.append("      show_submodules: false\n")
            text.append("      members: [use_for_auto_classes]\n" if package == path.parent.name
                        == "roformer" else "      members: []\n")  # fmt: skip
    return (
        "\n".join(text)
        .replace("\n\n    options", "\n    options")
        .replace("\n\n      ", "\n      ")
    )


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Strings below the fields of a dataclass, by field, inherited ones included."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        for node, following in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                texts[node.target.id] = " ".join(following.value.value.split())  # type: ignore
    return texts


def settings_table(cls: type, prefix: str = "") -> str:
    """Key, type, default and meaning of every field of a settings dataclass."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    texts = attribute_docstrings(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            continue
        default: Any = "required"
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default}`"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()}`"
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        kind = re.sub(r"\w+(\.\w+)*\.", "", kind).replace("|", "or")
        rows.append(f"| `{prefix}{field.name}` | {kind} | {default} | {texts[field.name]} |")
    return "\n".join(rows) + "\n"


def settings_page() -> str:
    """Every setting of pretraining and of fine-tuning, from the dataclasses."""
    train, finetune = (importlib.import_module(f"{name}.settings") for name in PACKAGES[1:])
    text = [
        "# Settings\n",
        "Each key is a line of YAML or a flag: `optim.steps` is `--optim.steps`.",
    ]
    text.append("\n## Pretraining\n")
    text.append(settings_table(train.PretrainSettings))
    for field in dataclasses.fields(train.PretrainSettings):
        if dataclasses.is_dataclass(field.type):
            text.append(f"### {field.name}\n\n{field.type.__doc__}\n")
            text.append(settings_table(field.type, f"{field.name}."))  # type: ignore[arg-type]
    text.append(f"### stages\n\n{train.StageSettings.__doc__}\n")
    text.append(settings_table(train.StageSettings, "stages[i]."))
    text.append("## Fine-tuning: one run\n\n" + settings_table(finetune.GlueSettings))
    text.append("## Fine-tuning: a grid of runs\n\n" + settings_table(finetune.GridSettings))
    return "\n".join(text)


def command_settings() -> dict[str, tuple[ModuleType, str]]:
    """Module and settings class of every command, by the way it is called."""
    found = {}
    for path in [path for package in PACKAGES[1:] for path in python_files(package)]:
        calls = [
            node.value
            for top in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(top, ast.If) and "__name__" in ast.unparse(top.test)
            for node in ast.walk(top)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        for call in calls:
            if getattr(call.func, "id", "") == "run_command":
                name = module_name(path).removesuffix(".__main__")
                found[f"python -m {name}"] = (module_name(path), ast.unparse(call.args[1]))
    return {
        command: (importlib.import_module(name), settings)
        for command, (name, settings) in found.items()
    }


def help_text(module: ModuleType, settings: str) -> str:
    """What a command prints with `--help`."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        jsonargparse.auto_cli(getattr(module, settings), args=["--help"], as_positional=False)
    text = re.sub(r"\x1b\[[\d;]*m|[\x00-\x09\x0b-\x1f]", "", printed.getvalue())
    return text.split("\n\n", 1)[1].strip()  # without the list of flags at its beginning


def command_line_page() -> str:
    """Every command with its flags."""
    text = ["# Command line\n"]
    text += ["`train.pretrain`, `finetune.glue` and `finetune.grid` also start under"]
    text += ["`accelerate launch` and `torchrun`: `accelerate launch --quiet train/pretrain.py`.\n"]
    for command, (module, settings) in command_settings().items():
        text.append(f"## {command}\n\n```text\n{help_text(module, settings)}\n```\n")
    return "\n".join(text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of results/, the two Markdown files of the root, and the generated pages."""
    outside = [*(ROOT / "results").rglob("README.md"), *(ROOT / "results").glob("*.md")]
    outside += (ROOT / "results").rglob("*.png")
    paths = {path.relative_to(ROOT).as_posix() for path in outside if "model" not in path.parts}
    paths = {p for p in paths if not (ROOT / p).with_name("config.json").exists()}
    for path in sorted(paths | {"CHANGELOG.md", "CONTRIBUTING.md"}):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    pages = {f"reference/{package}.md": package_page(package) for package in PACKAGES}
    pages["reference/settings.md"] = settings_page()
    pages["reference/command-line.md"] = command_line_page()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""
    if page.file.src_uri in GENERATED:
        return markdown
    folder = Path(page.file.abs_src_path or "").parent

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath(folder / target))
        docs = Path(config.docs_dir)
        uri = (
            path.relative_to(docs) if docs in path.parents else path.relative_to(ROOT)
        ).as_posix()
        if path.is_dir():
            uri = f"{uri}/README.md"
        if uri in GENERATED or files.get_file_from_path(uri):
            here = Path(page.file.src_uri).parent
            return f"{label}({os.path.relpath(uri, here)}{anchor})"
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: link to {target}, which does not exist")
        return label[1:-1]

    return LINK.sub(replace, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Check that the reference shows every public function and class.

    Raises:
        PluginError: One is missing, because it has no docstring.
    """
    for package in PACKAGES:
        html = (Path(config.site_dir) / "reference" / f"{package}.html").read_text(encoding="utf-8")
        missing = [
            f"{module_name(path)}.{node.name}"
            for path in python_files(package)
            if path.name != "__main__.py"
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if f'id="{module_name(path)}.{node.name}"' not in html
        ]
        if missing:
            raise PluginError(f"not in the reference, add docstrings: {', '.join(missing)}")
