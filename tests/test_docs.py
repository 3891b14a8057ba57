"""The pages: links, commands and options exist, and the snippet of the front page runs."""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
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


def test_the_snippet_of_the_front_page_runs_beside_a_copy_of_bapo_py_alone(tmp_path):
    """As written, in an empty folder. Kills: an import of the project, a name that is gone."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## The loss in other code")[1].split("\n## ")[0]
    snippet = "\n".join(re.findall(r"^    (.*)$", section, re.MULTILINE))
    assert "import" in snippet and "loss.backward()" in snippet
    (tmp_path / "bapo.py").write_bytes((ROOT / "bapo.py").read_bytes())
    before = """
import torch
torch.manual_seed(0)
group_size = 4
rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
rollout_log_probs = -torch.rand(8, 5)
log_probs = (rollout_log_probs + 0.1 * torch.randn(8, 5)).requires_grad_()
mask = torch.ones(8, 5, dtype=torch.bool)
"""
    after = """
assert torch.isfinite(loss) and log_probs.grad.abs().sum() > 0
assert metrics["low"] < 1 < metrics["high"]
"""
    (tmp_path / "use.py").write_text(before + snippet + after)
    process = subprocess.run(
        [sys.executable, "-P", "use.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
