"""The documentation: its code runs, its commands and files exist, its size stays small."""

import re
import runpy
import shlex

import pytest

from tiny import ROOT, command, name_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, *languages):
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def documented_commands():
    """(page, module, flags) of every command of this project in a shell block."""
    for page in PAGES:
        for line in "\n".join(blocks(page, "", "bash")).replace("\\\n", " ").splitlines():
            pattern = r"(?:-m ((?:train|finetune)[\w.]*)|((?:train|finetune)/\w+)\.py)(?=\s|$)"
            for found in re.finditer(pattern, line):
                module = (found[1] or found[2]).replace("/", ".")
                yield name_of(page), module, re.findall(r"\s(--[\w.]+)", line[found.end() :])


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_the_python_of_a_page_runs(page, registry, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    namespace = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), namespace)


def test_every_documented_command_exists_and_takes_the_flags_given():
    hooks = runpy.run_path(ROOT / "docs" / "site_hooks.py")
    flags = {
        title.removeprefix("python -m "): hooks["help_text"](module, settings)
        for title, (module, settings) in hooks["command_settings"]().items()
    }
    commands = list(documented_commands())
    assert len(commands) > 25
    for page, module, given in commands:
        assert module in flags, f"{page}: {module} is no command"
        for flag in given:
            key = flag[2:]
            accepted = re.search(rf"--{re.escape(key)}[\s+]", flags[module])
            assert accepted or key.startswith("model.config."), f"{page}: {module} {flag}"


@pytest.mark.slow  # `make docs` runs it
def test_a_mistake_in_the_launched_commands_of_the_readme_is_all_that_they_print(tmp_path):
    lines = "\n".join(blocks(ROOT / "README.md", "")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if "accelerate launch" in line]
    assert len(commands) == 2
    for words in commands:
        flags = [*words[words.index("launch") + 1 :], "--no_such_setting", "1"]
        done = command("-m", "accelerate.commands.launch", *flags, fails=True, PYTHONWARNINGS="")
        assert re.fullmatch(r"error: .*--no_such_setting.*\n", done.stdout + done.stderr)


def test_every_launch_command_is_quiet_so_that_an_error_is_the_last_line():
    """Without `--quiet` Accelerate's launcher adds a traceback of its own."""
    files = [*PAGES, ROOT / "Makefile", *(ROOT / "configs").rglob("*.*")]
    files += [*(ROOT / "results").rglob("README.md"), *(ROOT / "train").rglob("*.py")]
    launch = "accelerate launch .*(?:train|finetune|config_file).*"
    for file in [*files, *(ROOT / "finetune").rglob("*.py")]:
        for line in re.findall(launch, file.read_text()):
            assert "--quiet" in line, f"{file}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_configuration_and_target_that_a_page_names_exists(page):
    text = page.read_text()
    for path in re.findall(r"(?<![\w/])configs/[\w/-]+\.\w+", text):
        assert (ROOT / path).exists() or "NAME" in path, path
    makefile = (ROOT / "Makefile").read_text()
    phony = set(makefile.split(".PHONY:")[1].split("\n\n")[0].replace("\\", "").split())
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in phony, target


def test_readme_makefile_and_guide_to_contributors_are_short():
    assert (ROOT / "README.md").stat().st_size <= 12_000
    for name, limit in (("README.md", 160), ("Makefile", 90), ("CONTRIBUTING.md", 50)):
        assert len((ROOT / name).read_text().splitlines()) <= limit, name
