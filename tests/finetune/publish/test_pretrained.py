"""A finished run as a folder: half the bytes, the same predictions, a card of what was run."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from finetune.publish.pretrained import PublishSettings, main
from launched_runs import model_flag
from roformer import RoFormerForMaskedLM
from tiny import refused

RATE = "--optim.learning_rate=5e-3"


def test_the_folder_is_half_as_large_predicts_the_same_and_has_a_card(pretrain, tmp_path, capsys):
    finished = pretrain(RATE)
    config = finished / "model" / "config.json"
    changed = json.loads(config.read_text()) | {"attention_probs_dropout_prob": 0.25}
    config.write_text(json.dumps(changed))
    settings = PublishSettings(str(finished), str(tmp_path / "out/small"), "a tiny language", "mit")
    output = main(settings)
    assert re.search(r"out/small: .* MB", capsys.readouterr().out)
    before, after = (f / "model.safetensors" for f in (finished / "model", output))
    assert after.stat().st_size < 0.6 * before.stat().st_size
    assert before.stat().st_mode & after.stat().st_mode & 0o044 == 0o044  # others may read them
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        full = RoFormerForMaskedLM.from_pretrained(finished / "model").eval()(ids).logits
        for model_class in (RoFormerForMaskedLM, transformers.RoFormerForMaskedLM):
            model = model_class.from_pretrained(output)
            assert model.dtype == torch.bfloat16
            half = model.eval()(ids).logits.float()
            assert (half - full).abs().max() < 0.02 * full.abs().max()
    fill = transformers.pipeline("fill-mask", model=str(output))
    assert len(fill("the cat [MASK] the moon .")) == 5
    card = ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "fill-mask")
    assert card.data.language is None
    for fact in (
        "a tiny language", "of 2 layers and width 32", "| steps | 12 |", "| seed | 0 |",
        "learning_rate: 0.005", "dtype=torch.float32",
        f"{changed['hidden_dropout_prob']:g} and 0.25;",
    ):  # fmt: skip
        assert fact in card.text


@pytest.mark.parametrize(
    ("encoding", "loader"),
    [("rope", "roformer.RoFormerForCausalLM.from_pretrained"), ("alibi", "import roformer")],
)
def test_the_card_of_a_decoder_says_so_and_generates_text(
    encoding, loader, pretrain, tmp_path, monkeypatch, capsys
):
    run = pretrain(model_flag(is_decoder=True, position_encoding=encoding))
    monkeypatch.chdir(main(PublishSettings(str(run), str(tmp_path / "new"), "x")))
    text = Path("README.md").read_text()
    exec(re.search("```python\n(.*?)```", text, re.DOTALL)[1], {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("[CLS]")
    for fact in ("pipeline_tag: text-generation", "to predict the next token", loader):
        assert fact in text
    assert "held-out loss, next token" in text
    assert ("without a limit" in text) == (encoding == "rope")


def test_what_is_not_finished_or_goes_on_or_is_already_there_is_refused(pretrain, tmp_path):
    finished = pretrain(RATE)
    refused(lambda: PublishSettings(str(finished), str(tmp_path), "x"), "output must")
    more = [RATE, "--optim.steps=24", "--run.allow_drift=true"]
    pretrain(*more, "--run.max_hours=1e-9")
    settings = PublishSettings(str(finished), str(tmp_path / "new"), "x")
    refused(lambda: main(settings), "run must")  # its log is newer than the weights that were here
    pretrain(*more)
    assert "| steps | 24 |" in (main(settings) / "README.md").read_text()
    (finished / "settings.yaml").write_text("")
    torn = PublishSettings(str(finished), str(tmp_path / "torn"), "x")
    refused(lambda: main(torn), "settings.yaml must hold what the run wrote")
    (finished / "log.jsonl").write_text("")
    refused(lambda: main(torn), "run must", "an evaluation in log.jsonl")
    (finished / "model" / "tokenizer_config.json").unlink()
    for run in (finished, tmp_path):
        settings = PublishSettings(str(run), str(tmp_path / "other"), "x")
        refused(partial(main, settings), "run must", str(run))
    assert not (tmp_path / "other").exists()
