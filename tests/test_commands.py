"""The commands and the pages, as a user meets them: what a page names exists, and runs."""

import dataclasses
import importlib
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

import eval_aime
import train
from support import runs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md"]
for folder in ("docs", "integrations", "results"):
    PAGES += sorted(ROOT.glob(f"{folder}/*.md"))
SCRIPTS = {"train.py": train, "eval_aime.py": eval_aime}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(text: str) -> list[list[str]]:
    """The words of every `python FILE.py ...` or `python -m MODULE ...` of a page."""
    found = []
    for command in re.findall(r"python3? ((?:\w+/)*\w+\.py[^`\n|]*)", text):
        found.append(shlex.split(re.split(r" #| &&|;", command)[0]))
    for module in re.findall(r"python3? -m ((?:support|results)[\w.]*)", text):
        found.append([module.replace(".", "/") + ".py"])
    return found


@every_page
def test_the_commands_of_a_page_name_scripts_and_options_that_exist(page):
    text = page.read_text()
    for script, *words in commands(text):
        assert (ROOT / script).exists() or f"Save this as {script}" in text, script
        if script in SCRIPTS and words != ["--help"]:
            runs.parse(SCRIPTS[script].Options, words, "")


@every_page
def test_the_options_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    known = {"resume", "help"}
    for script in SCRIPTS.values():
        known |= {field.name for field in dataclasses.fields(script.Options)}
    for option in re.findall(r"`--(\w+)", text):
        assert option in known, option
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / name).exists() or (page.parent / name).exists(), name
    for module, name in re.findall(r"`(\w+)\.(\w+)`", text):
        if (ROOT / f"{module}.py").exists() and name != "py":
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_help_is_printed(script, capsys):
    """A single % in the help of an option would be an error."""
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    assert "(default:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--step", "3"],
        ["--lora_rank", "-1"],
        ["--modle", "m", "--data", "x"],  # and not that --model is missing
    ],
)
def test_a_mistake_is_one_line_on_the_command_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runs.command("train.py", partial(train.main, words), "interrupted")
    said = f"{ended.value.code}\n{capsys.readouterr().err}"
    assert words[0].strip("-") in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())
