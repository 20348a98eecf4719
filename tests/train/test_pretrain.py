"""The pretraining command as its user starts it: processes, kills, errors, and that it learns."""

import json
import math
import os
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

import launched_runs as runs
import roformer
from tiny import TINY_MODEL, command, log_rows, refused, tiny_config
from train.data import stateless_rng, vocabulary
from train.loop.evaluate import EvaluateSettings, evaluate
from train.loop.evaluate import main as validate
from train.loop.language_model import build_config, build_model
from train.loop.preemption import PreemptionHandler
from train.pretrain import all_reduce_step_info, send_to_device
from train.settings import OPTIMIZERS, InputError, ModelSettings, OptimSettings, TextSettings


def test_the_launched_command_leaves_all_it_promises(pretrain_flags, tmp_path):
    # as scripts of clusters export for all that they start
    address = {"MASTER_ADDR": "10.0.0.1"}
    flags = [*pretrain_flags, "--run.tracker=tensorboard", "--run.peak_tflops=null"]
    done = command(*runs.LAUNCH, runs.SCRIPT, *flags, **address)
    folder = tmp_path / "runs" / "tiny"
    assert "tokens/s" in done.stderr  # the progress bar
    assert set(log_rows(folder)) == set(range(1, 13))
    assert set(log_rows(folder, "validation_loss")) == {6, 12}
    keys = ("mfu", "data_wait", "memory_gb", "tokens_per_second", "seconds_per_step", "tokens")
    mfu, data_wait, memory, speed, pause, tokens = (log_rows(folder, key) for key in keys)
    assert 0 < max(mfu.values()) < 1  # of the peak that was measured
    assert 0 <= data_wait[12] < 1
    assert 0.1 < memory[12] < 30
    assert speed[12] * pause[12] == pytest.approx(tokens[12] - tokens[11], rel=0.05)
    assert json.loads((folder / "environment.json").read_text())["precision"] == runs.PRECISION
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
    inputs = tokenizer("the cat [MASK] the moon .", return_tensors="pt")
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rope", "made_for"), [("default", 32), ("dynamic", 16)])
def test_a_model_says_that_it_is_made_for_what_it_was_trained_on(rope, made_for, pretrain):
    rope_parameters = {"rope_type": rope} | ({} if rope == "default" else {"factor": 2.0})
    changes = {"max_position_embeddings": 16, "rope_parameters": rope_parameters}
    folder = pretrain(runs.model_flag(**changes)) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = roformer.RoFormerConfig.from_pretrained(folder)
    assert tokenizer.model_max_length == config.max_position_embeddings == made_for
    if rope == "default":
        stock = transformers.RoFormerForMaskedLM.from_pretrained(folder)
        assert stock(torch.full((1, 32), 5)).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
