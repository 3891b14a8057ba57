"""The pages: the front page fits, every command can be run, every link and every name in the tables exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import eval_aime
import support.options
import train

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in ROOT.glob("**/*.md") if not {".venv", "runs", ".git"} & set(path.relative_to(ROOT).parts))
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


def test_the_front_page_is_one():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 150 and len(text.encode()) <= 10_000
    assert all(len(line) <= 200 for line in lines if not line.startswith("|"))
    assert all(len(cell) <= 160 for line in lines if line.startswith("|") for cell in line.split("|"))
    assert not re.search(r"\b[0-9a-f]{7,40}\b", text.replace("arxiv", ""))  # no commit hashes


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_exists(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_names_a_script_and_options_that_exist(page):
    found = re.findall(r"(?:python3?|bash) (?:-m pytest )?((?:\w+/)*\w+\.(?:py|sh))([^`\n|]*)", page.read_text())
    for script, rest in found:
        assert (ROOT / script).exists(), script
        words = shlex.split(re.split(r"\s#|&&|;", rest)[0])
        if script == "train.py":
            train.Options(**support.options.parse(train.Options, words, ""))
        if script == "eval_aime.py":
            support.options.parse(eval_aime.Options, words, "")
        if script.startswith("experiments/"):
            known = (ROOT / script).read_text()
            assert all(word.split("=")[0] in known for word in words if word.startswith("--"))


def test_the_names_in_the_front_page_exist():
    text = (ROOT / "README.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    for module, name in re.findall(r"\b(bapo|train|metrics|rollout|runs|reward)\.(\w+)\b", text):
        assert name in ("py", "sh") or hasattr(importlib.import_module(module), name), (module, name)
    for name in re.findall(r"`((?:PAPER|AUTHORS)_\w+)`", text):
        assert hasattr(importlib.import_module("bapo"), name)
