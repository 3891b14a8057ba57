"""The pages: the front page fits; commands, options, links and names in tables exist."""

import dataclasses
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import eval_aime
import train
from support.options import parse

ROOT = Path(__file__).parent.parent
NOT_OURS = {".venv", ".git", "runs"}


def pages() -> list[str]:
    """All Markdown files of the project, from its root."""
    found = []
    for path in sorted(ROOT.glob("**/*.md")):
        page = path.relative_to(ROOT)
        if not NOT_OURS & set(page.parts):
            found.append(str(page))
    return found


def option_names(options: type) -> set[str]:
    return {f"--{field.name}" for field in dataclasses.fields(options)}


def test_the_front_page_names_no_commit():
    text = (ROOT / "README.md").read_text()
    assert not re.search(r"\b[0-9a-f]{7,40}\b", text.replace("arxiv", ""))


@pytest.mark.parametrize("page", pages())
def test_every_relative_link_exists(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


@pytest.mark.parametrize("page", pages())
def test_every_command_names_a_script_and_options_that_exist(page):
    text = (ROOT / page).read_text()
    script = r"((?:\w+/)*\w+\.(?:py|sh))"
    rest_of_command = r"([^`\n|]*)"
    for name, rest in re.findall(
        rf"(?:python3?|bash) (?:-m pytest )?(?:-s )?{script}{rest_of_command}", text
    ):
        assert (ROOT / name).exists(), name
        words = shlex.split(re.split(r"\s#|&&|;", rest)[0])
        if name == "train.py":
            train.Options(**parse(train.Options, words, ""))
        if name == "eval_aime.py":
            parse(eval_aime.Options, words, "")
        if name.startswith("experiments/"):
            known = (ROOT / name).read_text()
            for word in words:
                assert not word.startswith("--") or word.split("=")[0] in known, word


@pytest.mark.parametrize("page", pages())
def test_every_module_that_is_run_exists(page):
    for module in re.findall(r"python3? -m ([\w.]+)", (ROOT / page).read_text()):
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert path.exists() or importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", ["docs/own_model.md", "docs/aime.md"])
def test_every_option_that_a_guide_names_exists(page):
    """Kills: a guide that goes on naming an option that is gone."""
    text = (ROOT / page).read_text()
    known = option_names(train.Options) | option_names(eval_aime.Options)
    named = set(re.findall(r"`(--\w+)", text))
    assert named <= known
    assert len(named) > 3


def test_the_names_in_the_front_page_exist():
    text = (ROOT / "README.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    for first, name in re.findall(r"\b(\w+)\.(\w+)\b", text):
        module = module_of(first)
        if module and name not in ("py", "sh", "md"):
            assert hasattr(importlib.import_module(module), name), (module, name)
    for name in re.findall(r"`((?:PAPER|AUTHORS)_\w+)`", text):
        assert hasattr(importlib.import_module("bapo"), name), name


def module_of(name: str) -> str | None:
    """The module of the project that a page means by a name; None if there is none."""
    if (ROOT / f"{name}.py").exists():
        return name
    if (ROOT / f"support/{name}.py").exists():
        return f"support.{name}"
    return None
