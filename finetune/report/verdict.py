"""Whether a pair's table counts: models that learned nothing cannot be compared.

Both pretrained models must stand above their own random weights by more than the spread over seeds
on three tasks that ask different things: one sentence's feeling, its grammar, and how alike two
are.
"""

import numpy as np

from finetune.report.cells import Cell, Row
from finetune.report.differences import Difference
from finetune.report.tables import Table

TASKS_THAT_COUNT = ("sst2", "cola", "stsb")


def verdicts(table: Table) -> list[str]:
    """Of a table with a pair and one of the tasks: whether each difference counts, or why not."""
    if not table.pairs or not set(TASKS_THAT_COUNT) & table.labels.keys():
        return []
    found = [_verdict(pair, table) for pair in table.pairs if _controls(pair, table)]
    missing = "Whether this counts cannot be said: no random weights beside both models."
    return found or [missing]


def _controls(pair: Difference, table: Table) -> list[tuple[Row, Row]]:
    """(Pretrained, random) of both sides, or nothing."""
    controls = {difference.first.name: difference.second for difference in table.controls}
    sides = [(row, controls[row.name]) for row in (pair.first, pair.second) if row.name in controls]
    return sides if len(sides) == 2 else []


def _verdict(pair: Difference, table: Table) -> str:
    parts = [(part, _controls(part, table)) for part in pair.over or (pair,)]
    doubts = [f"{part.title}: no random weights beside both" for part, x in parts if not x]
    for row, control in (x for _, found in parts for x in found):
        for label in TASKS_THAT_COUNT:
            cells = row.cells.get(label), control.cells.get(label)
            doubt = _doubt(*cells)
            doubts += [f"{row.short}, {table.labels.get(label, label)}: {doubt}"] * bool(doubt)
    if doubts:
        return f"{pair.title} does not count yet: {'; '.join(doubts)}."
    names = "; ".join(table.labels[label] for label in TASKS_THAT_COUNT)
    return (
        f"{pair.title} counts: both models stand above their random weights by more than the "
        f"larger sample standard deviation over seeds on {names}."
    )


def _doubt(cell: Cell | None, control: Cell | None) -> str:
    """Why the pretrained model is not above its control; empty if it is."""
    if cell is None or control is None:
        return "not run" if cell is None else "no control"
    scores = [np.array(list(x.headlines.values())) for x in (cell, control)]
    if any(len(x) == 0 for x in scores):
        return "no run has a score"
    spreads = [float(x.std(ddof=1)) for x in scores if len(x) > 1]
    if not spreads:
        return "one seed, so the spread is not known"
    gain, spread = float(scores[0].mean() - scores[1].mean()), max(spreads)
    return "" if gain > spread else f"{gain:+.1f} over random weights, spread {spread:.1f}"
