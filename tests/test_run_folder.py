"""support/run_folder.py: a run's folder, what may be continued, and checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_train import go, make_run
from transformers import AutoModelForCausalLM

import train
from support import files, run_folder
from support.run_folder import prepare_folder, read_metrics

RESULTS = ["metrics.jsonl", "final.json", "config.json", "model/model.safetensors"]


def same_results(one: Path, other: Path, names=RESULTS) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


# ------------------------------------------------------------------------- metrics.jsonl
WHOLE = [(1, 0), (2, 1), (2, 2), (3, 0), (4, 1), (4, 2), (5, 1)]  # step, update


@pytest.mark.parametrize(
    "keys, damaged_line",
    [
        (WHOLE, None),
        ([], None),
        (WHOLE[:3], None),
        (WHOLE[1:], 1),
        (WHOLE[:1] + WHOLE, 2),  # step 1 twice
        (WHOLE[:2] + WHOLE[1:], 3),  # update 1 of step 2 twice
        (WHOLE + WHOLE[4:], 8),  # two processes
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
def test_metrics_with_updates_twice_or_missing_are_refused_by_name(tmp_path, keys, damaged_line):
    path = tmp_path / "metrics.jsonl"
    updates_of_step = {1: 0, 2: 2, 3: 0, 4: 2}  # of the last step, one by one as they are made
    with open(path, "w") as file:
        for step, update in keys:
            updates = updates_of_step.get(step, update)
            file.write(json.dumps({"step": step, "update": update, "updates": updates}) + "\n")
    if damaged_line is None:
        assert [(line["step"], line["update"]) for line in read_metrics(path)] == keys
    else:
        message = f"metrics.jsonl, line {damaged_line}: .*missing or there twice"
        with pytest.raises(ValueError, match=message):
            read_metrics(path)


# ------------------------------------------------------------------------- what may be continued
def test_a_changed_configuration_is_refused_by_name(tmp_path):
    folder = tmp_path / "bapo@3-seed0"
    config = make_run(tmp_path).config
    prepare_folder(folder, config, resume=False)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"] == config and saved["changed"] == []
    assert saved["versions"].keys() == {"python", "torch", "transformers"}
    prepare_folder(folder, config, resume=False)  # interrupted before its first line
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        prepare_folder(folder, config, resume=False)
    changed = config | {"learning_rate": 0.5, "group_size": 16}
    message = "group_size: 4 there, 16 now; learning_rate: 0.01 there, 0.5 now"
    with pytest.raises(ValueError, match=message):
        prepare_folder(folder, changed, resume=True)
    search = config["search"] | {"low_max": 0.94}
    with pytest.raises(ValueError, match="low_max"):
        prepare_folder(folder, config | {"search": search}, resume=True)
    prepare_folder(folder, config | {"checkpoint_every": 7}, resume=True)
    assert json.loads((folder / "config.json").read_text())["changed"] == []
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="learning_rate: None there, 0.01 now"):
        prepare_folder(folder, config, resume=True)  # nobody knows how it was made


def interrupted(folder: Path, policy: str, monkeypatch, at: int = 4, **options) -> None:
    """A run that ended in step `at`."""
    original = train.prompts_of_step

    def crash(rows, step, *rest):
        if step == at:
            raise KeyboardInterrupt
        return original(rows, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "prompts_of_step", crash)
        with pytest.raises(KeyboardInterrupt):
            go(folder, policy, **options)


def test_a_run_that_does_not_fit_may_go_on_in_less_memory_and_says_so(
    tmp_path, policy, monkeypatch
):
    """Kills: a run that ran out of memory at step 3 and cannot be rescued."""
    whole = go(tmp_path / "whole", policy)
    interrupted(tmp_path / "run", policy, monkeypatch, at=3)
    smaller = {"micro_batch_tokens": 60, "gradient_checkpointing": True}
    lines = go(tmp_path / "run", policy, **smaller)
    assert lines[:6] == whole[:6]  # two steps of three updates
    for line, expected in zip(lines, whole, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-3)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["config"]["micro_batch_tokens"] == 60
    assert saved["config"]["gradient_checkpointing"] is True
    expected = [
        {"step": 2, "option": "gradient_checkpointing", "from": False, "to": True},
        {"step": 2, "option": "micro_batch_tokens", "from": 8192, "to": 60},
    ]
    assert saved["changed"] == expected
    go(tmp_path / "run", policy, **smaller, steps=5)  # what was changed stays on record
    assert json.loads((tmp_path / "run/config.json").read_text())["changed"] == expected


def test_runs_that_differ_in_memory_alone_may_share_a_folder(tmp_path):
    output = tmp_path / "runs"
    config = make_run(tmp_path).config
    prepare_folder(output / "a", config, resume=False)
    smaller = {"micro_batch_tokens": 60, "gradient_checkpointing": True, "checkpoint_every": 9}
    run_folder.check_same_setting(output, config | smaller, own=set())
    with pytest.raises(ValueError, match="/a was made in another setting .steps: 4 there, 5 now"):
        run_folder.check_same_setting(output, config | {"steps": 5}, own=set())
    run_folder.check_same_setting(output, config | {"steps": 5}, own={output / "a"})


def test_an_output_folder_is_prepared_and_what_a_kill_has_left_goes(tmp_path, capsys):
    output = tmp_path / "runs"
    run = make_run(output / "run")
    run_folder.prepare_output(output, [run], resume=True)
    assert capsys.readouterr().out == (
        f"--resume: there is no {output}, so everything begins afresh\n"
    )
    assert (output / "run/config.json").exists()
    (output / ".start.json.4194305.unfinished").write_text("")  # a number that no process has
    (output / ".curves.png.4194305.unfinished").write_text("")
    (output / "error.txt").write_text("of an earlier command")
    (output / "start0.json").write_text("{}")
    run_folder.prepare_output(output, [run], resume=True)
    assert {path.name for path in output.iterdir()} == {"run", "start0.json"}
    assert capsys.readouterr().out == ""
    shutil.rmtree(output / "run")
    run_folder.prepare_output(output, [run], resume=False)
    assert [path.name for path in output.iterdir()] == [
        "run"
    ]  # the start was of runs that are gone


# ------------------------------------------------------------------------- checkpoints
def test_a_checkpoint_is_a_run_also_without_its_metrics(tmp_path, policy, monkeypatch):
    options = {"method": "grpo@1", "checkpoint_every": 2}
    interrupted(tmp_path, policy, monkeypatch, **options)
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.unlink()
    with pytest.raises(ValueError, match="learning_rate: 0.01 there, 0.5 now"):
        go(tmp_path, policy, learning_rate=0.5, **options)
    with pytest.raises(ValueError, match="holds a run already"):
        prepare_folder(tmp_path, make_run(tmp_path, **options).config, resume=False)
    for content in (b"", whole[:300]):
        metrics.write_bytes(content)
        message = rf"metrics.jsonl has {len(content)} bytes, its checkpoint was made at"
        with pytest.raises(ValueError, match=message):
            go(tmp_path, policy, **options)
        assert metrics.read_bytes() == content  # nothing is padded
    metrics.write_bytes(b"x" + whole[1:])
    with pytest.raises(ValueError, match="metrics.jsonl, line 1 is damaged"):
        go(tmp_path, policy, **options)
    metrics.write_bytes(whole)
    assert len(go(tmp_path, policy, **options)) == 4


def test_a_longer_run_equals_one_that_was_never_shorter_byte_for_byte(
    tmp_path, policy, monkeypatch
):
    short = tmp_path / "short"
    go(short, policy, steps=2, checkpoint_every=5)
    final = (short / "final.json").read_bytes()
    go(short, policy, steps=2)
    assert (short / "final.json").read_bytes() == final
    go(tmp_path / "whole", policy, steps=5)
    interrupted(short, policy, monkeypatch, steps=5)
    assert not (short / "final.json").exists()  # it would be taken for the longer run's
    with pytest.raises(ValueError, match="steps: .*short has 3 already, more than 2"):
        go(short, policy, steps=2)
    go(short, policy, steps=5)
    same_results(short, tmp_path / "whole")
    with pytest.raises(ValueError, match="steps: .*short has 5 already, more than 4"):
        go(short, policy, steps=4)
    (short / "model/state.pt").unlink()
    with pytest.raises(ValueError, match="state.pt is gone, without which the run cannot be made"):
        go(short, policy, steps=6)
    assert len(go(short, policy, steps=5)) == 15  # but it is still the result


def test_a_crash_at_the_very_end_loses_nothing_and_leftovers_are_removed(
    tmp_path, policy, monkeypatch
):
    replace = os.replace

    def crash_at_the_end(source, target):
        if Path(target).name == "model":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash_at_the_end)
        # As if it was killed before the old checkpoint is removed.
        patch.setattr(shutil, "rmtree", lambda folder: None)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, policy)
    final = (tmp_path / "final.json").read_bytes()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 4
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3/state.pt").unlink()  # removal had begun
    (tmp_path / ".checkpoint-4.77.unfinished").mkdir()
    (tmp_path / "error.txt").write_text("of an earlier attempt")
    lines = go(tmp_path, policy)  # nothing is left to train
    assert (tmp_path / "final.json").read_bytes() == final
    assert lines[-1]["step"] == 4
    for pattern in ("checkpoint-*", ".*", "error.txt"):
        assert not list(tmp_path.glob(pattern))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_the_newest_checkpoint_is_the_one_of_the_last_step_and_the_only_one(
    tmp_path, policy, monkeypatch
):
    assert run_folder.newest_checkpoint(tmp_path) is None
    assert run_folder.steps_done(tmp_path) == 0
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert run_folder.newest_checkpoint(tmp_path).name == "checkpoint-10"
    assert run_folder.steps_done(tmp_path) == 10
    run = tmp_path / "run"
    (run / ".checkpoint-1.77.unfinished").mkdir(parents=True)  # of a process that was killed
    interrupted(run, policy, monkeypatch, method="grpo@1")
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-3"]


def test_the_warning_counts_the_steps_since_the_last_that_was_trained_on(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(run_folder, "report", lambda note, steps=0: said.append((note, steps)))
    monkeypatch.setattr(run_folder, "IDLE_STEPS", 3)
    folder = tmp_path / "a run"
    folder.mkdir()
    names = ["metrics", "timings"]
    lines = {name: files.Lines(folder / f"{name}.jsonl") for name in names}
    trained_on = [False, True, False, False, False, False, False, False]
    for step, trained in enumerate(trained_on, 1):
        if trained:
            lines["metrics"].write({"step": step, "update": 1})
        log = {"step": step, "reward": 0.25, "entropy": 1.0}
        run_folder.write_step(folder, log, {"update_s": 0.5}, lines, trained)
    assert len(read_metrics(folder / "metrics.jsonl")) == 8
    assert files.read_lines(folder / "timings.jsonl")[7] == {"step": 8, "update_s": 0.5}
    assert [note for note in said if note[1]] == [("a run reward 0.25, entropy 1.00", 1)] * 8
    warnings = [note for note, steps in said if not steps]
    assert warnings == [
        f"a run: nothing to train on in the last {idle} steps: "
        "the rewards of every group are all equal, or, with partial rollouts, no group is finished"
        for idle in (3, 6)
    ]
