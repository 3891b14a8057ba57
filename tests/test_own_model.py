"""train.py --model --data, from the command line: a Qwen2 with a chat template, saved locally, and a JSONL of problems."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import eval_aime
import support.files
import support.options
import support.run_folder
import train

ROOT = Path(__file__).parent.parent
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
OPTIONS = (
    "--methods bapo@2 --rho0 0.495 --steps 9 --prompts_per_step 4 --group_size 4 --held_out 3 --max_prompt_tokens 30 "
    "--max_new_tokens 8 --learning_rate 1e-3 --micro_batch_tokens 200 --batch_tokens 500 "
    "--precision bfloat16 --gradient_checkpointing --checkpoint_every 2 --device cpu"
).split()


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A character per token, without a pad token."""
    words = ["<eos>", "<unk>", "<user>", "<assistant>", *"0123456789+=# \n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", chat_template=CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    return tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A Qwen2 with tied embeddings that answers any question by "####" and a random digit, now and then by more of them."""
    folder = tmp_path_factory.mktemp("own") / "model"
    tokenizer = character_tokenizer()
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=19, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=0, **sizes)
    model, rng = Qwen2ForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        texts = [f"<assistant>####{''.join(rng.choices('012', k=rng.choice((1, 1, 1, 2))))}<eos>" for _ in range(16)]
        ids = [tokenizer(text)["input_ids"] for text in texts]
        batch = torch.tensor([row + [0] * (8 - len(row)) for row in ids])
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """GSM8K's schema, prompts of several lengths, and rows that must be left out."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"{'0+' * (i % 4)}{i}+{i % 2}=", "answer": f"a sum\n#### {(i + i % 2) % 3}"} for i in range(20)]
    rows += [
        {"question": "", "answer": "#### 1"},
        {"question": "1+1=?", "answer": ["1", "2"]},
        {"question": "0" * 40, "answer": "0"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(model, data, folder, *more) -> list[str]:
    where = ["--model", model, "--data", data, "--output_dir", str(folder), "--instruction", ""]
    return [*OPTIONS, *where, *more]


@pytest.fixture
def rewards(tmp_path) -> str:
    """A file that grades by itself: half a reward for a response that is nearly right."""
    path = tmp_path / "my_rewards.py"
    path.write_text("def grade(response, answer):\n    return (response == '####' + answer) / 2 + (answer in response) / 2\n")
    return str(path)


@pytest.mark.parametrize("of_your_own", [False, True], ids=["in full", "adapters and a reward of one's own"])
def test_it_trains_is_killed_resumes_exactly_and_is_evaluated(model, data, rewards, tmp_path, here, capsys, of_your_own):
    """Kills: samples or evaluations that a continued run has twice, not at all or of another policy; a checkpoint without the
    adapters, their optimizer or their base; a reward that other processes cannot load."""
    ways = ["--samples_every", "2", "--evaluate_every", "3"]
    ways += ["--lora_rank", "4", "--reward", f"{rewards}:grade", "--learning_rate", "1e-2"] * of_your_own
    assert train.main(words(model, data, tmp_path / "whole", *ways)) == 0
    printed = capsys.readouterr().out
    # A grader of one's own may read a list of answers.
    assert (
        "23 rows, 21 used, 2 left out" if of_your_own else "23 rows, 20 used, 3 left out"
    ) in printed and "| bapo@2 | 1 |" in printed
    assert ("1 with an answer that is a list" in printed) is not of_your_own
    for reason in ("1 without a prompt", "1 with a prompt of more than 30 tokens"):
        assert reason in printed
    folder = tmp_path / "whole/bapo@2-seed0"
    lines = support.run_folder.read_metrics(folder / "metrics.jsonl")
    assert len({line["step"] for line in lines}) == 9 and any(0 < line["reward"] < 1 for line in lines)
    assert len({(line["low"], line["high"]) for line in lines if line["update"]}) > 1  # the search acts
    assert all(line["sampler_gap"] > 0 for line in lines)
    start, final = (json.loads((tmp_path / "whole" / name).read_text()) for name in ("start.json", "bapo@2-seed0/final.json"))
    assert start.keys() == final.keys() == {"greedy", "mean@4", "pass@4"}
    evaluated = [line for line in lines if "held_out_greedy" in line]
    assert {(line["step"], line["update"]) for line in evaluated} <= {(3, 2), (6, 2), (9, 2)} and evaluated[-1]["step"] == 9
    assert {name: evaluated[-1][f"held_out_{name}"] for name in final} == pytest.approx(final, rel=1e-5)
    samples = support.files.read_lines(folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in (2, 4, 6, 8) for _ in range(8)]  # 2 prompts x 4
    assert {sample["reward"] for sample in samples} == ({0, 0.5, 1} if of_your_own else {0, 1})

    killed, metrics = tmp_path / "killed", "bapo@2-seed0/metrics.jsonl"
    command = [sys.executable, "train.py", *words(model, data, killed, *ways)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=-3, start_new_session=True)
    try:
        while process.poll() is None and not ((killed / metrics).exists() and (killed / metrics).read_bytes().count(b"\n") > 7):
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "bapo@2-seed0/final.json").exists() and (killed / metrics).read_bytes().count(b"\n") > 7
    assert train.main(words(model, data, killed, *ways, "--resume")) == 0
    for name in (metrics, "bapo@2-seed0/samples.jsonl", "bapo@2-seed0/final.json", "start.json"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "bapo@2-seed0/model") for name in ("whole", "killed"))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))

    arguments = ["--model", str(folder / "model"), "--data", data, "--grader", "math", "--instruction", "", "--samples", "2"]
    arguments += ["--max_new_tokens", "6", "--device", "cpu", "--output_dir", str(tmp_path / "evaluation")]
    capsys.readouterr()
    assert eval_aime.main(arguments) == 0
    assert "| sums | 21 | " in capsys.readouterr().out  # the long prompt is no trouble here

    changed = Path(data).with_name("other.jsonl")
    changed.write_text(Path(data).read_text().replace("9+1=", "9+2="))
    with pytest.raises(ValueError, match="was made in another setting .*problems: "):
        train.main(words(model, str(changed), killed, *ways, "--resume"))
    if of_your_own:
        with open(rewards, "a") as file:
            file.write("# another function, perhaps\n")
        with pytest.raises(ValueError, match="was made in another setting .*reward_source: "):
            train.main(words(model, data, killed, *ways, "--resume"))


