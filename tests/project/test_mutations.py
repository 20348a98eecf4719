"""The fast tests notice the mistakes that rotary models are known for: each is made, in a copy."""

import re
import shutil

import pytest

from tiny import ROOT, command

MUTATIONS = {
    "query turned backwards": (
        "modeling_roformer.py", "query = self._rotate(query, position_embeddings)",
        "query = self._rotate(query, (position_embeddings[0], -position_embeddings[1]))",
    ),
    "no causal mask": (
        "attention_inputs.py", "    if config.is_decoder:\n        mask = create_causal_mask",
        "    if False:\n        mask = create_causal_mask",
    ),
    "half-split pairs": (
        "rotary.py", "    rotary_dim = 2 * cos.shape[-1]",
        "    interleave = False\n    rotary_dim = 2 * cos.shape[-1]",
    ),
    "angles in bfloat16": (
        "rotary.py",
        "angles = position_ids[..., None].to(_angle_dtype(position_ids.device)) * inv_freq",
        "angles = (position_ids[..., None] * inv_freq).to(torch.bfloat16)",
    ),
    "position_ids ignored": ("batch.py", "if position_ids is not None:\n", "if False:\n"),
    "factor on sine and cosine ignored": (
        "rotary.py", "angles.sin().to(dtype) * attention_scaling", "angles.sin().to(dtype)"
    ),
    "no dropout in attention": (
        "modeling_roformer.py", "self.dropout.p if self.dropout.training else 0.0", "0.0"
    ),
    "documents see each other": (
        "attention_inputs.py", "packed_sequence_mask_function(document_ids)",
        "packed_sequence_mask_function(torch.zeros_like(document_ids))",
    ),
    "rotation depends on the longest row": (
        "batch.py", "(last - first + 1).gather(1, ids)",
        "(last.amax() - first.amin() + 1).expand(ids.shape)",
    ),
}  # fmt: skip
TESTS = ["test_rotary.py", "test_modeling.py", "test_attention.py", "test_generation.py"]


def test_every_mistake_can_be_planted():
    for name, (file, right, _) in MUTATIONS.items():
        assert (ROOT / "roformer" / file).read_text().count(right) == 1, name


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_mistake_fails_a_fast_test(name, tmp_path):
    shutil.copytree(ROOT / "roformer", tmp_path / "roformer")
    if name is not None:
        file, right, wrong = MUTATIONS[name]
        path = tmp_path / "roformer" / file
        path.write_text(path.read_text().replace(right, wrong))
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    options += ["-k", "not flex and not auto_classes"]
    files = [ROOT / "tests" / "roformer" / file for file in TESTS]
    done = command("-P", "-m", "pytest", *options, *files, fails=None, PYTHONPATH=str(tmp_path))
    assert done.returncode == (name is not None), done.stdout
    assert name is None or re.search("AssertionError|assert ", done.stdout)
