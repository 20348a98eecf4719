"""The pretraining command as its user starts it: processes, kills, errors, and that it learns."""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
import yaml
from accelerate import tracking
from accelerate.utils import LoggerType
from safetensors.torch import load_file

import roformer
from launched_runs import LAUNCH, NO_DROPOUT, SCRIPT, TORCHRUN
from launched_runs import run_in_process as run
from tiny import ROOT, TINY_MODEL, command, log_rows
from train import pretrain
from train.command_line import parse_settings
from train.data import stateless_rng, vocabulary
from train.data.corpus import tokenize_corpus
from train.loop import memory
from train.loop.evaluate import EvaluateSettings, evaluate
from train.loop.evaluate import main as validate
from train.loop.loader import raise_open_file_limit
from train.loop.model_init import build_config, build_model
from train.pretrain import main
from train.settings import OPTIMIZERS, InputError, ModelSettings, PretrainSettings


def test_the_launched_command_leaves_all_it_promises(pretrain_flags, tmp_path):
    # as scripts of clusters export for all that they start
    address = {"MASTER_ADDR": "10.0.0.1"}
    flags = [*pretrain_flags, "--run.tracker=tensorboard", "--run.peak_tflops=null"]
    done = command(*LAUNCH, SCRIPT, *flags, **address)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    assert "tokens/s" in done.stderr  # the progress bar
    assert set(log_rows(folder)) == set(range(1, 13))
    assert set(log_rows(folder, "validation_loss")) == {6, 12}
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["precision"] == "bf16"
    assert list((folder / "tracker").glob("events*"))
    (told,) = (folder / "tracker").rglob("hparams.yml")
    told = yaml.safe_load(told.read_text())
    assert told["optim.steps"] == 12
    assert told["model.config.hidden_size"] == 32
    assert told["optim.betas"] == "[0.9, 0.98]"
    assert "run.max_hours" not in told  # which is not set
    assert len(list((folder / "checkpoints").iterdir())) == 2
    model = roformer.RoFormerForMaskedLM.from_pretrained(folder / "model")
    stock = transformers.AutoModelForMaskedLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    inputs = tokenizer("the cat [MASK] the moon .", return_tensors="pt")
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rope", "made_for"), [("default", 32), ("dynamic", 16)])
def test_a_model_says_that_it_is_made_for_what_it_was_trained_on(
    rope, made_for, pretrain_flags, tmp_path
):
    changes = {"max_position_embeddings": 16, "rope_parameters": {"rope_type": rope, "factor": 2.0}}
    if rope == "default":
        changes["rope_parameters"].pop("factor")
    model = f"--model.config={json.dumps(TINY_MODEL | changes)}"
    run(pretrain_flags, model)
    folder = tmp_path / "runs" / "tiny" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = roformer.RoFormerConfig.from_pretrained(folder)
    assert tokenizer.model_max_length == config.max_position_embeddings == made_for
    if rope == "default":
        stock = transformers.RoFormerForMaskedLM.from_pretrained(folder)
        assert stock(torch.full((1, 32), 5)).logits.isfinite().all()


