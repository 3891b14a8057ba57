"""countdown.py: the grader against hostile responses, the problems, the model and its start.

Starts that are interrupted: test_warm_starts.py.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from countdown import build_model, build_tokenizer, demonstration, grade, problems
from reward import Problem
from support import warm_starts
from support.warm_starts import warm_start

ANSWER = "348:44"
TINY = {"steps": 3, "attempts": 2}


@pytest.fixture(scope="module")
def tiny_start(tmp_path_factory) -> Path:
    """A warm start of TINY's settings, which no test changes."""
    return warm_start(tmp_path_factory.mktemp("starts") / "tiny", **TINY)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "response",
    [
        "3+8=11*4=44",
        "8+3=11*4=44",
        "4*8=32+3=35;3+8=11*4=44",
        ";3+8=11*4=44",
        "anything;3+8=11*4=44",
    ],
)
def test_grade_accepts(response):
    assert grade(response, ANSWER) is True


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1-9=-8+9=1", "199:01"),
        ("1*1=1*5=5", "115:05"),
        ("9*9=81+9=90", "999:90"),
        ("5-5=0+7=7", "557:07"),
    ],
)
def test_grade_accepts_negative_results_on_the_way_and_short_targets(response, answer):
    assert grade(response, answer) is True


@pytest.mark.parametrize(
    "response",
    [
        "",
        ";",
        "44",
        "=44",
        "4*8=32+3=35",  # correct, misses
        "3+8=11*4=44;",  # the last attempt is empty
        "3+8=11*4=44;4*8=32+3=35",  # only the last attempt counts
        "4*8=32+3=44",  # wrong result
        "3+8=12*4=44",  # wrong intermediate result
        "3+8=11*4=44=44",
        "3+8=11",
        "4+4=8*3=24+8=32",
        "4*3=12+4=16",  # 4 twice, no 8
        "9+2=11*4=44",  # other numbers
        "3+8*4=44",
        "44=4*11=3+8",
        "3+8=011*4=44",
        "3+8=11*4=044",
        "3+8=11*4=44.0",
        "3+8=11*4=+44",
        "3+8=11*4=4_4",
        "3+8=11*4=44 ",
        " 3+8=11*4=44",
        "3+8=11*4=44\n",
        "3 + 8 = 11 * 4 = 44",
        "3+8=1１*4=44",  # a full-width digit, which int() accepts
        "３+8=11*4=44",
        "3+8=11*4=٤٤",  # Arabic-Indic digits
        "3+8=11×4=44",
        "3+8=11**4=44",
        "348:44=3+8=11*4=44",  # the prompt repeated
        "3+8=11*4=44<eos>",
        "3+8=11*4=44\x00",
        "__import__('os')",
        "-0",
        "3-3=-0*8=0",
        "\ud800",  # not encodable
    ],
)
def test_grade_refuses(response):
    assert grade(response, ANSWER) is False


@pytest.mark.parametrize("piece", ["9", "3+8=11*4=44", ";", "-", "=", "3+8=", "9*", "\n"])
def test_grade_is_quick_on_long_responses(piece):
    response = piece * 1_000_000
    assert grade(response, ANSWER) is False
    assert grade(response + ";3+8=11*4=44", ANSWER) is True


def test_grade_never_raises_on_random_text():
    rng = random.Random(0)
    for _ in range(5000):
        response = "".join(rng.choices("0123456789+-*=:; \n", k=rng.randrange(40)))
        assert grade(response, ANSWER) in (True, False)


@pytest.mark.parametrize(
    "answer", ["", "348", "348:4", "340:44", "348:44=", "348:４4", "348:44\n", "3481:44"]
)
def test_grade_refuses_malformed_answers(answer):
    with pytest.raises(ValueError, match="answer is"):
        grade("3+8=11*4=44", answer)


def test_the_error_of_a_long_answer_is_short():
    with pytest.raises(ValueError, match="answer is") as raised:
        grade("", "9" * 100_000)
    assert len(str(raised.value)) < 300


def test_problems_are_disjoint_solvable_and_repeatable():
    train, held_out = problems()
    assert (len(train), len(held_out)) == (1604, 256)
    keys = set()
    for problem in train + held_out:
        digits, target = problem.answer.split(":")
        keys.add(("".join(sorted(digits)), int(target)))
        assert problem.prompt == problem.answer + "="
        solutions = countdown.attempts_by_value(digits)[int(target)]
        assert solutions
        assert all(grade(solution, problem.answer) for solution in solutions)
    assert len(keys) == 1860
    assert problems() == (train, held_out)
    assert problems(seed=1)[1] != held_out


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_demonstrations_are_right_as_often_as_stated(attempts):
    rng = random.Random(0)
    train, _ = problems()
    right = 0
    for problem in rng.choices(train, k=4000):
        text = demonstration(problem, rng, attempts)
        right += grade(text, problem.answer)
        *earlier, last = text.split(";")
        assert len(earlier) < attempts
        assert not any(grade(one, problem.answer) for one in earlier)
        by_value = countdown.attempts_by_value(problem.answer[:3])
        for one in (*earlier, last):  # a miss is correct arithmetic: it hits its own value
            value = int(one.rpartition("=")[2])
            assert one in by_value[value]
    assert right / 4000 == pytest.approx(1 - 0.5**attempts, abs=0.03)  # std: at most 0.008


