"""Rules of structure: imports, sizes, names of files, documentation of packages."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tiny import ROOT, command, name_of

PACKAGES = ("roformer", "train", "finetune")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TOP_LEVEL = {
    "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "LICENSE",
    "CITATION.cff", "mkdocs.yml", "docs", "roformer", "train", "finetune", "configs", "tests",
    "results", ".ci", ".gitignore",
}  # fmt: skip
COMMON = {"train.settings", "train.command_line", "train.atomic_dir"}
FIGURES = {"train.plotting", "train.tables", "train.intervals", "train.run_names"}
LAYERS = {
    "roformer": {"roformer"},
    "train.settings": set(),
    "train.command_line": {"train.settings"},
    "train.atomic_dir": {"train.settings"},
    "train.data": {*COMMON, "train.data"},
    "train.loop": {*COMMON, "roformer", "train.data", "train.loop"},
    "train.plotting": {"train.settings", "train.atomic_dir"},
    "train.tables": set(),
    "train.intervals": set(),
    "train.run_names": {"train.settings"},
    "train.analysis": {*COMMON, *FIGURES, "roformer", "train.data", "train.loop", "train.analysis"},
    "train.bench": {*COMMON, *FIGURES, "roformer", "train.data", "train.loop", "train.bench"},
    "train.pretrain": {*COMMON, "roformer", "train.data", "train.loop"},
    "finetune": {*COMMON, *FIGURES, "roformer", "train.data", "train.loop", "finetune"},
}
"""What each part of the source may import of the others."""
FILE_LIMIT, FUNCTION_LIMIT = 450, 40
LENGTHS = {
    "roformer/modeling_roformer.py": 900,
    "roformer/modeling_roformer.py: forward": 75,
    "train/pretrain.py: train": 70,
    "finetune/glue.py: fine_tune": 45,
}
"""Files, and bodies of functions, that may have more lines than the limits."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


def imported(path):
    """Absolute names of everything that a file imports, wherever the statement stands."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return names


def project_imports(path):
    return {item for item in imported(path) if item in MODULES} - {*PACKAGES, module_of(path)}


def layer(module):
    return max((part for part in LAYERS if f"{module}.".startswith(f"{part}.")), key=len)


def tracked():
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path):
    own = module_of(path)
    if own in {*PACKAGES} - {"roformer"}:
        return
    for module in project_imports(path):
        assert layer(module) in LAYERS[layer(own)], f"{own}: {module}"
    refused = {"pickle", "dill", "joblib"}
    if own.startswith("roformer"):
        refused |= {"train", "finetune", "datasets", "evaluate", "accelerate"}
    assert not {item.split(".")[0] for item in imported(path)} & refused


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["train"], *extras["glue"]]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    names = {name.split(".")[0] for path in FILES for name in imported(path)}
    providers = packages_distributions()
    for name in names.difference(PACKAGES, sys.stdlib_module_names):
        assert declared.intersection(map(canonicalize_name, providers[name])), name


def test_no_modules_import_each_other():
    graph = {module: project_imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_file_on_the_path_of_a_script_is_named_after_nothing_or_after_a_library():
    nothing = {"utils", "common", "helpers", "misc", "base", "core"}
    libraries = {"evaluate", "datasets", "tokenizers", "accelerate", "transformers", "torch"}
    # `accelerate launch train/pretrain.py` puts train/ on the path, and `data` hides nothing there
    on_path = {path.relative_to(ROOT).parts[1].removesuffix(".py") for path in FILES}
    assert not on_path & (libraries | sys.stdlib_module_names)
    assert not {path.stem for path in FILES} & nothing


def test_the_top_level_is_as_agreed():
    assert {path.parts[0] for path in tracked()} <= TOP_LEVEL


def test_folders_hold_at_most_14_files():
    parents = [p.parent for p in tracked() if p.suffix == ".py" and p.name != "__init__.py"]
    assert not {str(folder) for folder in parents if parents.count(folder) > 14}


def test_packages_say_what_belongs_in_them():
    for path in FILES:
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert len(text.splitlines()) >= 3, name_of(path)
            excludes = re.search(r"Not here:|does not:", text)
            assert path.parent == ROOT / "roformer" or excludes, name_of(path)


def test_importing_roformer_brings_no_training_library():
    # transformers' own RoFormer imports accelerate where it is installed
    code = """
import sys
top = lambda: {name.split(".")[0] for name in sys.modules}
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.models.roformer import modeling_roformer
before = top()
import roformer
added = top() - before - {"roformer"}
assert not added, added
"""
    command("-c", f"import os; os.chdir('/')\n{code}")


def test_private_names_of_torch_are_few_and_in_the_kernels():
    """However they are written: as attributes, in imports, or as texts for `getattr`."""
    sources = {path: path.read_text() for path in (ROOT / "roformer").rglob("*.py")}
    known = {"_attn_implementation"}  # transformers'
    for node in (node for text in sources.values() for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    private = re.compile(r"(?<![\w}])(?<!self\.)_[a-z]\w*")
    uses = {path: {*private.findall(text)} - known for path, text in sources.items()}
    assert {path.parent.name for path, found in uses.items() if found} == {"kernels"}, uses
    assert len(set().union(*uses.values())) <= 4, uses


def test_functions_and_files_are_short():
    long = []
    for path in FILES:
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > LENGTHS.get(name_of(path), FILE_LIMIT):
            long.append(f"{name_of(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if length > LENGTHS.get(f"{name_of(path)}: {node.name}", FUNCTION_LIMIT):
                    long.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert not long, "\n".join(long)


def test_the_reading_orders_follow_real_imports():
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    lists = re.findall(r"<!-- reading-order: (\S+) -->(.*?)<!-- end -->", text, re.DOTALL)
    assert len(lists) == 3
    for start, items in lists:
        order = re.findall(r"^\d+\. `([^`]+)`", items, re.MULTILINE)
        assert order[0] == start
        assert len(order) == len(set(order)) <= 10
        reached = {start}
        for file in order[1:]:
            wanted = {module_of(ROOT / file)}
            wanted |= {"roformer"} if file.startswith("roformer/") else set()
            importers = [f for f in reached if wanted & imported(ROOT / f)]
            assert importers, f"{file} is imported by none of the files before it"
            reached.add(file)
