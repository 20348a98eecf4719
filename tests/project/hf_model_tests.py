"""transformers' own tests of a model, run over ours: `make test-hf`.

The tests come from transformers' source distribution, which the target unpacks and puts on the path
as `transformers_tests`. What is ours is the small model and the inputs they are given, and the rule
that too few tests passed is a failure: what does not apply is skipped, and a skip proves nothing.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import sys
import types
import unittest
from collections import defaultdict
from typing import Any

import pytest

import roformer


def _stand_in(module: str, name: str) -> None:
    """An empty mixin where the common tests import one that the distribution leaves out."""
    path = f"transformers_tests.{module}"
    sys.modules[path] = types.ModuleType(path)
    setattr(sys.modules[path], name, type(name, (), {}))


_stand_in("exporters.test_export", "ExportTesterMixin")
_stand_in("generation.test_utils", "GenerationTesterMixin")

from transformers_tests.test_modeling_common import (  # noqa: E402
    ModelTesterMixin,
    ids_tensor,
    random_attention_mask,
)

LEAST_PASSED = 104


class SmallModel:
    """What the mixin asks of a model: a configuration, inputs, and the sizes of both."""

    # they differ from each other, so that no axis can stand in for another unnoticed
    batch_size = 13
    seq_length = 7
    num_choices = 3
    vocab_size = 99
    type_vocab_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    is_training = True  # the mixin trains it, too

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def get_config(self) -> roformer.RoFormerConfig:
        names = ("vocab_size", "type_vocab_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in (*names, "hidden_size")}
        return roformer.RoFormerConfig(
            **sizes, intermediate_size=37, max_position_embeddings=512, **self.fields
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[roformer.RoFormerConfig, dict]:
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, self.type_vocab_size),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs


class RoFormerTest(ModelTesterMixin):
    """What the three below share; no TestCase itself, so that it is not collected."""

    all_model_classes = (
        roformer.RoFormerModel,
        *(getattr(roformer, name) for name in roformer.__all__ if name.startswith("RoFormerFor")),
    )

    test_sdpa_can_dispatch_non_composite_models = None
    """Expects sdpa by default; here the default is `auto` (tests/roformer/kernels)."""
    test_can_init_all_missing_weights_before_2023 = True  # the year is read from a copyright line
    all_generative_model_classes = ()  # the distribution holds no tests of `generate`

    @classmethod
    def setUpClass(cls) -> None:
        roformer.use_for_auto_classes()


class EncoderTest(RoFormerTest, unittest.TestCase):
    """Attention to both sides, as the paper pretrains it."""

    model_tester = SmallModel()


class DecoderTest(RoFormerTest, unittest.TestCase):
    """Attention to earlier tokens, half of every head turned."""

    model_tester = SmallModel(is_decoder=True, rope_parameters={"partial_rotary_factor": 0.5})

    def test_model_rope_scaling_from_config_1_dynamic(self) -> None:
        # refused with a cache, whose keys were turned for a shorter row
        self.model_tester = SmallModel(**self.model_tester.fields, use_cache=False)
        super().test_model_rope_scaling_from_config_1_dynamic()


class PlusTest(RoFormerTest, unittest.TestCase):
    """What stock cannot express, saved as `roformer_plus`, and embeddings of another width."""

    model_tester = SmallModel(
        use_bias=False, norm_type="rms_norm", rope_interleave=False, embedding_size=24
    )


class AtLeast:
    """Fails a run in which few tests passed from end to end, without a skipped part."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = defaultdict(set)  # of set-up, parts, call, tear-down

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes[report.nodeid].add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed = sum(found == {"passed"} for found in self.outcomes.values())
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\n{passed} tests passed whole, at least {LEAST_PASSED} must")
        if passed < LEAST_PASSED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


if __name__ == "__main__":
    options = [
        *("-o", "addopts="),  # their marks are registered elsewhere
        *("-o", "filterwarnings=ignore"),
        *("-k", "not _features_"),  # of images, audio and video: a model without them passes
    ]
    sys.exit(pytest.main([__file__, *options, *sys.argv[1:]], plugins=[AtLeast()]))
