"""The stages of a run as one sequence of steps: a length, a batch and a text, then others.

The paper's Chinese model went through six such stages. A run without stages is one stage.
"""

import bisect
import itertools
from typing import Any

from torch.utils.data import Dataset

from train.data import stateless_rng
from train.data.batching import StepDataset
from train.settings import PretrainSettings, stage_settings


def split_stages(settings: PretrainSettings) -> list[PretrainSettings]:
    """The settings of each stage, as of a run of its own; stages after the first draw anew."""
    stages = [stage_settings(settings, number) for number in range(len(settings.stages))]
    return stages or [settings]


def stage_seed(seed: int, stage: int) -> int:
    """The seed of a stage: another order and other masks than the stage before on the same text."""
    return seed if stage == 0 else int(stateless_rng.random_bits(seed, stage)) >> 1


class StagedDataset(Dataset):
    """The micro-batches of one process, by optimiser step of the run.

    Args:
        parts: Of each stage its number of steps, and its steps. The last one's number may be None:
            it goes on for ever.
    """

    def __init__(self, parts: list[tuple[int | None, StepDataset]]) -> None:
        self.stages = [steps for _, steps in parts]
        self.ends = list(itertools.accumulate(number or 0 for number, _ in parts[:-1]))
        last = parts[-1][0]
        self.total = None if last is None else (self.ends or [0])[-1] + last
        self.vocab = self.stages[0].vocab

    def locate(self, step: int) -> tuple[StepDataset, int]:
        """The stage of a step, and the number of the step within it."""
        stage = bisect.bisect_right(self.ends, step)
        return self.stages[stage], step - ([0, *self.ends][stage])

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        """All micro-batches this process computes in that step."""
        steps, inside = self.locate(step)
        return steps[inside]

    def sequences(self, step: int, rank: int, micro_batch: int) -> list[int]:
        """Numbers of the sequences in a micro-batch of any process, to name it in a warning."""
        steps, inside = self.locate(step)
        return steps.micro_batch_indices(inside, rank)[micro_batch][0].tolist()
