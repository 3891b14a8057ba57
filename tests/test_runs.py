"""runs.py: arms, a run's folder, and whole commands that are killed, interrupted, repeated, or lose their reader."""

import errno
import json
import multiprocessing
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import table_alone
from test_train import even_length, go, make_run, make_task
from transformers import AutoModelForCausalLM

import bapo
import countdown
import support.arms
import support.files
import support.options
import support.run_folder
import support.warm_starts
import support.workers
import train
from support import plot

ROOT = Path(__file__).parent.parent
COMMAND = "--steps 2 --prompts_per_step 2 --group_size 4 --warm_start_steps 100 --attempts 1 --max_new_tokens 13".split()
COMMAND += ["--device", "cpu"]
START = "attempts1-steps100-seed0"
PROBLEMS = countdown.problems()


def few_problems(seed: int = 0) -> tuple[list, list]:
    """The problems of the first six steps of COMMAND, few enough to be learned by heart in a hundred steps."""
    return train.prompts_of_step(PROBLEMS[0], 1, 12, 0), PROBLEMS[1][:4]


@pytest.fixture
def few(monkeypatch):
    """A task that takes no time: for commands in this process."""
    monkeypatch.setattr(countdown, "problems", few_problems)


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """A warm start that now and then is right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown, "problems", few_problems)
        return support.warm_starts.warm_start(tmp_path_factory.mktemp("starts") / START, attempts=1, steps=100)


@pytest.fixture
def output(tmp_path, learned) -> str:
    """--output_dir with the warm start beside it."""
    shutil.copytree(learned, tmp_path / "warm-starts" / START)
    return str(tmp_path / "runs")


# ---------------------------------------------------------------- arms
MANY = "0.8-3.0+no-std+sequence-mean+share.5@2x4"


@pytest.mark.parametrize(
    "text, arm",
    [
        ("grpo", support.arms.Arm("grpo@8", bapo.GRPO, 8)),
        ("grpo@1", support.arms.Arm("grpo@1", bapo.GRPO, 1)),
        ("clip-higher@16", support.arms.Arm("clip-higher@16", bapo.CLIP_HIGHER, 16)),
        ("bapo", support.arms.Arm("bapo@8", bapo.ClipSearch(rho0=0.3), 8)),
        ("bapo-main", support.arms.Arm("bapo-main@8", bapo.PAPER_MAIN, 8)),
        ("bapo-octothinker@4", support.arms.Arm("bapo-octothinker@4", bapo.PAPER_OCTOTHINKER, 4)),
        ("0.5-1.2@4", support.arms.Arm("0.5-1.2@4", bapo.ClipSearch.fixed(0.5, 1.2), 4)),
        ("1.02-3.0", support.arms.Arm("1.02-3.0@8", bapo.ClipSearch.fixed(1.02, 3.0), 8)),
        (".8-2", support.arms.Arm(".8-2@8", bapo.ClipSearch.fixed(0.8, 2.0), 8)),
        ("balanced", support.arms.Arm("balanced@8", bapo.GRPO, 8, share=0.3)),
        ("grpo+sequence-mean", support.arms.Arm("grpo+sequence-mean@8", bapo.GRPO, 8, aggregation="sequence-mean")),
        ("grpo+no-std@2", support.arms.Arm("grpo+no-std@2", bapo.GRPO, 2, normalize_std=False)),
        ("grpo@1x8", support.arms.Arm("grpo@1x8", bapo.GRPO, 1, 8)),
        ("grpo@8x1", support.arms.Arm("grpo@8", bapo.GRPO, 8)),
        ("bapo-main@2x4", support.arms.Arm("bapo-main@2x4", bapo.PAPER_MAIN, 2, 4)),
        ("bapo+high3@8", support.arms.Arm("bapo+high3@8", bapo.ClipSearch(rho0=0.3, high_max=3.0), 8)),
        (
            "bapo+low0.98+high1.2",
            support.arms.Arm("bapo+low0.98+high1.2@8", bapo.ClipSearch(rho0=0.3, low_max=0.98, high_max=1.2), 8),
        ),
        ("bapo+low1.04", support.arms.Arm("bapo+low1.04@8", bapo.ClipSearch(rho0=0.3, low_max=1.04, low_step=0.06), 8)),
        ("grpo+share1", support.arms.Arm("grpo+share1@8", bapo.GRPO, 8, share=1.0, scale_up=True)),
        ("grpo+share0.45", support.arms.Arm("grpo+share0.45@8", bapo.GRPO, 8, share=0.45, scale_up=True)),
        ("bapo+surrogate", support.arms.Arm("bapo+surrogate@8", bapo.ClipSearch(rho0=0.3, contribution="surrogate"), 8)),
        ("bapo+at-one", support.arms.Arm("bapo+at-one@8", bapo.ClipSearch(rho0=0.3, may_empty=True), 8)),
        ("bapo-main+at-one", support.arms.Arm("bapo-main+at-one@8", replace(bapo.PAPER_MAIN, may_empty=True), 8)),
        (MANY, support.arms.Arm(MANY, bapo.ClipSearch.fixed(0.8, 3.0), 2, 4, "sequence-mean", False, 0.5, True)),
    ],
)
def test_an_arm_is_its_method_its_modifiers_and_its_updates(text, arm):
    assert support.arms.parse_arm(text, bapo.ClipSearch(rho0=0.3)) == arm


@pytest.mark.parametrize(
    "text, named",
    [
        ("cispos", "'cispos' is none of grpo, clip-higher"),
        ("", "none of"),
        ("grpo@0", "'grpo@0' is none of"),
        ("grpo@x", "'grpo@x' is none of"),
        ("grpo@8@8", "'grpo@8@8' is none of"),
        ("grpo@8+no-std", "none of"),
        ("grpo@2x", "none of"),
        ("grpo@2x0", "none of"),
        ("grpo+high3", "'high3' in"),
        ("bapo+low0.97", "low_step"),
        ("0.8", "'0.8' is none of"),
        ("1.5-0.8", "low_max=1.5 must not exceed high_start=0.8"),
        ("grpo+", "'' in 'grpo.' is no modifier"),
        ("grpo+sequence_mean", "'sequence_mean' in 'grpo.sequence_mean' is no modifier: sequence-mean, no-std"),
        ("grpo+no-std+fast@2", "'fast' in"),
        ("grpo+fresh@2", "'fresh' in"),
        ("grpo+share", "'share' in"),
        ("grpo+share0", "'share0' in"),
        ("grpo+share0.0", "'share0.0' in"),
        ("grpo+share1.5", "'share1.5' in"),
        ("grpo+share-1", "'share-1' in"),
    ],
)
def test_an_unknown_method_or_modifier_is_refused_by_name(text, named):
    with pytest.raises(ValueError, match=named):
        support.arms.parse_arm(text, bapo.ClipSearch())


def test_an_unknown_option_is_refused_with_the_one_that_was_meant():
    for words, meant in {"--lr 1": "learning_rate", "--learnig_rate=1": "learning_rate", "--modle x": "model"}.items():
        with pytest.raises(ValueError, match=f"unknown option {words.split()[0]}: did you mean --{meant}\\?"):
            support.options.parse(train.Options, words.split(), "")
    with pytest.raises(ValueError, match="unknown option --zzz$"):
        support.options.parse(train.Options, ["--zzz"], "")
    found = support.options.parse(train.Options, ["--low", "0.7", "0.8", "--resume", "--methods", "a", "b"], "")
    assert found["low"] == [0.7, 0.8] and found["resume"] is True and found["methods"] == ["a", "b"] and found["steps"] == 140


def test_auto_is_the_gpu_in_bfloat16_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (
        support.options.resolve_device("auto", "auto") == ("cpu", "float32")
        and support.options.resolve_device("cpu", "bfloat16")[1] == "bfloat16"
    )
    with pytest.raises(ValueError, match="device must be auto, cpu, or a CUDA device that is there, got 'cuda'"):
        support.options.resolve_device("cuda", "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="got 'cuda:2'"):
        support.options.resolve_device("cuda:2", "auto")
    assert support.options.resolve_device("auto", "auto") == ("cuda", "bfloat16")
    assert support.options.resolve_device("cuda:1", "auto") == ("cuda:1", "bfloat16")
    assert (
        support.options.resolve_device("cuda", "float32") == ("cuda", "float32")
        and support.options.resolve_device("cpu", "auto")[1] == "float32"
    )


# ---------------------------------------------------------------- lines and files
def test_numbers_are_written_as_json_can_hold_them(tmp_path):
    assert support.files.to_json_number(0.123456789) == 0.123457
    assert support.files.to_json_number(float("nan")) is None and support.files.to_json_number(float("-inf")) is None
    support.files.Lines(tmp_path / "a").write({"x": float("inf"), "y": 1 / 3, "z": 12345678, "n": None})
    assert (tmp_path / "a").read_text() == '{"x": null, "y": 0.333333, "z": 12345678, "n": null}\n'


def test_writing_is_atomic_also_for_two_processes_at_once(tmp_path):
    path = tmp_path / "file.json"
    support.files.write_json(path, {"a": 1})

    def crash(file):
        file.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        support.files.write_atomically(path, crash)
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    names = []
    for _ in range(2):  # a folder that a killed process of the same number has left is no obstacle
        stale = tmp_path / f".folder.{os.getpid()}.unfinished"
        stale.mkdir()
        (stale / "stale").write_text("of a killed process")
        support.files.write_atomically(tmp_path / "folder", lambda folder: names.append(folder.name) or folder.mkdir())
        assert (tmp_path / "folder").is_dir() and not (tmp_path / "folder/stale").exists()
    child = os.fork()
    if not child:
        support.files.write_atomically(path, lambda file: file.write_text(file.name))
        os._exit(0)
    os.waitpid(child, 0)
    assert str(child) in path.read_text() and str(os.getpid()) in names[0]


def whole_lines(path: Path, count: int = 3) -> support.files.Lines:
    lines = support.files.Lines(path)
    for number in range(count):
        lines.write({"step": number + 1, "update": 1})
    return lines


class HalfWritten:
    """An unbuffered file whose disk is full in the middle of a line."""

    def __init__(self, file):
        self.file = file

    def write(self, content: bytes) -> int:
        return self.file.write(content[: len(content) // 2])

    def __getattr__(self, name):
        return getattr(self.file, name)


def check_whole(path: Path, before: bytes) -> None:
    assert path.read_bytes() == before
    assert [line["step"] for line in support.run_folder.read_metrics(path)] == [1, 2, 3]


def test_half_a_line_is_cut_off_again_and_the_error_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = whole_lines(path)
    before, lines.file = path.read_bytes(), HalfWritten(lines.file)
    with pytest.raises(OSError, match="metrics.jsonl: no room for another line .is the disk full"):
        lines.write({"step": 4, "update": 1})
    check_whole(path, before)
    lines.file = lines.file.file
    lines.write({"step": 4, "update": 1})
    assert len(support.run_folder.read_metrics(path)) == 4


def test_a_file_that_may_not_grow_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = whole_lines(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))
        for _ in range(2):  # the first writes nine bytes, then there is an error at once
            with pytest.raises(OSError, match="no room for another line"):
                lines.write({"step": 4, "update": 1})
            check_whole(path, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_disk_that_is_full_the_lines_before_stay_whole(tmp_path):
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path / "disk"], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        path = tmp_path / "disk/metrics.jsonl"
        lines, count = support.files.Lines(path), 0
        with pytest.raises(OSError, match="no room for another line"):
            for count in range(1000):
                lines.write({"step": count + 1, "update": 1, "text": "x" * 100})
        assert 50 < count < 200 and [line["step"] for line in support.run_folder.read_metrics(path)] == list(
            range(1, count + 1)
        )
        with pytest.raises(OSError):
            support.files.write_json(tmp_path / "disk/final.json", ["x" * 10000])
        assert not (tmp_path / "disk/final.json").exists()
        lines.file.close()
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


def test_a_damaged_line_is_named_and_none_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = whole_lines(path).path.read_bytes()
    for content, number in ((whole[:-9], 3), (whole.replace(b'"step": 2', b'"step" 2'), 2), (b"\0" * 30 + whole, 1)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"metrics.jsonl, line {number} is damaged"):
            support.run_folder.read_metrics(path)
    path.write_bytes(whole[:-9])
    assert support.run_folder.read_metrics(path, unfinished=True) == [{"step": 1, "update": 1}, {"step": 2, "update": 1}]
    path.write_bytes(whole[:-1])  # all but its end: it may have been longer
    assert len(support.run_folder.read_metrics(path, unfinished=True)) == 2
    path.write_bytes(whole.replace(b'"step": 2', b'"step" 2'))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        support.run_folder.read_metrics(path, unfinished=True)


WHOLE = [(1, 0), (2, 1), (2, 2), (3, 0), (4, 1), (4, 2), (5, 1)]


@pytest.mark.parametrize(
    "keys, number",
    [
        (WHOLE, None),
        ([], None),
        (WHOLE[1:], 1),
        (WHOLE[:1] + WHOLE, 2),  # step 1 twice
        (WHOLE[:2] + WHOLE[1:], 3),  # update 1 of step 2 twice
        (WHOLE + WHOLE[4:], 8),  # two processes
        (WHOLE[:3], None),
        (WHOLE[:2] + WHOLE[3:], 3),  # the line itself says that there was another update
        (WHOLE[:5] + WHOLE[6:], 6),
        (WHOLE[:3] + WHOLE[4:], 4),  # step 3 is missing
        ([(1, 0), (1, 1)], 2),
        ([(1, 2)], 1),
        ([(1, 1), (1, 3)], 2),
        ([(1, 1), (2, 2)], 2),
        ([(0, 1)], 1),
        ([(2, 1)], 1),
    ],
)
def test_metrics_with_updates_twice_or_missing_are_refused_by_name(tmp_path, keys, number):
    path = tmp_path / "metrics.jsonl"
    planned = {1: 0, 2: 2, 3: 0, 4: 2}  # updates of a step; the last one is being made
    lines = [{"step": step, "update": update, "updates": planned.get(step, update)} for step, update in keys]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if number is None:
        assert [(line["step"], line["update"]) for line in support.run_folder.read_metrics(path)] == keys
    else:
        with pytest.raises(ValueError, match=f"metrics.jsonl, line {number}: .*missing or there twice"):
            support.run_folder.read_metrics(path)


# ---------------------------------------------------------------- a folder
def test_a_changed_configuration_is_refused_by_name_and_a_finished_folder_is_not_overwritten(tmp_path):
    folder, config = tmp_path / "bapo@3-seed0", make_run(tmp_path).config
    support.run_folder.prepare_folder(folder, config, resume=False)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"] == config and saved["versions"].keys() == {"python", "torch", "transformers"}
    support.run_folder.prepare_folder(folder, config, resume=False)  # interrupted before its first line: nothing to lose
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        support.run_folder.prepare_folder(folder, config, resume=False)
    with pytest.raises(ValueError, match=r"group_size: 4 there, 16 now; learning_rate: 0.01 there, 0.5 now"):
        support.run_folder.prepare_folder(folder, config | {"learning_rate": 0.5, "group_size": 16}, resume=True)
    with pytest.raises(ValueError, match="low_max"):
        support.run_folder.prepare_folder(folder, config | {"search": config["search"] | {"low_max": 0.94}}, resume=True)
    support.run_folder.prepare_folder(folder, config | {"checkpoint_every": 7}, resume=True)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="learning_rate: None there, 0.01 now"):  # in whatever way it was made
        support.run_folder.prepare_folder(folder, config, resume=True)


def crashed(folder, policy, monkeypatch, at: int = 4, **options) -> None:
    """A run that ended in step `at`."""
    order = train.prompts_of_step

    def crash(rows, step, *rest):
        if step == at:
            raise KeyboardInterrupt
        return order(rows, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "prompts_of_step", crash)
        with pytest.raises(KeyboardInterrupt):
            go(folder, policy, **options)


def test_a_checkpoint_is_a_run_also_without_its_metrics(tmp_path, policy, monkeypatch):
    options = dict(method="grpo@1", checkpoint_every=2)
    crashed(tmp_path, policy, monkeypatch, **options)
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.unlink()
    with pytest.raises(ValueError, match="learning_rate: 0.01 there, 0.5 now"):
        go(tmp_path, policy, learning_rate=0.5, **options)
    with pytest.raises(ValueError, match="holds a run already"):
        support.run_folder.prepare_folder(tmp_path, make_run(tmp_path, **options).config, resume=False)
    for content in (b"", whole[:300]):
        metrics.write_bytes(content)
        with pytest.raises(ValueError, match=rf"metrics.jsonl has {len(content)} bytes, its checkpoint was made at"):
            go(tmp_path, policy, **options)
        assert metrics.read_bytes() == content  # nothing is padded
    metrics.write_bytes(b"x" + whole[1:])
    with pytest.raises(ValueError, match="metrics.jsonl, line 1 is damaged"):
        go(tmp_path, policy, **options)
    metrics.write_bytes(whole)
    assert len(go(tmp_path, policy, **options)) == 4


def test_a_longer_run_equals_one_that_was_never_shorter_byte_for_byte(tmp_path, policy, monkeypatch):
    go(tmp_path / "short", policy, steps=2, checkpoint_every=5)
    short = (tmp_path / "short/final.json").read_bytes()
    assert go(tmp_path / "short", policy, steps=2) and (tmp_path / "short/final.json").read_bytes() == short
    go(tmp_path / "whole", policy, steps=5)
    crashed(tmp_path / "short", policy, monkeypatch, steps=5)
    assert not (tmp_path / "short/final.json").exists()  # it would be taken for the result of what is there by now
    with pytest.raises(ValueError, match="steps: .*short has 3 already, more than 2"):
        go(tmp_path / "short", policy, steps=2)
    go(tmp_path / "short", policy, steps=5)
    for name in ("metrics.jsonl", "final.json", "config.json", "model/model.safetensors"):
        assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    with pytest.raises(ValueError, match="steps: .*short has 5 already, more than 4"):
        go(tmp_path / "short", policy, steps=4)
    (tmp_path / "short/model/state.pt").unlink()
    with pytest.raises(ValueError, match="state.pt is gone, without which the run cannot be made longer"):
        go(tmp_path / "short", policy, steps=6)
    assert len(go(tmp_path / "short", policy, steps=5)) == 15  # but it is still the result


def test_a_crash_at_the_very_end_loses_nothing_and_leftovers_are_removed(tmp_path, policy, monkeypatch):
    replace, rmtree = os.replace, shutil.rmtree

    def crash_at_the_end(source, target):
        if Path(target).name == "model":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash_at_the_end)
    monkeypatch.setattr(shutil, "rmtree", lambda folder: None)  # as if killed before the old checkpoint is removed
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, policy)
    final = (tmp_path / "final.json").read_bytes()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 4
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3/state.pt").unlink()  # removal had begun
    (tmp_path / ".checkpoint-4.77.unfinished").mkdir()
    (tmp_path / "error.txt").write_text("of an earlier attempt")
    lines = go(tmp_path, policy)  # nothing is left to train
    assert not list(tmp_path.glob("checkpoint-*")) and not list(tmp_path.glob(".*")) and not (tmp_path / "error.txt").exists()
    assert (tmp_path / "final.json").read_bytes() == final and lines[-1]["step"] == 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_the_newest_checkpoint_is_the_one_of_the_last_step_and_the_only_one(tmp_path, policy, monkeypatch):
    assert support.run_folder.newest_checkpoint(tmp_path) is None and support.run_folder.steps_done(tmp_path) == 0
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert (
        support.run_folder.newest_checkpoint(tmp_path).name == "checkpoint-10" and support.run_folder.steps_done(tmp_path) == 10
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.checkpoint-1.77.unfinished").mkdir()  # of a process that was killed
    crashed(tmp_path / "run", policy, monkeypatch, method="grpo@1")
    assert [path.name for path in tmp_path.glob("run/*checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.parametrize(
    "more, named",
    [
        ("--max_new_tokens 7", "max_new_tokens: 13 there, 7 now"),
        ("--temperature 0.9", "temperature: 1.0 there, 0.9 now"),
        ("--learning_rate 0.5", "learning_rate: 0.0004 there, 0.5 now"),
        ("--steps 3", "steps: 2 there, 3 now"),
        ("--warm_start_steps 4", "warm_start_steps: 100 there, 4 now"),
        ("--partial_budget 2", "partial_budget: 0 there, 2 now"),
    ],
)
def test_arms_that_cannot_be_compared_do_not_share_a_folder(tmp_path, few, more, named):
    output = tmp_path / "runs"
    run = output / "grpo@1-start0-seed0"
    options = train.Options(**support.options.parse(train.Options, [*COMMAND, "--methods", "grpo@1"], ""))
    (first,) = train.make_runs(options, train.Task(*few_problems(), countdown.grade))
    support.run_folder.prepare_folder(run, first.config, resume=False)
    other = ["--methods", "bapo@1", "--seeds", "7", "--rho0", "0.4", "--output_dir", str(output)]
    with pytest.raises(ValueError, match=f"grpo@1-start0-seed0 was made in another setting .*{named}"):
        train.main([*COMMAND, *other, *more.split()])
    assert [path.name for path in output.iterdir()] == [run.name]
    # And where somebody puts them into one folder, they share no table.
    whole_lines(run / "metrics.jsonl")
    name, _, value = more.removeprefix("--").partition(" ")
    other = output / "bapo@1-start0-seed0"
    shutil.copytree(run, other)
    changed = first.config | {"arm": "bapo@1", name: json.loads(value)}
    support.files.write_json(other / "config.json", {"config": changed, "versions": {}})
    with pytest.raises(ValueError, match=f"differ in more than arm.*{name}"):
        plot.load(output)


def test_what_a_start_reached_is_not_taken_over_from_runs_that_are_gone(output, here, few):
    path = Path(output) / "start0.json"
    path.parent.mkdir()
    path.write_text('{"greedy": 77}')
    words = [*COMMAND, "--methods", "grpo@1", "--output_dir", output]
    assert train.main(words) == 0
    assert "77" not in path.read_text() and "mean@16" in path.read_text()
    path.write_text('{"greedy": 1, "mean@16": 0.77, "pass@8": 1, "pass@16": 1}')
    assert train.main([*words, "--seeds", "1"]) == 0
    assert "0.77" in path.read_text()  # with a run beside it, it is that run's


# ---------------------------------------------------------------- locks
@pytest.fixture
def held():
    """Locks a file from another process until it is told to let go."""
    holders = []

    def hold(path: Path) -> subprocess.Popen:
        path.parent.mkdir(parents=True, exist_ok=True)
        code = f"import filelock, sys; lock = filelock.FileLock({str(path)!r}); lock.acquire(); "
        code += "print('held', flush=True); sys.stdin.read()"
        holders.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert holders[-1].stdout.readline() == b"held\n"
        return holders[-1]

    yield hold
    for holder in holders:
        holder.stdin.close()
        holder.wait(timeout=60)


def test_a_folder_in_which_another_process_writes_is_refused_and_left_alone(output, policy, monkeypatch, held, here, few):
    monkeypatch.setattr(support.files, "LOCK_S", 0.2)
    folder = Path(output) / "grpo@1-start0-seed0"
    holder = held(folder / "lock")
    words = [*COMMAND, "--methods", "grpo@1", "--output_dir", output, "--resume"]
    with pytest.raises(ValueError, match=f"{folder}: another process is writing there"):
        train.main(words)
    with pytest.raises(ValueError, match="another process is writing there"):
        train.carry_out(make_run(folder, policy), make_task())
    assert [path.name for path in folder.iterdir()] == ["lock"]
    holder.kill()  # the lock dies with its holder
    holder.wait()
    assert train.main(words) == 0


def test_a_second_process_waits_for_the_warm_start_and_says_so(tmp_path, held, capsys):
    folder = tmp_path / "attempts1-steps3-seed0"
    holder = held(tmp_path / "attempts1-steps3-seed0.lock")
    say = support.workers.say

    def let_go(text, *rest):
        holder.stdin.close()
        say(text, *rest)

    support.workers.say, before = let_go, time.monotonic()
    try:
        assert support.warm_starts.warm_start(folder, attempts=1, steps=3) == folder
    finally:
        support.workers.say = say
    assert time.monotonic() - before < 60
    assert capsys.readouterr().out == f"waiting for another process, which is making {folder}\n"


# ---------------------------------------------------------------- what is printed
def test_without_a_terminal_there_is_a_plain_line_now_and_then_with_the_time_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(support.workers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    progress = support.workers.Progress(60, "steps", done=10)
    for _ in range(40):
        now[0] += 10
        progress.update(1, "a note")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10  # 400 s, a line once more than half a minute has gone
    # 46 steps of 10 s; the ten that were there took no time
    assert lines[0].split("|")[0] == "steps:  23%" and "14/60 [00:40<07:40, 10.00s/it, a note]" in lines[0]
    assert "50/60 [06:40<01:40, 10.00s/it, a note]" in lines[-1]


def test_what_nobody_reads_any_more_is_not_printed_and_the_other_stream_goes_on(monkeypatch, capsys):
    class Gone:
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def flush(self):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for name, other in (("stdout", "stderr"), ("stderr", "stdout")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, Gone())
            for _ in range(2):
                support.workers.say("lost", getattr(sys, name))
            assert sys.stdout is not sys.stderr
            support.workers.say("read", getattr(sys, other))
            getattr(sys, name).close()
        assert getattr(capsys.readouterr(), other.replace("std", "")) == "read\n"


def no_group_is_kept(response: str, answer: str) -> bool:
    return False


def test_a_warning_says_when_nothing_is_trained_for_long_and_the_command_fails(
    tmp_path, output, policy, monkeypatch, here, few, capsys
):
    said = []
    monkeypatch.setattr(support.workers, "report", lambda note, steps=0: said.append(note) if not steps else None)
    monkeypatch.setattr(support.run_folder, "IDLE_STEPS", 3)
    go(tmp_path / "never", policy, grade=no_group_is_kept, steps=7)
    assert said == [
        f"never: nothing to train on in the last {idle} steps: the rewards of every group are all equal" for idle in (3, 6)
    ]
    said.clear()
    order, steps = train.prompts_of_step, []
    with monkeypatch.context() as patch:
        patch.setattr(train, "prompts_of_step", lambda rows, step, *rest: steps.append(step) or order(rows, step, *rest))
        for only, count in ((3, 5), (1, 4)):  # counted from the last step that was trained on
            assert not said
            go(tmp_path / str(only), policy, grade=lambda r, a, only=only: steps[-1] == only and even_length(r, a), steps=count)
    assert said == ["1: nothing to train on in the last 3 steps: the rewards of every group are all equal"]
    said.clear()
    go(tmp_path / "always", policy, steps=7)
    assert not said
    monkeypatch.setattr(countdown, "grade", no_group_is_kept)
    words = [*COMMAND, "--steps", "3", "--methods", "grpo@1", "--output_dir", output]
    assert train.main(words) == 1
    printed = capsys.readouterr()
    assert "nothing was trained" in printed.err and "| grpo@1 | 1" in printed.out and len(said) == 1
    assert train.main([*words, "--resume"]) == 1
    assert train.main([*words, "--resume", "--seeds", "0", "1"]) == 1


# ---------------------------------------------------------------- side by side, and whole commands
def test_starts_come_first_then_the_longest_runs_and_what_is_there_is_not_made_again(output, few, monkeypatch):
    calls = []

    def side_by_side(work, jobs, steps=0, what="steps", meanwhile=None):
        calls.append((list(work), jobs, steps, what))
        return {}

    monkeypatch.setattr(train, "run_side_by_side", side_by_side)
    words = [*COMMAND, "--methods", "grpo@1", "bapo@4", "grpo@2", "--warm_starts", "0", "1", "--output_dir", output]
    assert train.main([*words, "--jobs", "3"]) == 1  # nothing came of it
    names = [f"{arm}-start{start}-seed0" for arm in ("bapo@4", "grpo@2", "grpo@1") for start in (0, 1)]
    assert calls == [
        ([START.replace("seed0", "seed1")], 3, 100, "warm start"),
        (["start0", "start1", *names], 3, 12, "steps"),
    ]
    calls.clear()
    (Path(output) / "start0.json").write_text("{}")
    shutil.copytree(Path(output).parent / "warm-starts" / START, Path(output) / names[0] / "checkpoint-1")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert train.main([*words, "--resume"]) == 1
    assert calls[1] == (["start1", *names], 5, 11, "steps")
    assert train.main([*words, "--resume", "--jobs", "1", "--steps", "3"]) == 1 and calls[-1][1:3] == (1, 17)


def test_one_failed_run_makes_the_command_fail_but_not_the_table(output, here, few, monkeypatch, capsys):
    carry_out = train.carry_out

    def fail_once(run, task):
        if run.arm.arm == "grpo@1":
            raise RuntimeError("out of memory")
        carry_out(run, task)

    monkeypatch.setattr(train, "carry_out", fail_once)
    words = [*COMMAND, "--methods", "grpo@1", "bapo@2", "--output_dir", output]
    assert train.main(words) == 1
    assert "| bapo@2 | 1 |" in capsys.readouterr().out
    monkeypatch.setattr(train, "carry_out", carry_out)
    assert train.main([*words, "--resume"]) == 0


def test_without_a_warm_start_nothing_is_begun(tmp_path, here, few, monkeypatch, capsys):
    monkeypatch.setattr(countdown, "supervise", lambda *settings: 1 / 0)
    assert train.main([*COMMAND, "--methods", "grpo@1", "--output_dir", str(tmp_path / "runs")]) == 1
    assert "division by zero" in capsys.readouterr().out and not list(tmp_path.glob("runs/*/metrics.jsonl"))


WORK = """
import os, signal
import runs, torch