def test_other_trackers_get_the_folder_of_the_runs_for_a_project(pretrain_flags, monkeypatch):
    asked = []

    class Remembering(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only = "remembering", False, True

        def __init__(self, run_name, **options):
            super().__init__()
            asked.append(run_name)

        tracker = property(lambda self: self)

        def store_init_configuration(self, values):
            asked.append(values["run.name"])

        def log(self, values, step):
            asked.append(step)

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Remembering)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    run(pretrain_flags, "--run.tracker=wandb", "--optim.steps=3")
    assert asked[:3] == ["runs", "tiny", 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_goes_on_bit_for_bit_with_dropout(optimizer, pretrain_flags, tmp_path):
    flags = [
        *pretrain_flags,
        f"--optim.name={optimizer}",
        "--optim.steps=40",
        "--run.save_every=3",
        "--optim.micro_batch=8",
        "--run.log_every=2",
    ]
    whole = run(flags, "--run.name=whole")
    assert whole.model.config == TINY_MODEL  # which leaves dropout at its default of 0.1
    folder = tmp_path / "runs" / "tiny"
    arguments = [sys.executable, *LAUNCH[:2], SCRIPT, *flags]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as many as here: sums round alike
    victim = subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True, **quiet)
    while not (folder / "checkpoints" / "step-00000009").exists():
        assert victim.poll() is None
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    reached = max(log_rows(folder))
    assert reached < 40
    run(flags)
    losses = [log_rows(tmp_path / "runs" / name) for name in ("whole", "tiny")]
    assert losses[0] == losses[1]
    weights = [(tmp_path / "runs" / n / "model" / "model.safetensors") for n in ("whole", "tiny")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("kind", "micro_batch"), [("roformer", 4), pytest.param("bert", 8, marks=pytest.mark.slow)]
)
def test_two_processes_give_the_losses_of_one(kind, micro_batch, pretrain_flags, tmp_path):
    flags = [*pretrain_flags, f"--model.config={NO_DROPOUT}", f"--model.type={kind}"]
    flags += ["--run.validation_sequences=12"]  # three batches of 4: one process has none at last
    run(flags, "--run.name=one")
    run(flags, "--run.name=accumulated", "--optim.micro_batch=4")
    more = ("--run.name=two", f"--optim.micro_batch={micro_batch}")
    done = command(*TORCHRUN, SCRIPT, *flags, *more, ACCELERATE_USE_CPU="1")
    assert done.returncode == 0, done.stderr
    keys = ("loss", "accuracy", "tokens", "validation_loss", "validation_tokens", "gradient_norm")
    for key in keys:
        one = list(log_rows(tmp_path / "runs" / "one", key).values())
        for name in ("accumulated", "two"):
            other = list(log_rows(tmp_path / "runs" / name, key).values())
            np.testing.assert_allclose(other, one, rtol=1e-5 if key == "gradient_norm" else 1e-6)
    environment = json.loads((tmp_path / "runs" / "two" / "environment.json").read_text())
    assert environment["processes"] == 2