def test_other_trackers_get_the_folder_of_the_runs_for_a_project(pretrain, monkeypatch):
    started, log = Mock(), Mock()
    monkeypatch.setattr("train.loop.launch.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(Accelerator, "init_trackers", started)
    monkeypatch.setattr(Accelerator, "log", log)
    pretrain("--run.tracker=wandb", "--optim.steps=3")
    project, settings = started.call_args.args
    assert (project, settings["run.name"]) == ("runs", "tiny")
    assert {call.kwargs["step"] for call in log.call_args_list} == {1, 2, 3}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_goes_on_bit_for_bit_with_dropout(optimizer, pretrain, launch):
    flags = [
        f"--optim.name={optimizer}", "--optim.steps=40", "--run.save_every=3",
        "--optim.micro_batch=8", "--run.log_every=2",
    ]  # fmt: skip
    whole = pretrain(*flags, "--run.name=whole")
    assert roformer.RoFormerConfig.from_pretrained(whole / "model").hidden_dropout_prob == 0.1
    victim = launch(*flags)
    launch.train_until(victim, 10)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert 9 <= launch.saved_step() < 40
    runs.assert_same_run(whole, pretrain(*flags))


@pytest.mark.parametrize("kind", ["roformer", pytest.param("bert", marks=pytest.mark.slow)])
def test_two_processes_give_the_losses_of_one(kind, pretrain, launch):
    flags = [runs.model_flag(**runs.NO_DROPOUT, return_dict=False), f"--model.type={kind}"]
    flags += ["--run.validation_sequences=12"]  # three batches of 4: one process has none at last
    one = pretrain(*flags, "--run.name=one")
    flags += ["--optim.micro_batch=4"]
    accumulated = pretrain(*flags, "--run.name=accumulated")
    assert launch.torchrun(*flags).wait(runs.PATIENCE) == 0, launch.output()
    two = launch.run
    keys = ("loss", "tokens", "validation_accuracy", "validation_loss", "validation_tokens")
    for run in (accumulated, two):
        runs.assert_close_runs(one, run, *keys)
        runs.assert_close_runs(one, run, "gradient_norm", rel=1e-5)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


def test_bert_gets_the_batches_of_roformer(pretrain, monkeypatch):
    send = Mock(wraps=send_to_device)
    monkeypatch.setattr("train.pretrain.send_to_device", send)
    for kind in ("roformer", "bert"):
        pretrain(f"--model.type={kind}", f"--run.name={kind}", "--optim.micro_batch=4")
    batches = [call.args[0] for call in send.call_args_list]
    assert len(batches) == 2 * 12 * 4
    torch.testing.assert_close(batches[:48], batches[48:], rtol=0, atol=0)


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one(pretrain, launch):
    flags = [runs.model_flag(**runs.NO_DROPOUT), "--optim.micro_batch=8"]
    address = ("--master_addr=127.0.0.1", f"--master_port={get_free_port()}")
    torchrun = (*runs.TORCHRUN[:2], "--nnodes=2", "--nproc_per_node=1", *address)
    machines = [launch(*flags, launcher=(*torchrun, f"--node_rank={n}")) for n in range(2)]
    assert [machine.wait(runs.PATIENCE) for machine in machines] == [0, 0], launch.output()
    runs.assert_close_runs(pretrain(*flags, "--run.name=one"), launch.run)


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_tiny_language_is_learned_far_below_its_unigram_entropy(kind, pretrain, tmp_path):
    topics = [" ".join(f"{letter}{i}" for i in range(8)) for letter in "abcdef"]
    for part, number, repeats in (("train", 40, 3), ("validation", 4, 2)):
        texts = [f"{topic} " * repeats for topic in topics * number]
        (tmp_path / f"{part}.txt").write_text("\n\n".join(texts))
    words = sorted(set(" ".join(topics).split()))
    vocabulary.save_tokenizer([*vocabulary.SPECIAL_TOKENS, *words], tmp_path / "words")
    run = pretrain(
        f"--model.type={kind}", "--optim.steps=150", "--run.log_every=25",
        "--optim.learning_rate=5e-3", "--run.validate_every=150",
        f"--corpus.tokenizer={tmp_path / 'words'}",
        f"--corpus.train={tmp_path / 'train.txt'}",
        f"--corpus.validation={tmp_path / 'validation.txt'}",
    )  # fmt: skip
    entropy = math.log(len(words))  # all are equally frequent
    loss = log_rows(run, "validation_loss")[150]
    assert loss < 0.7 * entropy
    assert log_rows(run)[25] > loss


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_saved_model_has_the_loss_of_the_log_and_reads_second_texts(
    kind, pretrain, corpus_folder, tmp_path, capsys
):
    folder = pretrain(f"--model.type={kind}")
    text = str(corpus_folder / "validation.jsonl")
    held_out = TextSettings(validation=text, cache=str(tmp_path / "tokens"))
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder / "model").eval()
    ids = torch.arange(5, 21)[None]
    first, second = (model(ids, token_type_ids=torch.full_like(ids, t)).logits for t in (0, 1))
    assert torch.equal(first, second)  # though no second text was shown
    found = validate(EvaluateSettings(str(folder / "model"), held_out, 32))
    assert found["validation_loss"] == pytest.approx(log_rows(folder, "validation_loss")[12])
    if kind == "roformer":  # at any length
        longer = validate(EvaluateSettings(str(folder / "model"), held_out, length=300))
        assert math.isfinite(longer["validation_loss"])
        printed = capsys.readouterr()
        assert "model: roformer, 2 layers x 32, " in printed.out
        assert json.loads(printed.out.splitlines()[-1])["length"] == 300
        assert "warning: corpus.validation has" in printed.err
        wrong = EvaluateSettings(str(folder), held_out)
        refused(lambda: validate(wrong), "model must be", "; name ")