def fail(text):
    support.workers.report("a word on the way")
    raise KeyError(text)

def succeed(path):
    support.workers.report("half", steps=1)
    path.write_text(f"{torch.get_num_threads()} {signal.getsignal(signal.SIGINT) == signal.SIG_IGN}")
    support.workers.report("whole", steps=1)
    support.workers.report("the last word")
"""


def test_a_failed_run_leaves_its_traceback_and_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(support.workers, "LINE_S", 0)
    import some_work

    work = {"a run": (tmp_path, some_work.fail, "deep"), "full": (tmp_path / "gone", some_work.fail, "x")}
    work["another"] = (tmp_path, some_work.succeed, tmp_path / "done")
    monkeypatch.setattr(support.workers, "MEANWHILE_S", 0)
    drawn = []
    failures = support.workers.run_side_by_side(work, 1, steps=2, meanwhile=lambda: drawn.append(1) or drawn[1])
    assert list(failures) == ["a run", "full"] and isinstance(failures["a run"], KeyError)
    printed = capsys.readouterr()
    assert f"a run: KeyError: 'deep' (traceback: {tmp_path / 'error.txt'})\n" in printed.out and "another: done" in printed.out
    trace = (tmp_path / "error.txt").read_text()
    assert trace.rstrip().endswith("KeyError: 'deep'") and "in fail" in trace and "raise KeyError(text)" in trace
    assert (tmp_path / "done").read_text() == "1 True"  # one thread each; Ctrl-C is for the parent
    assert "a word on the way" in printed.out and "the last word" in printed.out
    assert "steps: 100%" in printed.err and ", whole]\n" in printed.err and "\r" not in printed.err
    assert "raise KeyError(text)" in printed.out  # of "full": where it cannot be kept, it is printed
    assert len(drawn) > 1 and printed.err.count("no picture yet: list index out of range") == 1  # the first time it failed
    assert support.workers.run_side_by_side({}, 1) == {}


# ---------------------------------------------------------------- whole commands
def nursery() -> None:
    """The life of a process that has imported everything and forks what the tests ask for: a second each instead of ten. It
    never computes anything itself, as a process that has computed a gradient must not fork."""
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            child, status = os.waitpid(request["reap"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if child else None), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            return grow_up(**request)


def grow_up(call: str, arguments: list, few: bool, stdout: str, stderr: str) -> None:
    """What a shell does for a new command. SIGINT as in a terminal, whatever the tests have inherited."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    support.workers.get_context = lambda method: multiprocessing.get_context("fork")
    if few:
        countdown.problems, plot.report, support.files.LOCK_S = few_problems, table_alone, 0.1
    globals()[call](*arguments)