def test_the_tokenizer_has_a_token_per_character_and_survives_its_folder(tmp_path):
    built = build_tokenizer()
    special = {built.pad_token_id, built.bos_token_id, built.eos_token_id, built.unk_token_id}
    assert len(special) == 4
    built.save_pretrained(tmp_path)
    response = "4*8=32+3=35;3-8=-5*4=-20"
    for tokenizer in (built, AutoTokenizer.from_pretrained(tmp_path)):
        prompt_ids = tokenizer("348:44=").input_ids
        assert len(prompt_ids) == countdown.PROMPT_TOKENS
        assert prompt_ids[0] == tokenizer.bos_token_id
        assert prompt_ids.count(tokenizer.bos_token_id) == 1

        ids = tokenizer(f"348:44={response}<eos>").input_ids
        assert ids[:8] == prompt_ids
        assert len(ids) == 8 + len(response) + 1
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[8:], skip_special_tokens=True) == response
        assert tokenizer.decode(ids) == f"<bos>348:44={response}<eos>"

        padded = tokenizer(["348:44=", "348:44=3"], padding=True, return_tensors="pt")
        assert padded.input_ids[0, 0] == tokenizer.pad_token_id
        assert padded.attention_mask[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1]
        unknown = tokenizer("x 3").input_ids
        assert tokenizer.convert_ids_to_tokens(unknown) == ["<bos>", "<unk>", "<unk>", "3"]


def test_model_knows_its_special_tokens_and_its_seed():
    tokenizer = build_tokenizer()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = build_model(tokenizer, seed=0)
    same = build_model(tokenizer, seed=0)
    other = build_model(tokenizer, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    weight = model.model.embed_tokens.weight
    assert torch.equal(weight, same.model.embed_tokens.weight)
    assert not torch.equal(weight, other.model.embed_tokens.weight)


# ---------------------------------------------------------------- the supervised start
def test_a_warm_start_repeats_moves_no_random_state_and_loads(tmp_path, tiny_start):
    torch.manual_seed(5)
    random.seed(5)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    again = warm_start(str(tmp_path / "deep" / "again"), **TINY)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert isinstance(again, Path)
    assert weights(again) == weights(tiny_start)
    settings = json.loads((again / "warm_start.json").read_text())
    assert settings == {"seed": 0, "attempts": 2, "steps": 3}

    tokenizer = AutoTokenizer.from_pretrained(again)
    model = AutoModelForCausalLM.from_pretrained(again)
    batch = tokenizer(["348:44=", "229:09="], return_tensors="pt")
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=4)
    assert tokens.shape[0] == 2
    assert 9 <= tokens.shape[1] <= 12


def test_a_warm_start_that_is_there_is_not_trained_again(tiny_start):
    changed = (tiny_start / "model.safetensors").stat().st_mtime_ns
    assert warm_start(tiny_start, **TINY) == tiny_start
    assert (tiny_start / "model.safetensors").stat().st_mtime_ns == changed


@pytest.mark.parametrize("setting", [{"seed": 1}, {"attempts": 3}, {"steps": 4}])
def test_every_setting_of_a_warm_start_decides_its_weights(tmp_path, tiny_start, setting):
    other = warm_start(tmp_path / "other", **(TINY | setting))
    assert weights(other) != weights(tiny_start)


def test_a_larger_model_is_trained_where_sizes_are_given(tmp_path):
    folder = warm_start(tmp_path / "a", hidden_size=96, num_hidden_layers=3, **TINY)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.hidden_size == 96
    assert len(model.model.layers) == 3
    assert model.config.intermediate_size == 192


def test_a_warm_start_reports_its_steps(monkeypatch, tmp_path):
    reports = []
    monkeypatch.setattr(
        warm_starts, "report", lambda note, steps: reports.append((note.split()[0], steps))
    )
    warm_start(tmp_path / "a", steps=101, attempts=1)
    assert reports == [("loss", 50), ("loss", 50), ("loss", 1)]


def test_warm_start_learns(tmp_path):
    """The loss falls from more than log(20) = 3.0 to below 2.6 within a few steps."""
    folder = warm_start(tmp_path / "a", steps=40, attempts=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = ["348:44=3+8=11*4=44<eos>", "229:09=9*2=18-9=9<eos>"]
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        logp = model(ids).logits.log_softmax(-1)[0, 7:-1].gather(1, ids[0, 8:, None])
        assert -logp.mean() < 2.6


def test_a_warm_start_refuses_other_settings_and_foreign_folders(tmp_path, tiny_start):
    with pytest.raises(ValueError, match=r"attempts: 2 there, 3 now.*delete"):
        warm_start(tiny_start, **(TINY | {"attempts": 3}))
    with pytest.raises(ValueError, match=r"seed: 0 there, 1 now"):
        warm_start(tiny_start, seed=1, **TINY)
    older = tmp_path / "older"
    older.mkdir()
    settings = json.loads((tiny_start / "warm_start.json").read_text())
    (older / "warm_start.json").write_text(json.dumps(settings | {"older": 1}))
    with pytest.raises(ValueError, match=r"older: 1 there, None now"):
        warm_start(older, **TINY)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(ValueError, match="no warm_start.json"):
        warm_start(foreign, **TINY)


@pytest.mark.parametrize("name", ["attempts", "steps"])
def test_warm_start_names_a_bad_setting(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}.* got.* 0"):
        warm_start(tmp_path / "a", **(TINY | {name: 0}))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(self, folder):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "half").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(countdown.PreTrainedTokenizerFast, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm_start(tmp_path / "a", **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert warm_start(tmp_path / "a", **TINY).is_dir()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_warm_start_on_a_gpu(tmp_path):
    before = torch.cuda.get_rng_state()
    folder = warm_start(tmp_path / "a", device="cuda", **TINY)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert AutoModelForCausalLM.from_pretrained(folder).device.type == "cpu"


def test_rows_are_plain_tuples():
    assert Problem("348:44=", "348:44") == ("348:44=", "348:44")
