"""The wheel: roformer/ alone, and enough by itself."""

import os
import subprocess
import tomllib
import venv
import zipfile
from importlib.metadata import distributions

import pytest
from packaging.specifiers import SpecifierSet

from tiny import ROOT, command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_every_installed_package_runs_on_the_oldest_python_that_is_promised():
    """On a later Python pip also takes versions that refuse 3.11.2, the Python of Debian 12."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    asked = {x.name: x.metadata.get("Requires-Python") or "" for x in distributions()}
    assert not {name: x for name, x in asked.items() if not SpecifierSet(x).contains(oldest)}


def test_the_wheel_holds_roformer_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"roformer", "roformer_rope"}
    assert "roformer/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_alone_in_an_empty_environment_loads_a_checkpoint(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "configs" / "constraints.txt")}
    install = [python, "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(install, check=True, env=environment)
    code = f"""
import importlib.util, torch, roformer
absent = ("train", "finetune", "datasets", "accelerate")
assert not any(importlib.util.find_spec(name) for name in absent)
config = roformer.RoFormerConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2,
                                 num_attention_heads=2, intermediate_size=64)
model = roformer.RoFormerForMaskedLM(config).eval()
model.save_pretrained({str(tmp_path / "model")!r})
loaded = roformer.RoFormerForMaskedLM.from_pretrained({str(tmp_path / "model")!r})
ids = torch.arange(20)[None]
assert torch.equal(model(ids).logits, loaded(ids).logits)
"""
    subprocess.run([python, "-I", "-c", code], check=True, cwd=tmp_path)