def command_line(*words: str) -> None:
    os.chdir(ROOT)
    sys.argv = ["train.py", *words]
    runpy.run_path("train.py", run_name="__main__")


def run_to_be_killed(folder: str, policy: str, steps: int) -> None:
    go(folder, policy, method="bapo@2", checkpoint_every=3, steps=steps)


class Started:
    """A process that the nursery has forked."""

    def __init__(self, ask, pid: int):
        self.ask, self.pid, self.returncode = ask, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.ask({"reap": self.pid})
        return self.returncode

    def wait(self, seconds: float = 300) -> int:
        wait_for(lambda: self.poll() is not None, seconds)
        return self.returncode


@pytest.fixture(scope="session")
def ask():
    """Sends a request to the nursery and returns its answer."""
    code, environment = "import test_runs; test_runs.nursery()", os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:

        def request(content: dict):
            process.stdin.write(json.dumps(content) + "\n")
            return json.loads(process.stdout.readline())

        yield request
        process.stdin.close()


@pytest.fixture
def started(ask, tmp_path):
    """Starts a command, or another call; nothing that was started outlives the test."""
    processes = []

    def start(*arguments, call="command_line", few=True, stdout=tmp_path / "out", stderr=tmp_path / "err") -> Started:
        request = dict(call=call, arguments=arguments, few=few, stdout=str(stdout), stderr=str(stderr))
        processes.append(Started(ask, ask(request)))
        return processes[-1]

    yield start
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it never came"
        time.sleep(0.005)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def running(group: int) -> bool:
    """Whether any process of the group is left, but for those that have ended and wait for their parent."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout.splitlines()
    return any(line.split()[0] == str(group) and not line.split()[1].startswith("Z") for line in found)


def read_a_little(path: Path) -> None:
    """`head -c 100` of what a process writes into a pipe."""
    with open(path, "rb", buffering=0) as pipe:
        found = b""
        while len(found) < 100:
            found += pipe.read(100 - len(found))


def same_results(
    one: Path, other: Path, names=("metrics.jsonl", "final.json", "config.json", "model/model.safetensors")
) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_the_command_ends_with_all_files_and_can_be_repeated_with_resume(tmp_path, output, here, capsys):
    """The only test with the processes as they are; the others fork theirs."""
    arms = ["bapo-main@1x2", "balanced@8"]
    words = [*COMMAND, "--output_dir", output, "--jobs", "1", "--methods", *arms]
    done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for name in [f"{arm}-start0-seed0" for arm in arms]:
        for file in ("config.json", "metrics.jsonl", "timings.jsonl", "final.json", "model/config.json"):
            assert (tmp_path / "runs" / name / file).exists(), (name, file)
    assert (tmp_path / "runs/curves.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "runs/table.md").read_text()
    assert all(f"| {arm} | 1 |" in table for arm in arms) and table.strip() in done.stdout
    assert not [path for path in tmp_path.rglob(".*")]  # no temporary files
    assert "\r" not in done.stdout + done.stderr and "\x1b" not in done.stdout + done.stderr  # no terminal, no bars

    with pytest.raises(ValueError, match="--resume"):
        train.main(words)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.json*")}
    assert train.main([*words, "--resume"]) == 0 and table.strip() in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.json*")}
    # A run's numbers do not depend on the processes around it.
    (run,) = (
        r
        for r in train.make_runs(train.Options(**support.options.parse(train.Options, words, "")), countdown_task())
        if r.arm.share
    )
    alone = run._replace(folder=tmp_path / "alone")
    support.run_folder.prepare_folder(alone.folder, alone.config, resume=False)
    train.carry_out(alone, countdown_task())
    same_results(alone.folder, run.folder)


def countdown_task() -> train.Task:
    return train.Task(*countdown.problems(), countdown.grade)


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path, policy, started):
    """KILLS=30 KILL_STEPS=100 in the environment: for longer."""
    kills, steps = int(os.environ.get("KILLS", 4)), int(os.environ.get("KILL_STEPS", 12))
    run_to_be_killed(tmp_path / "whole", policy, steps)
    total, rng, file = lines_of(tmp_path / "whole/metrics.jsonl"), random.Random(0), tmp_path / "killed/metrics.jsonl"
    for kill in range(kills):
        enough, delay = total * (kill + rng.random()) / (kills + 0.5), rng.uniform(0, 0.03)
        process = started(str(tmp_path / "killed"), policy, steps, call="run_to_be_killed", few=False)
        wait_for(lambda enough=enough: lines_of(file) > enough)
        time.sleep(delay)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    run_to_be_killed(tmp_path / "killed", policy, steps)
    same_results(tmp_path / "killed", tmp_path / "whole")
    assert not [path for path in (tmp_path / "killed").iterdir() if "checkpoint" in path.name or "unfinished" in path.name]


def test_two_processes_in_one_folder_and_on_one_warm_start_do_no_harm(tmp_path, started, here, few):
    words = [*COMMAND, "--methods", "grpo@1", "bapo@2", "grpo@2", "--steps", "4", "--jobs", "2"]
    for more in ([], ["--resume"]):  # two fresh starts, then two continuations of what they have left
        both = [started(*words, "--output_dir", str(tmp_path / "both/runs"), *more) for _ in range(2)]
        assert all(process.wait() in (0, 1) for process in both)
    printed = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    assert not [bad for bad in ("Traceback", "not empty", "No such file") if bad in printed], printed
    assert train.main([*words, "--output_dir", str(tmp_path / "both/runs"), "--resume"]) == 0
    assert train.main([*words, "--output_dir", str(tmp_path / "alone/runs")]) == 0
    for arm in ("grpo@1", "bapo@2", "grpo@2"):
        same_results(*(tmp_path / folder / f"runs/{arm}-start0-seed0" for folder in ("both", "alone")))
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_killed_command_takes_its_workers_along_and_resumed_equals_uninterrupted(tmp_path, output, started, here, few):
    words = [*COMMAND, "--methods", "grpo@2", "bapo@2", "--jobs", "2", "--steps", "40", "--output_dir"]
    process = started(*words, output)
    folders = [Path(f"{arm}@2-start0-seed0") for arm in ("grpo", "bapo")]
    wait_for(lambda: all(lines_of(Path(output) / folder / "metrics.jsonl") > 7 for folder in folders))
    os.kill(process.pid, signal.SIGKILL)  # the parent alone, as the out-of-memory killer does
    process.wait()
    wait_for(lambda: not running(process.pid), 60)  # nobody of its group is left to write
    assert not any((Path(output) / folder / "final.json").exists() for folder in folders)
    assert train.main([*words, output, "--resume"]) == 0
    assert train.main([*words, str(tmp_path / "whole")]) == 0
    for folder in folders:
        same_results(Path(output) / folder, tmp_path / "whole" / folder)


def test_it_goes_on_when_nobody_reads_its_output_and_ctrl_c_ends_all_runs_and_says_how_to_go_on(tmp_path, output, started):
    """`train.py | head -c 100`, then Ctrl-C."""
    words = [*COMMAND, "--steps", "5000", "--methods", "grpo@2", "bapo@2", "--jobs", "2", "--seeds", "0", "1"]
    os.mkfifo(tmp_path / "pipe")
    process = started(*words, "--output_dir", output, stdout=tmp_path / "pipe")
    read_a_little(tmp_path / "pipe")
    files = [tmp_path / f"runs/{arm}@2-start0-seed0/metrics.jsonl" for arm in ("grpo", "bapo")]
    wait_for(lambda: (tmp_path / "runs/start0.json").exists())  # of which a word is printed
    wait_for(lambda: all(lines_of(file) > 12 for file in files))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    assert process.wait() == 130
    stderr = (tmp_path / "err").read_text()
    assert "--resume" in stderr and "Traceback" not in stderr and "Error" not in stderr
    wait_for(lambda: not running(process.pid), 60)
    for file in files:
        assert support.run_folder.read_metrics(file)  # whole lines
        (checkpoint,) = file.parent.glob("checkpoint-*")
        torch.load(checkpoint / "state.pt", weights_only=True)
    assert not list(tmp_path.glob("runs/*-seed1/metrics.jsonl"))  # the runs that were waiting did not start


def test_ctrl_c_during_the_warm_start_says_how_to_go_on_and_leaves_nothing_partial(tmp_path, started):
    words = [*COMMAND, "--warm_start_steps", "1000000", "--methods", "grpo@1", "--output_dir", str(tmp_path / "runs")]
    process = started(*words)
    wait_for(lambda: list(tmp_path.glob("warm-starts/*.lock")))
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    stderr = (tmp_path / "err").read_text()
    assert "--resume" in stderr and "Traceback" not in stderr
    wait_for(lambda: not running(process.pid), 60)
    assert [path.suffix for path in (tmp_path / "warm-starts").iterdir()] == [".lock"]


def test_it_goes_on_or_stops_when_nobody_reads_its_errors_either(tmp_path, output, started, here, few):
    """`train.py 2>&1 | head -c 100`."""
    words = [*COMMAND, "--methods", "grpo@1", "--jobs", "1", "--output_dir", output]
    os.mkfifo(tmp_path / "pipe")
    process = started(*words, stdout=tmp_path / "pipe", stderr=tmp_path / "pipe")
    read_a_little(tmp_path / "pipe")
    process.wait()
    wait_for(lambda: not running(process.pid), 60)
    assert train.main([*words, "--resume"]) == 0  # wherever it stopped, nothing is damaged


@pytest.mark.parametrize("problem", ["a file", "no disk"])
def test_an_output_folder_that_cannot_be_made_takes_one_line(tmp_path, monkeypatch, capsys, problem):
    (tmp_path / "file").write_text("")
    output = {"a file": tmp_path / "file", "no disk": Path("/proc/nowhere/runs")}[problem]
    monkeypatch.setattr(sys, "argv", ["train.py", *COMMAND, "--output_dir", str(output)])
    with pytest.raises(SystemExit) as ended:
        support.workers.command("train.py", train.main)
    assert (
        str(ended.value).startswith("train.py: ") and f"'{output.parent}" in str(ended.value) and "\n" not in str(ended.value)
    )


def test_a_script_ends_with_its_status_or_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    line = "x.py: [Errno 28] No space left on device: 'metrics.jsonl'"
    for main, status in ((lambda: 3, 3), (interrupted, 130), (full, line)):
        with pytest.raises(SystemExit) as ended:
            support.workers.command("x.py", main, "how to go on")
        assert ended.value.code == status
    assert capsys.readouterr().err.strip() == "how to go on"
