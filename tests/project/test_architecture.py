"""Rules of taste and safety, held by a test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import ROOT

FILES = sorted(p for part in ("roformer", "train", "finetune") for p in (ROOT / part).rglob("*.py"))
TOP_LEVEL = {
    "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "LICENSE",
    "CITATION.cff", "mkdocs.yml", "docs", "roformer", "train", "finetune", "configs", "tests",
    "results", ".ci", ".gitignore",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """First part of every absolute import, wherever it stands in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    named = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return {name.split(".")[0] for name in plain | named}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    refused = {
        "roformer": {"train", "finetune", "roformer", "datasets", "evaluate", "accelerate"},
        "train": {"finetune", "evaluate"},
        "finetune": set(),
    }
    assert not imports(path) & refused[path.relative_to(ROOT).parts[0]]
    assert not imports(path) & {"pickle", "dill", "joblib"}


def test_no_file_on_the_path_of_a_script_is_named_after_nothing_or_after_a_library():
    nothing = {"utils", "common", "helpers", "misc", "base", "core"}
    libraries = {"evaluate", "datasets", "tokenizers", "accelerate", "transformers", "torch"}
    # `accelerate launch train/pretrain.py` puts train/ on the path, and `data` hides nothing there
    on_path = {path.relative_to(ROOT).parts[1].removesuffix(".py") for path in FILES}
    assert not on_path & (libraries | sys.stdlib_module_names)
    assert not {path.stem for path in FILES} & nothing


def test_the_top_level_is_as_agreed():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.split("/")[0] for name in listed} <= TOP_LEVEL


def test_importing_roformer_brings_no_training_library():
    # what transformers' own RoFormer brings along (accelerate, where it is installed) is not ours
    code = """
import sys
def top():
    return {name.split(".")[0] for name in sys.modules}
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.models.roformer import modeling_roformer
before = top()
import roformer
added = top() - before - {"roformer"}
assert not added, added
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr


def test_functions_are_short_and_public_ones_documented():
    for path in FILES:
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (n for scope in (tree, *classes) for n in scope.body):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert length <= 62, f"{path.name}: {node.name} has {length} lines"
                assert node.name.startswith("_") or ast.get_docstring(node), f"{path}: {node.name}"
