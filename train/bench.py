"""A training step beside transformers' RoFormer and BERT: `python -m train.bench`.

All peers run in one process, in turns, on one batch: AdamW, masked-LM loss at 15 %, no padding.
What counts are the ratios between neighbours in a round; absolute times are this machine's.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import roformer
from train.launch import run_command
from train.objective import MaskedLanguageModel
from train.optim import adamw
from train.settings import require

Step = Callable[[], None]
SIZES = {
    "small": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
              "intermediate_size": 1024, "vocab_size": 30522},
    "base": {"vocab_size": 30522},
}  # fmt: skip


@dataclass(frozen=True)
class BenchSettings:
    """Time a masked-LM training step against peers of equal size."""

    size: str = "small"
    """small (4 x 256) or base (12 x 768), with a vocabulary of 30,522."""
    batch: int = 8
    """Sequences a step."""
    length: int = 512
    """Tokens a sequence."""
    rounds: int = 7
    """Times every peer has its turn, after one that does not count."""
    dropout: float = 0.1
    """Dropout of all peers."""
    output: str = "results/bench-cpu.json"
    """File for the numbers."""


def peers(settings: BenchSettings, bf16: bool) -> dict[str, Step]:
    """One training step of each peer, as a function to be timed."""
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    fields = SIZES[settings.size] | dict.fromkeys(dropouts, settings.dropout)
    ids = torch.randint(5, 30522, (settings.batch, settings.length))
    chosen = torch.rand(ids.shape) < 0.15
    labels = ids.masked_fill(~chosen, -100)
    mask = torch.ones_like(ids)
    # eager is this project's choice in bf16 on a CPU, see configs/model
    ours = roformer.RoFormerForMaskedLM._from_config(
        roformer.RoFormerConfig(**fields), attn_implementation="eager" if bf16 else "sdpa"
    )
    sparse = MaskedLanguageModel(ours)
    places, targets = chosen.flatten().nonzero().flatten(), ids[chosen]
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**fields))
    bert = transformers.BertForMaskedLM._from_config(
        transformers.BertConfig(**fields), attn_implementation="sdpa"
    )
    losses = {
        "this RoFormer": (
            sparse,
            lambda: sparse(ids, places, targets, attention_mask=mask)[0] / len(targets),
        ),
        "transformers RoFormer": (stock, lambda: stock(ids, mask, labels=labels).loss),
        "transformers BERT (sdpa)": (bert, lambda: bert(ids, mask, labels=labels).loss),
    }
    return {name: training_step(model, loss, bf16) for name, (model, loss) in losses.items()}


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor], bf16: bool) -> Step:
    """Forward, backward and AdamW."""
    optimizer = adamw(model.train(), 1e-4, 0.01)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, taken in turns; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def main(settings: BenchSettings) -> None:
    """Measure in float32 and bfloat16, print a table, write the numbers."""
    known = settings.size in SIZES
    require(known, "size", f"must be one of {', '.join(SIZES)}", settings.size, "take small")
    tokens = settings.batch * settings.length
    rows, numbers = [], {}
    for precision in ("fp32", "bf16"):
        seconds = measure(peers(settings, precision == "bf16"), settings.rounds)
        numbers[precision] = seconds
        mine = seconds["this RoFormer"]
        for name, values in seconds.items():
            ratios = sorted(theirs / ours for theirs, ours in zip(values, mine))
            rows.append(
                f"| {precision} | {name} | {tokens / statistics.median(values):,.0f} "
                f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )
    table = [
        "| precision | model | tokens/s | our speed-up (range of rounds) |",
        "|---|---|---:|---:|",
    ]
    print("\n".join(table + rows))
    about = {
        "settings": vars(settings),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    about["transformers"] = transformers.__version__
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(about | {"seconds": numbers}, indent=1) + "\n")
    output.with_suffix(".md").write_text("\n".join(table + rows) + "\n")


if __name__ == "__main__":
    run_command(main, BenchSettings)