@pytest.mark.parametrize("kind", ["RoFormer", "Bert"])
def test_the_loop_is_the_textbooks(kind, pretrain, tokenizer, tmp_path, monkeypatch):
    """Losses and weights of transformers' model in a plain loop: clipping, decay, schedule."""
    sizes = TINY_MODEL | runs.NO_DROPOUT | {"vocab_size": len(tokenizer)}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    model.save_pretrained(tmp_path / "stock")
    reduce = Mock(wraps=all_reduce_step_info)
    monkeypatch.setattr("train.pretrain.all_reduce_step_info", reduce)
    flags = [f"--model.type={kind.lower()}", f"--model.init={tmp_path / 'stock'}"]
    flags += ["--model.config={}", "--optim.micro_batch=4", "--optim.clip_norm=0.5"]
    run = pretrain(*flags)
    seen = [call.args[0] for call in reduce.call_args_list]  # micro-batches of each step
    settings = OptimSettings(steps=12, warmup_steps=2, clip_norm=0.5)
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
            scores = model.train()(**inputs).logits.flatten(0, 1)[batch["label_indices"]]
            part = torch.nn.functional.cross_entropy(scores, batch["labels"], reduction="sum")
            (part / total).backward()
            loss += part.item() / total
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    assert len(seen) == 12
    assert len(seen[0]) == 4
    np.testing.assert_allclose(list(log_rows(run).values()), losses, atol=1e-5)
    trained = load_file(run / "model" / "model.safetensors")
    expected = {name: model.state_dict()[name] for name in trained}
    torch.testing.assert_close(trained, expected, atol=2e-5, rtol=1e-4)


def test_pretraining_continues_from_a_saved_folder(pretrain, swapped_tokenizer):
    first, load_config = pretrain(), roformer.RoFormerConfig.from_pretrained
    init = f"--model.init={first / 'model'}"
    still = pretrain(init, "--run.name=still", runs.model_flag(**runs.NO_DROPOUT))
    assert log_rows(still)[1] < log_rows(first)[1] - 0.1
    assert load_config(still / "model").hidden_dropout_prob == 0.0
    dropped = pretrain(init, "--run.name=dropped", "--model.config={}")  # 0.1, as it was saved
    assert log_rows(still)[1] != log_rows(dropped)[1]  # dropped from the first step on
    xl = '--model.config={"position_encoding": "transformer_xl"}'
    other = pretrain(init, "--run.name=other", xl)
    assert log_rows(other)[1] < log_rows(first)[1] - 0.1  # all else is the checkpoint's
    assert load_config(other / "model").position_encoding == "transformer_xl"
    for flag, *words in (
        (runs.model_flag(hidden_size=64), "model.config.hidden_size must stay 32", "got 64"),
        (runs.model_flag(hiden_size=32), "model.config must be a field", "'hiden_size'"),
        (f"--corpus.tokenizer={swapped_tokenizer}", "corpus.tokenizer must fit", "vocabulary"),
    ):
        refused(lambda flag=flag: pretrain(init, "--run.name=wrong", flag), *words)
    pretrain(init, "--run.name=begun", "--model.config={}", "--run.max_hours=1e-9")
    load_config(first / "model", hidden_dropout_prob=0.4).save_pretrained(first / "model")
    resume = lambda: pretrain(init, "--run.name=begun", "--model.config={}")  # noqa: E731
    refused(resume, "model.config must give the configuration")


def test_the_angles_of_a_checkpoint_stay_where_none_are_said(tmp_path):
    roformer.use_for_auto_classes()  # as the command does when it starts
    rope = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    tiny_config(rope_parameters=rope).save_pretrained(tmp_path)
    for given in ({}, {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 300.0}):
        settings = ModelSettings(init=str(tmp_path), config={"rope_parameters": given})
        found = build_config(settings, 8).rope_parameters
        assert found == {"rope_type": "default"} | rope | given


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