def test_bert_gets_the_batches_of_roformer(pretrain_flags, monkeypatch):
    batches: list[dict] = []
    send = pretrain.send_to_device
    monkeypatch.setattr(
        pretrain, "send_to_device", lambda *args, **kw: batches.append(args[0]) or send(*args, **kw)
    )
    for kind in ("roformer", "bert"):
        run(pretrain_flags, f"--model.type={kind}", f"--run.name={kind}", "--optim.micro_batch=4")
    half = len(batches) // 2
    assert half == 12 * 4
    for one, other in zip(batches[:half], batches[half:]):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one(pretrain_flags, tmp_path):
    flags = [*pretrain_flags, f"--model.config={NO_DROPOUT}", "--optim.micro_batch=8"]
    run(flags, "--run.name=one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = (*TORCHRUN[:2], "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1")
    machines = [
        subprocess.Popen(
            [sys.executable, *launch, f"--master_port={port}", f"--node_rank={n}", SCRIPT, *flags],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for n in range(2)
    ]  # fmt: skip
    assert [machine.wait(300) for machine in machines] == [0, 0]
    for key in ("loss", "tokens", "validation_loss"):
        one, two = (
            list(log_rows(tmp_path / "runs" / name, key).values()) for name in ("one", "tiny")
        )
        np.testing.assert_allclose(two, one, rtol=1e-6)


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_tiny_language_is_learned_far_below_its_unigram_entropy(kind, pretrain_flags, tmp_path):
    topics = [" ".join(f"{letter}{i}" for i in range(8)) for letter in "abcdef"]
    for part, number, repeats in (("train", 40, 3), ("validation", 4, 2)):
        lines = (json.dumps({"text": f"{topic} " * repeats}) + "\n" for topic in topics * number)
        (tmp_path / f"{part}.jsonl").write_text("".join(lines))
    words = sorted(set(" ".join(topics).split()))
    vocabulary.save_tokenizer([*vocabulary.SPECIAL_TOKENS, *words], tmp_path / "words")
    settings = run(
        pretrain_flags, f"--model.type={kind}", "--optim.steps=150", "--run.log_every=25",
        "--optim.learning_rate=5e-3", "--run.validate_every=150",
        f"--corpus.tokenizer={tmp_path / 'words'}",
        f"--corpus.train={tmp_path / 'train.jsonl'}",
        f"--corpus.validation={tmp_path / 'validation.jsonl'}",
    )  # fmt: skip
    store = tokenize_corpus(
        settings.corpus, "validation", vocabulary.load_tokenizer(str(tmp_path / "words"))
    )
    counts = np.array(list(Counter(store.read(0, store.document_ends[-1]).tolist()).values()))
    shares = counts / counts.sum()
    entropy = -(shares * np.log(shares)).sum()
    loss = log_rows(tmp_path / "runs" / "tiny", "validation_loss")[150]
    assert loss < 0.7 * entropy
    assert log_rows(tmp_path / "runs" / "tiny")[25] > loss


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_saved_model_has_the_loss_of_the_log_and_reads_a_second_text_like_the_first(
    kind, pretrain_flags, tmp_path, capsys
):
    settings = run(pretrain_flags, f"--model.type={kind}")
    folder = tmp_path / "runs" / "tiny"
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder / "model").eval()
    ids = torch.arange(5, 21)[None]
    first, second = (model(ids, token_type_ids=torch.full_like(ids, t)).logits for t in (0, 1))
    assert torch.equal(first, second)  # though no second text was shown
    found = validate(EvaluateSettings(str(folder / "model"), settings.corpus, 32))
    assert found["validation_loss"] == pytest.approx(log_rows(folder, "validation_loss")[12])
    if kind == "roformer":  # at any length
        longer = validate(EvaluateSettings(str(folder / "model"), settings.corpus, length=300))
        assert math.isfinite(longer["validation_loss"])
        printed = capsys.readouterr()
        assert json.loads(printed.out.splitlines()[-1])["length"] == 300
        assert "warning: corpus.validation has" in printed.err
        with pytest.raises(InputError, match="model must be .* of a run is in its folder model$"):
            validate(EvaluateSettings(str(folder), settings.corpus))


@pytest.mark.parametrize("kind", ["RoFormer", "Bert"])
def test_the_loop_is_the_textbooks_with_transformers_own_model(
    kind, pretrain_flags, tokenizer, tmp_path, monkeypatch
):
    """Loss over micro-batches, clipping, decay and schedule: losses, and weights at the end."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), **TINY_MODEL, **still
    )
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    model.save_pretrained(tmp_path / "stock")
    seen, reduce = [], pretrain.all_reduce_step_info
    monkeypatch.setattr(
        pretrain, "all_reduce_step_info", lambda x, *rest: seen.append(x) or reduce(x, *rest)
    )
    flags = [f"--model.type={kind.lower()}", f"--model.init={tmp_path / 'stock'}"]
    flags += ["--model.config={}", "--optim.micro_batch=4", "--optim.clip_norm=0.5"]
    settings = run(pretrain_flags, *flags).optim
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay},
         {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon,
    )  # fmt: skip
    losses = []
    for step, micro_batches in enumerate(seen, start=1):
        falling = (13 - step) / (13 - settings.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(step / settings.warmup_steps, falling)
        total = sum(len(batch["labels"]) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            scores = model.train()(**inputs).logits.flatten(0, 1)[batch["label_positions"]]
            part = torch.nn.functional.cross_entropy(scores, batch["labels"], reduction="sum")
            (part / total).backward()
            loss += part.item() / total
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    assert len(seen) == 12
    assert len(seen[0]) == 4
    found = log_rows(tmp_path / "runs" / "tiny")
    np.testing.assert_allclose([found[step] for step in range(1, 13)], losses, atol=1e-5)
    trained = load_file(tmp_path / "runs" / "tiny" / "model" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], weight, atol=2e-5, rtol=1e-4)


def test_pretraining_continues_from_a_saved_folder(pretrain_flags, tmp_path):
    run(pretrain_flags)
    first = log_rows(tmp_path / "runs" / "tiny")
    init = f"--model.init={tmp_path / 'runs' / 'tiny' / 'model'}"
    run(pretrain_flags, init, "--run.name=more", f"--model.config={NO_DROPOUT}")
    assert log_rows(tmp_path / "runs" / "more")[1] < first[1] - 0.1
    config = json.loads((tmp_path / "runs" / "more" / "model" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == 0.0
    run(pretrain_flags, init, "--run.name=dropped", "--model.config={}")  # 0.1, as it was saved
    losses = [log_rows(tmp_path / "runs" / name)[1] for name in ("more", "dropped")]
    assert losses[0] != losses[1]  # dropped from the first step on
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    run(pretrain_flags, init, "--run.name=longer", f"--model.config={json.dumps(rope)}")
    config = json.loads((tmp_path / "runs" / "longer" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 2.0
    other = '{"position_encoding": "transformer_xl"}'
    run(pretrain_flags, init, "--run.name=other", f"--model.config={other}")
    assert log_rows(tmp_path / "runs" / "other")[1] < first[1] - 0.1  # all else is the checkpoint's
    config = json.loads((tmp_path / "runs" / "other" / "model" / "config.json").read_text())
    assert (config["model_type"], config["position_encoding"]) == (
        "roformer_plus",
        "transformer_xl",
    )
    for wrong, message in (
        ('{"hidden_size": 64}', "model.config.hidden_size must stay 32 of model.init, got 64"),
        ('{"hiden_size": 64}', "model.config must be a field of the roformer configuration"),
    ):
        with pytest.raises(InputError, match=message):
            run(pretrain_flags, init, "--run.name=wrong", f"--model.config={wrong}")


def test_the_angles_of_a_checkpoint_stay_where_none_are_said(tmp_path):
    rope = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    roformer.RoFormerConfig(**TINY_MODEL, vocab_size=50, rope_parameters=rope).save_pretrained(
        tmp_path
    )
    for given in ({}, {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 300.0}):
        settings = ModelSettings(init=str(tmp_path), config={"rope_parameters": given})
        found = build_config(settings, 8).rope_parameters
        assert found == {"rope_type": "default"} | rope | given


def test_another_vocabulary_than_the_weights_is_refused(pretrain_flags, tmp_path, tokenizer):
    run(pretrain_flags)
    init = f"--model.init={tmp_path / 'runs' / 'tiny' / 'model'}"
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary.save_tokenizer([*pieces[:-2], pieces[-1], pieces[-2]], tmp_path / "swapped")
    with pytest.raises(InputError, match="corpus.tokenizer must fit the model's vocabulary"):
        run(pretrain_flags, init, "--run.name=x", f"--corpus.tokenizer={tmp_path / 'swapped'}")


def test_berts_weights_start_a_roformer_without_its_positions(tmp_path, tokenizer):
    config = transformers.BertConfig(vocab_size=len(tokenizer), **TINY_MODEL)
    bert = transformers.BertForMaskedLM(config)
    bert.save_pretrained(tmp_path)
    roformer.use_for_auto_classes()
    settings = ModelSettings(init=str(tmp_path))
    model = build_model(settings, build_config(settings, 500, tokenizer), seed=0)
    assert isinstance(model, roformer.RoFormerForMaskedLM)
    theirs = bert.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name.replace("roformer.", "bert.")]), name
    # with its positions silenced a one-token BERT computes the same: nothing to rotate against
    with torch.no_grad():
        bert.bert.embeddings.position_embeddings.weight.zero_()
        ids = torch.tensor([[7]])
        torch.testing.assert_close(model.eval()(ids).logits, bert.eval()(ids).logits)


def test_a_run_opens_no_socket_and_is_left_as_it_is_once_finished(
    pretrain_flags, tmp_path, monkeypatch
):
    def refuse(*arguments, **keywords):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    run(pretrain_flags)
    model = tmp_path / "runs" / "tiny" / "model" / "model.safetensors"
    before, log = model.read_bytes(), (tmp_path / "runs" / "tiny" / "log.jsonl").read_text()
    run(pretrain_flags)
    assert model.read_bytes() == before
    assert (tmp_path / "runs" / "tiny" / "log.jsonl").read_text() == log


BERT = "--model.type=bert"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [BERT, "--corpus.length=128"],
            "corpus.length must be at most the 64 positions of the bert",
        ),
        (["--model.type=brt"], "model.type must be a transformers model type, got brt"),
        (['--model.config={"hidden_sze": 8}'], "model.config must be a field .* got 'hidden_sze'"),
        (
            ['--model.config={"hidden_size": 33}'],
            "model must be usable by transformers, got: hidden_size must be a multi",
        ),
        (
            ['--model.config={"hidden_act": "gelo"}'],
            "model.config must be usable .*hidden_act.*gelo",
        ),
        (
            ['--model.config={"num_hidden_layers": 1.5}'],
            "model.config must be usable by transformers, got: .*integer",
        ),
        (["--model.attention=foo"], "model must be usable by transformers, got: .*foo"),
        (
            ["--model.attention=flash_attention_2"],
            # its versions write flash_attn or FlashAttention
            "model must be usable by transformers, got: .*[Ff]lash_?[Aa]tt",
        ),
        (["--model.type=gpt2", "--model.config={}"], "model must be usable by transformers"),
        (
            [BERT, '--model.config={"num_attention_heads": 0}'],
            "model must be usable by transformers, got: .*zero",
        ),
        (
            [BERT, '--model.config={"pad_token_id": 99999}'],
            "model must be usable by transformers, got: .*[Pp]adding",
        ),
        (["--corpus.cache=/dev/null/x"], "corpus.cache must be a folder .* got /dev/null"),
        (["--run.folder=/dev/null"], "run.folder must be a folder .* got /dev/null"),
        (["--run.folder=/proc/x"], "run.folder must be a folder .* got /proc"),
        (["--run.tracker=foo"], "launch must be one Accelerate can make, got .*foo"),
        (["--corpus.validation=/nowhere/y"], "corpus.validation must exist, got '/nowhere/y'"),
        (['--model.config={"vocab_size": 9}'], "must fit the model's vocabulary of 9, got 2"),
        (["--optim.micro_batch=5"], "optim.batch_size must be a multiple .* got 16"),
        (["--corpus.train=/nowhere/x"], "corpus.train must exist, got '/nowhere/x'"),
        (["--corpus.tokenizer={broken}"], "corpus.tokenizer must be a folder, .*broken"),
        (["--model.init=/nowhere/x"], "model.init must be a folder or hub id .* got '/nowhere/x'"),
        (["--optim.steps=2"], "optim.warmup_steps"),
        (["--optim.steps=null", "--optim.tokens=50"], "optim.warmup_steps"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    flags, message, pretrain_flags, tmp_path
):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=message):
        run(pretrain_flags, *(flag.replace("{broken}", str(broken)) for flag in flags))
    assert not (tmp_path / "runs").exists()
    if "vocab_size" not in flags[0]:
        assert not (tmp_path / "tokens").exists()  # before any work on the text


def test_evaluation_reads_no_more_rows_at_once_than_fit(pretrain_flags, monkeypatch):
    seen = []

    def spy(*arguments, batch_size, **options):
        seen.append(batch_size)
        return evaluate(*arguments, batch_size, **options)

    monkeypatch.setattr(memory, "fit_micro_batch", lambda *rest: 4)  # of 16
    monkeypatch.setattr(pretrain, "evaluate", spy)
    run(pretrain_flags, "--optim.steps=3")
    assert set(seen) == {4}


def test_workers_may_open_as_many_files_as_the_machine_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_pickle_is_read_and_no_foreign_code_is_run(pretrain_flags, tmp_path, monkeypatch):
    import pickle

    def refuse(*arguments, **keywords):
        raise AssertionError("a pickle was read")

    flags = [*pretrain_flags, "--model.type=bert"]  # for which transformers would take other code
    run(flags, "--run.max_hours=1e-9")
    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    run(flags)
    files = {p.suffix for p in (tmp_path / "runs").rglob("*") if p.is_file() and p.name != "lock"}
    assert files == {".yaml", ".json", ".jsonl", ".safetensors"}
    folder = tmp_path / "runs" / "tiny" / "model"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModelForMaskedLM")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    run(flags, f"--model.init={folder}", "--run.name=more", "--model.config={}")
    assert not (tmp_path / "ran").exists()


def test_slow_tokenizers_are_refused(monkeypatch):
    class Slow:
        is_fast = False

    monkeypatch.setattr(vocabulary.AutoTokenizer, "from_pretrained", lambda name: Slow())
    with pytest.raises(InputError, match="corpus.tokenizer must be a fast tokenizer"):
        vocabulary.load_tokenizer("slow/tokenizer")


@pytest.mark.slow
@pytest.mark.parametrize("regional", ["false", "true"])
def test_a_compiled_run_has_the_losses_of_an_eager_one(regional, pretrain_flags, tmp_path):
    flags = [*pretrain_flags, f"--model.config={NO_DROPOUT}"]
    run(flags, "--run.name=eager")
    wanted = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    wanted["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = regional
    done = command(SCRIPT, *flags, "--run.name=compiled", ACCELERATE_USE_CPU="1", **wanted)
    assert done.returncode == 0, done.stderr
    eager, compiled = (log_rows(tmp_path / "runs" / name) for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-4)
    environment = json.loads((tmp_path / "runs" / "compiled" / "environment.json").read_text())
    assert environment["compiled"] == ("regional" if regional == "true" else "full")


def test_a_budget_of_tokens_is_spent_whatever_the_mean_length(pretrain_flags, tmp_path):
    flags = ["--optim.steps=null", "--optim.tokens=8000"]
    run(pretrain_flags, *flags)
    tokens = log_rows(tmp_path / "runs" / "tiny", "tokens")
    assert max(tokens.values()) == pytest.approx(8000, rel=0.06)


def test_dropout_of_a_step_follows_from_seed_step_and_rank(pretrain_flags, monkeypatch):
    seeds, seed_torch = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_torch(seed))
    main(parse_settings(PretrainSettings, [*pretrain_flags, "--run.seed=5"]))
    assert seeds[-12:] == [int(stateless_rng.random_bits(5, step, 0)) >> 1 for step in range(12)]


@pytest.mark.parametrize(
    ("launch", "variables", "message"),
    [
        ((), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "launch must shard (FSDP)"),
        (("--cpu", "--num_processes", "2"), {}, "launch must start the processes"),
    ],
)
def test_what_the_launcher_was_asked_for_and_does_not_give_is_one_line(
    launch, variables, message, pretrain_flags, tmp_path
):
    command_line = (*LAUNCH[:2], *launch) if launch else ()
    done = command(*command_line, SCRIPT, *pretrain_flags, "--run.dry=true", **variables)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [message in line for line in errors] == [True]
    assert done.returncode != 0
    if not launch:
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
