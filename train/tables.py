"""Markdown tables of all commands (pandas' own writer needs tabulate)."""

import re

import pandas as pd


def markdown_table(frame: pd.DataFrame) -> str:
    """Format a table of strings, first column to the left, padded to read well on a terminal."""
    rows = [list(map(str, frame.columns)), *frame.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = [
        [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))]
        for row in rows
    ]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))


def escape_cell(text: str) -> str:
    """Escape what Markdown would read as markup in a table of names and numbers."""
    return re.sub(r"([|*`]|<(?=\S))", r"\\\1", " ".join(text.split()))