@pytest.mark.parametrize(
    ("kind", "stock"),
    [
        ("roformer", transformers.RoFormerForMaskedLM),
        ("roformer", transformers.BertForMaskedLM),
        ("bert", transformers.BertForMaskedLM),
    ],
)
def test_a_checkpoint_without_a_layer_is_refused(kind, stock, tmp_path):
    model = stock(stock.config_class(**TINY_MODEL))
    weights = {k: v for k, v in model.state_dict().items() if ".layer.1." not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    settings = ModelSettings(type=kind, init=str(tmp_path))
    config = build_config(settings, 16)
    with pytest.raises(InputError, match=r"model must hold all weights .*layer\.1"):
        build_model(settings, config, seed=0)


MISFITS = {
    "--model.type=bert --corpus.length=128": ("corpus.length", "64 positions of the bert"),
    '--model.type=bert --corpus.length=128 --optim.steps=null --stages=[{"length":32,"steps":9}]': (
        "corpus.length",
        "64 positions of the bert",
    ),  # the length of held-out text
    "--model.type=brt": ("model.type must be a transformers model type", "got brt"),
    '--model.config={"num_layers":2}': ("model.config must be a field", "mean num_hidden_layers?"),
    '--model.config={"hidden_size":33}': ("model must be usable", "hidden_size", "multiple"),
    '--model.config={"hidden_act":"gelo"}': ("model.config must be usable", "hidden_act", "gelo"),
    '--model.config={"num_hidden_layers":1.5}': ("model.config must be usable", "integer"),
    "--model.attention=foo": ("model must be usable by transformers", "foo"),
    "--model.attention=flex_attention": ("model.attention must have a backward pass on a CPU",),
    "--model.type=bert --model.attention=unpadded": ("model.attention must be", "for 'bert'"),
    "--model.type=roberta": ("must keep its language-model head under `cls`", "'roberta'"),
    "--model.type=gpt2 --model.config={}": ("model must be usable by transformers",),
    '--model.type=bert --model.config={"pad_token_id":99999}': ("model must be usable", "adding"),
    "--corpus.cache=/dev/null/x": ("corpus.cache must be a folder", "got /dev/null"),
    "--run.folder=/dev/null": ("run.folder must be a folder", "got /dev/null"),
    "--run.folder=/proc/x": ("run.folder must be a folder", "got /proc"),
    "--run.tracker=foo": ("run.tracker must be null or", "got foo"),
    "--corpus.train=": ("corpus.train must name a source", "got ['']"),
    "--corpus.train=text --corpus.validation=2%": ("corpus.train must be files", "got 'text'"),
    "--corpus.validation=/nowhere/y": ("corpus.validation must exist", "got '/nowhere/y'"),
    '--model.config={"vocab_size":9}': ("must fit the model's vocabulary of 9", "got ids"),
    "--corpus.tokenizer={broken}": ("corpus.tokenizer must be a folder", "broken"),
    "--corpus.tokenizer=/nowhere --run.dry=true": ("corpus.tokenizer must be a folder", "/nowhere"),
    "--corpus.train=/nowhere/x --corpus.validation=2% --run.dry=true": ("corpus.train must exist",),
    "--corpus.vocabulary_size=50 --run.dry=true": ("corpus.vocabulary_size must be at least 100",),
    "--model.init=/nowhere/x": ("model.init /nowhere/x must be usable", "no such folder"),
    "--optim.micro_batch=5": ("optim.batch_size must be a multiple", "got 16"),
    "--optim.steps=2": ("optim.warmup_steps", "got 2"),
}


@pytest.mark.parametrize("flags", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_is_written(flags, pretrain, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    given = flags.replace("{broken}", str(broken)).split()
    refused(lambda: pretrain(*given), *MISFITS[flags])
    assert not (tmp_path / "runs").exists()
    if "vocab_size" not in flags:
        assert not (tmp_path / "tokens").exists()  # before any work on the text


def test_a_budget_of_tokens_is_spent_and_a_warmup_compared_with_its_steps(pretrain):
    """Which are more than 16 of 512 tokens: most sequences are shorter than the longest."""
    budget = ["--optim.steps=null", "--optim.tokens=8000"]
    tokens = log_rows(pretrain(*budget, "--optim.warmup_steps=16"), "tokens")
    steps = max(tokens)
    assert steps > 16
    assert tokens[steps] == pytest.approx(8000, rel=0.06)
    longer = [*budget, f"--optim.warmup_steps={steps}", "--run.name=longer"]
    rule = f"optim.warmup_steps must be fewer than the {steps} steps of the run, got {steps}"
    refused(lambda: pretrain(*longer), rule)


def test_evaluation_reads_no_more_rows_at_once_than_fit(pretrain, monkeypatch):
    spy = Mock(wraps=evaluate)
    monkeypatch.setattr("train.loop.memory.fit_micro_batch", lambda *rest: 4)  # of 16
    monkeypatch.setattr("train.pretrain.evaluate", spy)
    pretrain("--optim.steps=3")
    assert spy.call_args.kwargs["batch_size"] == 4


def test_a_run_needs_no_pickle_no_socket_and_no_foreign_code(pretrain, tmp_path, monkeypatch):
    bert = "--model.type=bert"  # for which transformers would take other code
    monkeypatch.setattr("socket.socket.connect", Mock(side_effect=AssertionError))
    pretrain(bert, "--run.max_hours=1e-9")
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, Mock(side_effect=AssertionError))
    run = pretrain(bert)
    files = {p.suffix for p in run.rglob("*") if p.is_file() and p.name != "lock"}
    assert files == {".yaml", ".json", ".jsonl", ".safetensors"}
    folder = run / "model"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModelForMaskedLM")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    written = [run / "log.jsonl", *folder.iterdir()]
    before = [file.read_bytes() for file in written]
    pretrain(bert)  # it is finished: its model stays as its owner edited it
    assert [file.read_bytes() for file in written] == before
    pretrain(bert, f"--model.init={folder}", "--run.name=more", "--model.config={}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("regional", ["false", "true"])
def test_a_compiled_run_has_the_losses_of_an_eager_one(regional, pretrain, launch):
    still = runs.model_flag(**runs.NO_DROPOUT)
    wanted = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    wanted["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = regional
    assert launch(still, **wanted).wait(300) == 0, launch.output()
    runs.assert_close_runs(pretrain(still, "--run.name=eager"), launch.run, "loss", rel=1e-4)
    environment = json.loads((launch.run / "environment.json").read_text())
    assert environment["compiled"] == ("regional" if regional == "true" else "full")


def test_dropout_of_a_step_follows_from_seed_step_and_rank(pretrain, monkeypatch):
    seeds, seed_torch = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or seed_torch(seed))
    for rank in (0, 1):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        pretrain("--run.seed=5", f"--run.name=rank-{rank}")
        expected = [int(stateless_rng.random_bits(5, step, rank)) >> 1 for step in range(12)]
        assert seeds[-12:] == expected


@pytest.mark.parametrize(
    ("launcher", "variables", "message"),
    [
        ((), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "launch must shard (FSDP)"),
        ((*runs.LAUNCH[:2], "--cpu", "--num_processes", "2"), {}, "launch must start"),
    ],
)
def test_a_launcher_that_gives_less_than_asked_is_one_line(launcher, variables, message, launch):
    flags = [*launch.flags, "--run.dry=true"]
    done = command(*launcher, runs.SCRIPT, *flags, fails=True, **variables)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert launcher or (done.returncode, done.stderr.strip()) == (2, error)
    assert not launch.run.parent.exists()


def test_labels_that_only_fill_a_shape_are_not_counted_among_the_predicted():
    batches = [{"labels": torch.tensor(labels)} for labels in ([5, 7, -100], [-100] * 3, [0])]
    stop = PreemptionHandler(0.0, None)
    found, _ = all_reduce_step_info(batches, stop, Accelerator(cpu=True))
    assert found == 3
