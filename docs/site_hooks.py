"""Hooks of mkdocs: the pages of results/, reference pages made from the source, and links.

Links are written relative to the file on disk, so that they also work in a clone. A link to a page
of the site becomes a link of the site, one to another file of the repository its plain text.
"""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "84"  # width of help texts
PACKAGES = ("roformer", "train", "finetune")
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]*)(#[^)\s]*)?\)")


def modules(package: str) -> dict[str, Path]:
    """Source files of a package by module name, its `__init__` files first in their folder."""
    files = sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return dict(zip((name.removesuffix(".__init__") for name in names), files))


def package_page(package: str) -> str:
    """Reference page of a package: every module with its public names."""
    text = [f"# {package}\n"]
    for name, path in modules(package).items():
        if path.name != "__main__.py":
            text += [f"::: {name}", "    options:", "      heading_level: 2"]
            text += ["      show_root_full_path: true"]
        if path.name == "__init__.py":  # what it imports is shown in its own module
            text.append("      members: [use_for_auto_classes]")
        text.append("")
    return "\n".join(text)


def command_settings() -> dict[str, tuple[ModuleType, str]]:
    """Module and settings class of every command, by the way it is called."""
    found = {}
    for name, path in (item for package in PACKAGES[1:] for item in modules(package).items()):
        call = re.search(r"^    run_command\(\w+, (\w+)", path.read_text(encoding="utf-8"), re.M)
        if call:
            command = f"python -m {name.removesuffix('.__main__')}"
            found[command] = (importlib.import_module(name), call[1])
    return found


def help_text(module: ModuleType, settings: str) -> str:
    """What a command prints with `--help`."""
    command_line, printed = importlib.import_module("train.command_line"), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command_line.parse_settings(getattr(module, settings), ["--help"])
    text = re.sub(r"\x1b\[[\d;]*m|[\x00-\x09\x0b-\x1f]", "", printed.getvalue())
    return text.split("\n\n", 1)[1].strip()  # without the list of flags at its beginning


def command_line_page() -> str:
    """Every command with its flags."""
    text = ["# Command line\n"]
    text += ["Each flag is also a key of YAML: `--optim.steps` is `steps` in the section `optim`."]
    text += ["`train.pretrain`, `finetune.glue` and `finetune.grid` also start under"]
    text += ["`accelerate launch` and `torchrun`: `accelerate launch --quiet train/pretrain.py`.\n"]
    for command, (module, settings) in command_settings().items():
        text.append(f"## {command}\n\n```text\n{help_text(module, settings)}\n```\n")
    return "\n".join(text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of results/, the two Markdown files of the root, and the generated pages."""
    outside = [*(ROOT / "results").glob("*.md"), *(ROOT / "results").glob("*/README.md")]
    outside += [*(ROOT / "results").rglob("*.png"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    for path in sorted(set(outside)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    pages = {f"reference/{package}.md": package_page(package) for package in PACKAGES}
    pages["reference/command-line.md"] = command_line_page()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""
    if page.file.abs_src_path is None:  # a generated page
        return markdown
    folder, docs = Path(page.file.abs_src_path).parent, Path(config.docs_dir)

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath(folder / target))
        source = path / "README.md" if path.is_dir() else path
        name = source.relative_to(docs if docs in source.parents else ROOT).as_posix()
        if files.get_file_from_path(name):
            return f"{label}({os.path.relpath(name, Path(page.file.src_uri).parent)}{anchor})"
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: link to {target}, which does not exist")
        return label[1:-1]

    return LINK.sub(replace, markdown)
