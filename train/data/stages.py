"""The stages of a run as one sequence of steps: a length, a batch and a text, then others.

The paper's Chinese model went through six such stages. A run without stages is one stage.
"""

import bisect
import itertools
from typing import Any

from torch.utils.data import Dataset

from train.data import stateless_rng
from train.data.batching import Steps
from train.settings import PretrainSettings, stage_settings


def stages_of(settings: PretrainSettings) -> list[PretrainSettings]:
    """The settings of each stage, as of a run of its own; stages after the first draw anew."""
    stages = [stage_settings(settings, number) for number in range(len(settings.stages))]
    return stages or [settings]


def seed_of(seed: int, stage: int) -> int:
    """The seed of a stage: another order and other masks than the stage before on the same text."""
    return seed if stage == 0 else int(stateless_rng.bits(seed, stage)) >> 1


class Stages(Dataset):
    """The micro-batches of one process, by optimiser step of the run.

    Args:
        parts: Of each stage its number of steps, and its steps. The last one's number may be None:
            it goes on for ever.
    """

    def __init__(self, parts: list[tuple[int | None, Steps]]) -> None:
        self.parts = [steps for _, steps in parts]
        self.ends = list(itertools.accumulate(number or 0 for number, _ in parts[:-1]))
        last = parts[-1][0]
        self.total = None if last is None else (self.ends or [0])[-1] + last
        self.special = self.parts[0].special

    def find(self, step: int) -> tuple[Steps, int]:
        """The stage of a step, and the number of the step within it."""
        stage = bisect.bisect_right(self.ends, step)
        return self.parts[stage], step - ([0, *self.ends][stage])

    def __getitem__(self, step: int) -> list[dict[str, Any]]:
        """All micro-batches this process computes in that step."""
        steps, inside = self.find(step)
        return steps[inside]

    def sequences(self, step: int, rank: int, micro_batch: int) -> list[int]:
        """Numbers of the sequences in a micro-batch of any process, to name it in a warning."""
        steps, inside = self.find(step)
        return steps.shares(inside, rank)[micro_batch][0].tolist()
