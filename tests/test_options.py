"""support/options.py: reading a command line, limits, what depends on the task and the machine."""

import dataclasses

import pytest
import torch

from bapo import ClipSearch
from support.options import Options, check_limits, option, parse, resolve_device
from support.suggest import likely


def parsed(*words: str) -> dict:
    return parse(Options, list(words), "")


# ------------------------------------------------------------------------- the command line
def test_every_kind_of_option_is_read():
    values = parsed(
        "--low", "0.7", "0.8", "--resume", "--methods", "a", "b", "--learning-rate=1e-3"
    )
    assert values["low"] == [0.7, 0.8]
    assert values["resume"] is True
    assert values["methods"] == ["a", "b"]
    assert values["learning_rate"] == 1e-3
    assert values["steps"] == 140
    assert values["gradient_checkpointing"] is False
    assert values["max_new_tokens"] is None


def test_the_defaults_are_those_of_the_dataclass_and_no_list_is_shared():
    values = parsed()
    options = Options()
    assert values.keys() == {field.name for field in dataclasses.fields(Options)}
    assert len(values) <= 32  # what fits into a reader's head
    assert values["high"] == options.high == [1.2, 2.0, 0.05]
    options.seeds.append(7)
    assert Options().seeds == [0]


@pytest.mark.parametrize(
    "words, meant",
    [
        (["--lr", "1"], "learning_rate"),
        (["--learnig_rate=1"], "learning_rate"),
        (["--learnig-rate", "1"], "learning_rate"),
        (["--modle", "x"], "model"),
        (["--rho", "0.4"], "rho0"),  # no abbreviation: it would begin another experiment
        (["--methods", "grpo", "--step", "3"], "steps"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(words, meant):
    with pytest.raises(ValueError, match=rf"unknown option --\S+: did you mean --{meant}\?$"):
        parsed(*words)


def test_an_unknown_option_like_no_other_is_refused_without_a_guess(capsys):
    with pytest.raises(ValueError, match="unknown option --zzz$"):
        parsed("--zzz")
    with pytest.raises(SystemExit):
        parsed("--steps", "many")
    assert "argument --steps: invalid int value: 'many'" in capsys.readouterr().err


def test_the_help_has_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse(Options, ["--help"], "line one\nline two")
    text = capsys.readouterr().out
    assert "line one\nline two\n" in text
    assert all(f"--{field.name}" in text for field in dataclasses.fields(Options))
    assert "target share of positive tokens in the loss (default:" in text


def test_a_required_option_is_asked_for(capsys):
    @dataclasses.dataclass(kw_only=True)
    class Group:
        _argument_group_name = "group"
        model: str = dataclasses.field(metadata={"help": "a model"})

    @dataclasses.dataclass
    class All(Group):
        pass

    assert parse(All, ["--model", "m"], "") == {"model": "m"}
    with pytest.raises(SystemExit):
        parse(All, [], "")
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, name",
    [
        ("bapoo", "bapo"),
        ("GRPO", "grpo"),
        ("bapo-mai", "bapo-main"),
        ("bm", "bapo-main"),
        ("cispos", "cispo"),
        ("adam", ""),
        ("", ""),
    ],
)
def test_a_mistyped_name_is_guessed(word, name):
    assert likely(word, ["grpo", "bapo", "bapo-main", "cispo"]) == name


# ------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    "given, message",
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"rate": 0.0}, "rate must be positive, got 0.0"),
        ({"rate": float("nan")}, "rate must be positive, got nan"),
        ({"rate": float("inf")}, "rate must be positive, got inf"),
        ({"count": float("nan")}, "count must be at least 1, got nan"),
        ({"ends": [1.0]}, r"ends takes 2 or 3 values, got \[1.0\]"),
    ],
)
def test_an_option_brings_its_limits(given, message):
    @dataclasses.dataclass
    class Some:
        count: int = option(1, "how many", at_least=1)
        rate: float = option(0.1, "how fast", positive=True)
        ends: list[float] = option([1.0, 2.0], "from, to", length=(2, 3))

    check_limits(Some())
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_limits(Some(**given))


# ------------------------------------------------------------------------- task and machine
def pretend_cuda(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_is_the_cpu_in_float32_without_a_gpu(monkeypatch):
    pretend_cuda(monkeypatch, 0)
    assert resolve_device("auto", "auto") == ("cpu", "float32")
    assert resolve_device("cpu", "bfloat16") == ("cpu", "bfloat16")
    with pytest.raises(ValueError, match="a CUDA device that is there, got 'cuda'"):
        resolve_device("cuda", "auto")


def test_auto_is_the_gpu_in_bfloat16_where_there_is_one(monkeypatch):
    pretend_cuda(monkeypatch, 2)
    assert resolve_device("auto", "auto") == ("cuda", "bfloat16")
    assert resolve_device("cuda:1", "auto") == ("cuda:1", "bfloat16")
    assert resolve_device("cuda", "float32") == ("cuda", "float32")
    assert resolve_device("cpu", "auto") == ("cpu", "float32")
    for wrong in ("cuda:2", "cuda:", "cuda:-1", "cudax", "tpu"):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            resolve_device(wrong, "auto")
    with pytest.raises(ValueError, match="precision must be auto, float32 or bfloat16"):
        resolve_device("cpu", "float16")


def test_countdown_is_float32_on_every_device_unless_asked_otherwise(monkeypatch):
    """Kills: bfloat16 on a GPU for the experiment whose numbers the front page has in float32."""
    pretend_cuda(monkeypatch, 1)
    assert Options().device == "cuda"
    assert Options().precision == "float32"
    assert Options(precision="bfloat16").precision == "bfloat16"
    assert Options(model="m", data="d").precision == "bfloat16"
    assert Options(model="m", data="d", device="cpu").precision == "float32"


def test_fewer_tokens_in_a_pass_are_fewer_tokens_that_are_drawn_together():
    assert Options().batch_tokens == 2**18
    assert Options(micro_batch_tokens=1024).batch_tokens == 2**15
    assert Options(micro_batch_tokens=2**16).batch_tokens == 2**18


def test_a_range_without_a_step_has_that_of_bapo_py():
    options = Options(rho0=0.4, low=[0.5, 0.9], high=[1.1, 1.5, 0.1])
    expected = ClipSearch(
        rho0=0.4,
        low_start=0.5,
        low_max=0.9,
        low_step=ClipSearch.low_step,
        high_start=1.1,
        high_max=1.5,
        high_step=0.1,
    )
    assert options.clip_search() == expected


def test_a_reward_without_data_is_refused():
    with pytest.raises(ValueError, match="reward goes with --data, .*reward='a.py:f'"):
        Options(reward="a.py:f")
