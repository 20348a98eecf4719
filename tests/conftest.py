"""Fixtures: a corpus in a tiny language, its tokenizer, and a pretraining run on both."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import ctypes
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import transformers
import yaml
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import roformer
from launched_runs import Launches, Start, child_processes
from tiny import ROOT, TINY_MODEL, sentences
from train.command_line import parse_settings
from train.data import vocabulary
from train.pretrain import main
from train.settings import PretrainSettings

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Every test draws the same numbers, whichever ran before it."""
    torch.manual_seed(1234)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl and validation.jsonl: documents of 1 to 12 sentences each."""
    folder = tmp_path_factory.mktemp("corpus")
    for part, number, seed in (("train", 300, 1), ("validation", 40, 2)):
        draw = random.Random(seed)
        texts = [" ".join(sentences(draw.randint(1, 12), seed * 1000 + i)) for i in range(number)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    """A jsonl of 40 documents that are in neither part of `corpus_folder`."""
    texts = (" ".join(sentences(5, 9000 + i)) for i in range(40))
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    return tmp_path / "other.jsonl"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real texts and GLUE, absolute: runs change folder and link to it."""
    folder = Path(os.environ.get("ROFORMER_DATA", ""))
    assert (folder / "corpus").is_dir(), "ROFORMER_DATA must name the folder of the real data"
    return folder.resolve()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = sorted({w for s in sentences(400, 3) for w in s.split()})
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    vocabulary.save_tokenizer([*vocabulary.SPECIAL_TOKENS, *words], folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> transformers.PreTrainedTokenizerBase:
    return vocabulary.load_tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="session")
def swapped_tokenizer(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with the same pieces, the last two in each other's place."""
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    folder = tmp_path_factory.mktemp("swapped") / "tokenizer"
    vocabulary.save_tokenizer([*pieces[:-2], pieces[-1], pieces[-2]], folder)
    return str(folder)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers with AutoConfig is forgotten after it."""
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))


@pytest.fixture(params=["eager", "sdpa", "unpadded"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Each attention implementation that runs everywhere."""
    return request.param


@pytest.fixture
def config() -> roformer.RoFormerConfig:
    return roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL)


@pytest.fixture
def warnings_once(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Records of warnings that are logged once a process, as if none had been logged before."""
    transformers.utils.logging.warning_once.cache_clear()
    return caplog


@pytest.fixture
def flex_without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile flex_attention with aot_eager: the same masks, without minutes of C++ compilation."""
    compiled = torch.compile(flex_attention, backend="aot_eager")
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: compiled)
    # all tests of a process share the compiled function, and dynamo gives up after eight shapes
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.fixture
def pretrain_flags(corpus_folder: Path, tokenizer_folder: Path, tmp_path: Path) -> list[str]:
    """The `--config` of a tiny pretraining run of 12 steps in `tmp_path`."""
    corpus = {part: str(corpus_folder / f"{part}.jsonl") for part in ("train", "validation")}
    corpus |= {"tokenizer": str(tokenizer_folder), "length": 32, "cache": str(tmp_path / "tokens")}
    optim = {"steps": 12, "warmup_steps": 2, "batch_size": 16, "micro_batch": 16}
    run = {"name": "tiny", "folder": str(tmp_path / "runs"), "tracker": None}
    run |= {"log_every": 1, "validate_every": 6, "save_every": 4}
    run["peak_tflops"] = 1.0  # nothing to measure at each start
    settings = {"model": {"config": TINY_MODEL}, "corpus": corpus, "optim": optim, "run": run}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return [f"--config={tmp_path / 'tiny.yaml'}"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a process group of its own; whatever is started is gone at the end."""
    started: list[subprocess.Popen[bytes]] = []
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def begin(*arguments, program=sys.executable, group=0, pipe=None, **environment):
        def prepare() -> None:
            for number in (signal.SIGHUP, signal.SIGINT):  # these tests may run under `nohup`
                signal.signal(number, signal.SIG_DFL)

        # as many threads as here: sums round alike
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
        with (tmp_path / "output").open("ab") as output:
            process = subprocess.Popen(
                [program, *map(str, arguments)],
                cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=pipe or output,
                stderr=pipe or output, preexec_fn=prepare, process_group=group,
            )  # fmt: skip
        started.append(process)
        return process

    prctl(SUBREAPER, 1)  # orphans become children of this process, which can wait for them
    yield begin
    left = child_processes(tmp_path)
    for process in left:
        process.kill()
    for launched in started:
        launched.wait()
    psutil.wait_procs(left)
    prctl(SUBREAPER, 0)


@pytest.fixture
def launch(start: Start, pretrain_flags: list[str], tmp_path: Path) -> Launches:
    return Launches(start, pretrain_flags, tmp_path)


@pytest.fixture
def pretrain(pretrain_flags: list[str]) -> Callable[..., Path]:
    """Pretrains in this process, with more flags, and returns the folder of the run."""
    return lambda *flags: main(parse_settings(PretrainSettings, [*pretrain_flags, *flags])).parent