def test_answers_of_any_length_and_kind_are_for_a_reward_of_ones_own_to_judge(model, rewards, tmp_path, monkeypatch):
    """Kills: math-verify asked for, answers of more than 200 characters left out."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    path = tmp_path / "programs.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i}=", "answer": rf"\sqrt{i}" * 99}) + "\n" for i in range(9)))
    where = words(model, str(path), "runs", "--reward", f"{rewards}:grade")
    rows, held_out, grade = train.load_task(train.Options(**support.options.parse(train.Options, where, "")))
    assert len(rows + held_out) == 9 and grade(f"a {rows[0].answer}", rows[0].answer) == 0.5


@pytest.mark.parametrize(
    "more, message",
    [
        (["--held_out", "17"], "20 problems are too few to hold out 17 and train on 4 a step"),
        (["--fields", "text", "answer"], "no row has a field text.*question, answer"),
        (["--max_new_tokens", "64"], "max_new_tokens 64 .* leaves no room for a prompt in the 64 positions"),
        (["--max_new_tokens", "60", "--partial_budget", "5"], "the 64 positions"),
        (["--model", "no-such-folder/model"], "cannot load 'no-such-folder/model'"),
        (["--data", "no-such.jsonl"], "no-such.jsonl"),
        (["--data", ""], "model and data go together"),
        (["--precision", "float16"], "precision must be"),
        (["--micro_batch_tokens", "0"], "micro_batch_tokens must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(model, data, tmp_path, monkeypatch, more, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it tries for half a minute
    monkeypatch.setattr(train, "run_side_by_side", None)
    with pytest.raises(ValueError, match=message):
        train.main(words(model, data, tmp_path, *more))
    assert not list(tmp_path.iterdir())


def test_longer_prompts_than_the_model_has_positions_for_are_left_out_and_the_limit_is_said_and_saved(model, data, capsys):
    options = train.Options(**support.options.parse(train.Options, words(model, data, "runs", "--max_new_tokens", "54"), ""))
    task = train.Task(*train.load_task(options))
    assert "max_prompt_tokens lowered from 30 to 10: " in capsys.readouterr().out
    assert max(len(row.prompt) for row in task.train + task.held_out) <= 10 == options.max_prompt_tokens
    assert train.make_runs(options, task)[0].config["max_prompt_tokens"] == 10


def test_latex_answers_without_the_library_are_refused_before_any_work(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    path = tmp_path / "latex.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i}=", "answer": rf"{i}\sqrt{{2}}"}) + "\n" for i in range(9)))
    with pytest.raises(ValueError, match="pip install math-verify"):
        train.main(words(model, str(path), tmp_path / "runs"))


def test_a_model_without_eos_and_a_tokenizer_of_another_model_fail_early_and_by_name(model, data, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        saved = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({name: value for name, value in saved.items() if "eos" not in name}))
    with pytest.raises(ValueError, match="tokenizer and model name no EOS token"):
        train.main(words(str(folder), data, tmp_path / "runs"))
    small = AutoModelForCausalLM.from_pretrained(model)
    small.resize_token_embeddings(10)
    small.save_pretrained(folder)
    with pytest.raises(ValueError, match="writes token 1[0-9], but .* has 10"):
        train.main(words(str(folder), data, tmp_path / "runs"))


def test_held_out_problems_are_not_trained_on_and_the_split_is_always_the_same(model, data):
    options = train.Options(**support.options.parse(train.Options, words(model, data, "runs"), ""))
    task, again = (train.Task(*train.load_task(options)) for _ in range(2))
    assert len(task.train) == 17 and len(task.held_out) == 3 and task == again
    assert not {tuple(row.prompt) for row in task.train} & {tuple(row.prompt) for row in task.held_out}


def test_the_split_and_its_configuration_are_asked_for_by_name(model, data, monkeypatch):
    asked, rows = [], [json.loads(line) for line in Path(data).read_text().splitlines()]
    monkeypatch.setitem(train.load_task.__globals__, "load_rows", lambda *names: asked.append(names) or rows)
    for split in ("train", "test", "main/test"):
        train.load_task(train.Options(**support.options.parse(train.Options, words(model, data, "runs", "--split", split), "")))
    assert asked == [(data, "train"), (data, "test"), (data, "main/test")]
