"""Step 7 of the data path: the stages of a run as one data set of optimizer steps.

Each stage has its own sequence length, batch size or text, as in the six stages of the paper's
Chinese model. A run without stages is one stage.
"""

import bisect
import itertools
from typing import Any

from torch.utils.data import Dataset

from train.data import stateless_rng
from train.data.batching import StepDataset
from train.settings import PretrainSettings, stage_settings


def split_stages(settings: PretrainSettings) -> list[PretrainSettings]:
    """Return the settings of each stage, as those of a run without stages."""
    stages = [stage_settings(settings, index) for index in range(len(settings.stages))]
    return stages or [settings]


def stage_seed(seed: int, stage: int) -> int:
    """Derive the seed of a stage, so that stages on the same text differ in order and masks."""
    return seed if stage == 0 else int(stateless_rng.random_bits(seed, stage)) >> 1


class StagedDataset(Dataset):
    """Micro-batches of one process, by optimizer step of the run.

    Args:
        stages: Number of steps and data set of each stage. The number of the last stage may be
            None: it does not end.

    Attributes:
        total: Number of steps of all stages, or None.
        vocab: The tokenizer's ids.
    """

    def __init__(self, stages: list[tuple[int | None, StepDataset]]) -> None:
        self.stages = [dataset for _, dataset in stages]
        steps = [number for number, _ in stages]
        self.starts = [0, *itertools.accumulate(number or 0 for number in steps[:-1])]
        self.total = None if steps[-1] is None else self.starts[-1] + steps[-1]
        self.vocab = self.stages[0].vocab

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        """Return all micro-batches that this process computes in a step."""
        stage = bisect.bisect_right(self.starts, step) - 1
        return self.stages[stage][step - self.starts[stage]]
