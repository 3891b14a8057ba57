"""eval_aime.py: data schemas, resuming, and statistics against computations of another kind."""

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest
import scipy.stats
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import countdown
import eval_aime
import train
from eval_aime import (
    Grader,
    Options,
    Prompt,
    Response,
    aime_answer,
    countdown_answer,
    interval,
    load_sets,
    majority,
    report,
    summarize,
)
from reward import Problem
from support import run_folder
from support.files import Lines

ROOT = Path(__file__).parent.parent
HELD_OUT = countdown.problems()[1][:12]  # the model knows the first eight by heart


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What `datasets` makes of the tests' files stays with them."""
    if find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def solution(problem: Problem) -> str:
    """A right response to a Countdown problem."""
    digits, target = problem.answer.split(":")
    return countdown.attempts_by_value(digits)[int(target)][0]


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> str:
    """Folder of a Countdown model that knows eight answers by heart."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(tokenizer, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    texts = [problem.prompt + solution(problem) + "<eos>" for problem in HELD_OUT[:8]]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def english(tmp_path_factory) -> str:
    """Folder of an untrained model whose tokens are bytes, so that it reads any problem.

    Without a chat template.
    """
    folder = tmp_path_factory.mktemp("english")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        max_position_embeddings=256,
        eos_token_id=0,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def held_out(tmp_path) -> str:
    """HELD_OUT as a file."""
    return write_problems(tmp_path / "held_out.jsonl", HELD_OUT)


def write_problems(path: Path, problems: list[Problem]) -> str:
    return write_lines(path, [problem._asdict() for problem in problems])


def write_lines(path: Path, records: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def arguments(policy, held_out, folder, **options) -> list[str]:
    """A command line: two samples of each problem, in batches of three.

    12 problems are halved twice to fit 120 tokens: 8 of the prompt + 28 new ones, three times.
    """
    defaults = {
        "samples": 2,
        "batch_tokens": 120,
        "max_new_tokens": 28,
        "temperature": 1.0,
        "device": "cpu",
    }
    words = ["--model", policy, "--data", held_out, "--grader", "countdown"]
    words += ["--output_dir", str(folder)]
    for name, value in (defaults | options).items():
        words += [f"--{name}", str(value)]
    return words


def evaluate(policy, held_out, folder, **options) -> tuple[dict, dict]:
    """Samples by (problem, index) and the summary's results, without what the clock decides."""
    assert eval_aime.main(arguments(policy, held_out, folder, **options)) == 0
    return samples(folder), results(folder)


def results(folder) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    (of_set,) = summary["results"].values()
    del of_set["tokens_per_second"]
    del of_set["peak_memory_gib"]
    return of_set


def read_records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def samples(folder) -> dict:
    by_key = {}
    for record in read_records(folder):
        assert record.pop("seconds") > 0
        assert record.pop("memory_gib") > 0
        key = (record["problem"], record["index"])
        assert key not in by_key
        by_key[key] = record
    return by_key


# ---------------------------------------------------------------- end to end
def test_a_model_saved_by_train_py_gets_the_accuracy_that_train_py_measured(
    tmp_path, policy, held_out
):
    options = train.Options(
        methods=["bapo@1"],
        steps=1,
        prompts_per_step=4,
        group_size=4,
        learning_rate=1e-5,
        max_new_tokens=28,
        device="cpu",
    )
    run = train.Run(tmp_path / "run", options.arms()[0], policy, 0, options, {"steps": 1})
    run_folder.prepare_folder(run.folder, run.config, resume=False)
    train.carry_out(run, train.Task(HELD_OUT, HELD_OUT, countdown.grade))
    greedy = json.loads((run.folder / "final.json").read_text())["greedy"]
    assert 0.5 < greedy < 1

    model = str(run.folder / "model")
    drawn, result = evaluate(model, held_out, tmp_path / "out", top_k=1)  # top_k 1 is greedy
    assert result["avg@2"] == pytest.approx(greedy)
    assert result["maj@2"] == pytest.approx(greedy)
    assert result["pass@k"]["2"] == pytest.approx(greedy)
    record = drawn[0, 1]
    assert record["set"] == "held_out"
    assert record["prompt"] == HELD_OUT[0].prompt
    assert record["answer"] == record["response"] == solution(HELD_OUT[0])
    assert record["tokens"] == len(record["response"]) + 1
    assert record["correct"]
    assert not record["truncated"]

    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["options"]["top_k"] == 1
    assert summary["settings"]["seed"] == 0
    assert summary["versions"]["scipy"] == scipy.__version__
    assert summary["versions"]["torch"] == version("torch")


def test_the_same_command_repeats_its_samples_and_seed_and_options_reach_the_sampler(
    tmp_path, policy, held_out
):
    first, first_results = evaluate(policy, held_out, tmp_path / "a")
    assert evaluate(policy, held_out, tmp_path / "b") == (first, first_results)
    another_seed, _ = evaluate(policy, held_out, tmp_path / "c", seed=1)
    assert another_seed != first
    assert first[9, 0]["response"] != first[9, 1]["response"]  # each index has draws of its own
    for name, value in (("top_k", 1), ("top_p", 1e-6)):  # both are greedy
        drawn, _ = evaluate(policy, held_out, tmp_path / name, **{name: value})
        for number in range(12):
            assert drawn[number, 0]["response"] == drawn[number, 1]["response"]


WITHOUT_PACKAGES_OF_TRAINING = """
import runpy, sys
for name in ("train", "matplotlib", "datasets", "math_verify", "peft"):
    sys.modules[name] = None
runpy.run_path("eval_aime.py", run_name="__main__")
"""


def test_killed_and_resumed_equals_uninterrupted_and_a_second_process_is_refused(
    tmp_path, policy, held_out
):
    """Kills too: a script that imports a package of training."""
    whole = evaluate(policy, held_out, tmp_path / "whole", samples=20)
    folder = tmp_path / "killed"
    path = folder / "samples.jsonl"
    words = arguments(policy, held_out, folder, samples=20)
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_PACKAGES_OF_TRAINING, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 50:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="killed: another process is writing there"):
            evaluate(policy, held_out, folder, samples=20)
        assert path.read_bytes() == before
    finally:
        process.kill()
        process.wait()
    lines = path.read_bytes().splitlines(keepends=True)
    assert 50 <= len(lines) < 240
    assert json.loads((folder / "summary.json").read_text())["results"] is None

    # And killed within a batch, even within a line: the rest of that batch must get the samples it
    # would have had. It has problems 9 to 11, whose answers the model does not know by heart.
    path.write_bytes(b"".join(lines[:46]) + lines[46][:40])
    assert evaluate(policy, held_out, folder, samples=20) == whole
    before = path.read_bytes()
    assert evaluate(policy, held_out, folder, samples=20) == whole
    assert path.read_bytes() == before  # nothing was left to do


def test_damaged_or_repeated_samples_are_refused_with_file_and_line_and_left_alone(
    tmp_path, policy, held_out
):
    evaluate(policy, held_out, tmp_path / "out", samples=1)
    path = tmp_path / "out/samples.jsonl"
    summary = tmp_path / "out/summary.json"
    lines = path.read_bytes().splitlines(keepends=True)
    results_before = summary.read_bytes()
    half = lines[2][:40]  # and the next line directly behind it
    damaged = [
        ([*lines[:2], half, *lines[3:]], "samples.jsonl, line 3 is damaged"),
        ([b"\0" * 40 + b"\n", *lines[1:]], "samples.jsonl, line 1 is damaged"),
        ([*lines, lines[5]], "samples.jsonl has samples twice"),
    ]
    for content, message in damaged:
        path.write_bytes(b"".join(content))
        with pytest.raises(ValueError, match=message):
            evaluate(policy, held_out, tmp_path / "out", samples=1)
        assert path.read_bytes() == b"".join(content)
        assert summary.read_bytes() == results_before
    summary.unlink()
    with pytest.raises(ValueError, match="summary.json is gone"):
        evaluate(policy, held_out, tmp_path / "out", samples=1, temperature=0.5)


def test_more_samples_top_up_and_fewer_use_the_first(tmp_path, policy, held_out):
    four = evaluate(policy, held_out, tmp_path / "four", samples=4)
    _, results_of_two = evaluate(policy, held_out, tmp_path / "more", samples=2)
    first_lines = (tmp_path / "more/samples.jsonl").read_bytes()
    assert evaluate(policy, held_out, tmp_path / "more", samples=4) == four
    assert (tmp_path / "more/samples.jsonl").read_bytes().startswith(first_lines)
    in_file, result = evaluate(policy, held_out, tmp_path / "more", samples=2)
    assert result == results_of_two
    assert in_file == four[0]


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"temperature": 0.5}, "temperature: 1.0 there, 0.5 now"),
        ({"seed": 3, "top_p": 0.5}, "seed: 0 there, 3 now; top_p: 0.95 there, 0.5 now"),
        ({"max_new_tokens": 20}, "max_new_tokens: 28 there, 20 now"),
        ({"limit": 3}, "limit: 0 there, 3 now"),
        ("data", "prompts: "),
        ("weights", "weights: "),
    ],
)
def test_changed_settings_are_refused_and_named(
    tmp_path, policy, held_out, monkeypatch, changed, named
):
    evaluate(policy, held_out, tmp_path / "out", samples=1)
    before = (tmp_path / "out/samples.jsonl").read_bytes()
    options = changed if isinstance(changed, dict) else {}
    if changed == "data":  # the same name, other problems
        write_problems(Path(held_out), HELD_OUT[:3])
    if changed == "weights":
        load = eval_aime.load_pretrained

        def load_trained_further(kind, name, **options):
            loaded = load(kind, name, **options)
            if kind is AutoModelForCausalLM:
                loaded.lm_head.weight.data.add_(1e-3)
            return loaded

        monkeypatch.setattr(eval_aime, "load_pretrained", load_trained_further)
    with pytest.raises(ValueError) as stopped:
        eval_aime.main(arguments(policy, held_out, tmp_path / "out", samples=1, **options))
    message = str(stopped.value)
    assert named in message
    assert "model:" not in message
    assert "--output_dir" in message
    assert (tmp_path / "out/samples.jsonl").read_bytes() == before


# ---------------------------------------------------------------- batches
class Sampler:
    """`generate` with a memory for `most` prompts, which notes how many each call gets."""

    def __init__(self):
        self.most = 1000
        self.sizes = []
        self.generate = eval_aime.generate

    def __call__(self, model, tokenizer, prompts, **options):
        self.sizes.append(len(prompts))
        if len(prompts) > self.most:
            raise torch.OutOfMemoryError("no memory")
        return self.generate(model, tokenizer, prompts, **options)


@pytest.fixture
def sampler(monkeypatch) -> Sampler:
    sampler = Sampler()
    monkeypatch.setattr(eval_aime, "generate", sampler)
    return sampler


def test_batches_keep_within_the_token_budget_and_one_response_is_always_drawn(
    tmp_path, policy, held_out, sampler
):
    expected = {12 * 36: [12, 12], 12 * 36 - 1: [6] * 4, 120: [3] * 8, 1: [1] * 24}
    for budget, sizes in expected.items():
        sampler.sizes.clear()
        evaluate(policy, held_out, tmp_path / str(budget), batch_tokens=budget)
        assert sampler.sizes == sizes


@pytest.mark.parametrize(
    "prompt_tokens, expected",
    [(100, [7, 8, 7, 8]), (2048, [7, 8, 7, 8]), (2049, [7, 4, 4, 7, 4, 4])],
)
def test_the_default_budget_draws_eight_full_responses_together(
    tmp_path, monkeypatch, prompt_tokens, expected
):
    prompts = []
    for number in range(30):
        prompts.append(Prompt("2024", number, "1", "?", [0] * prompt_tokens))
    sizes = []

    def draw(model, tokenizer, prompts, options):
        sizes.append(len(prompts))
        return [Response("", tokens=32768, truncated=True)] * len(prompts)

    monkeypatch.setattr(eval_aime, "draw", draw)
    options = Options(model="m", samples=1, device="cpu")
    file = Lines(tmp_path / "samples.jsonl")
    eval_aime.sample_all(None, None, {"2024": prompts}, options, {}, file)
    assert sizes == expected


def test_out_of_memory_halves_the_batches_and_the_samples_are_those_of_the_smaller_budget(
    tmp_path, policy, held_out, sampler, capsys
):
    sampler.most = 4
    halved = evaluate(policy, held_out, tmp_path / "halved", batch_tokens=10_000)
    assert sampler.sizes == [12, 6, 3, 3, 3, 3, 3, 3, 3, 3]  # the smaller size is kept
    message = "out of memory with 6 responses at a time: fewer from now on, as with --batch_tokens"
    assert f"{message} 215" in capsys.readouterr().out
    assert evaluate(policy, held_out, tmp_path / "small", batch_tokens=120) == halved
    assert evaluate(policy, held_out, tmp_path / "named", batch_tokens=215) == halved
    sampler.most = 0
    with pytest.raises(ValueError, match="max_new_tokens: a single response runs out of memory"):
        evaluate(policy, held_out, tmp_path / "none")


# ---------------------------------------------------------------- data
# Thirty problems of our own, with integer answers.
ANSWERS = [7 * i + 3 for i in range(30)]
TEXTS = [f"Find the remainder when {answer} is divided by 1000." for answer in ANSWERS]
PROBLEMS = [Problem(text, str(answer)) for text, answer in zip(TEXTS, ANSWERS, strict=True)]


def parquet(path: Path, rows: list[dict]) -> None:
    datasets = pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)


def make_repositories(root: Path) -> None:
    """Folders with the names, files and columns of the repositories on the hub."""
    rows = []
    for number, problem in enumerate(PROBLEMS):
        answer = f"{int(problem.answer):03d}"
        row = {"id": number, "problem": problem.prompt, "answer": answer, "solution": "?"}
        rows.append(row)
    parquet(root / "HuggingFaceH4/aime_2024/data/train-00000-of-00001.parquet", rows)

    rows = [{"problem": problem.prompt, "answer": problem.answer} for problem in PROBLEMS]
    write_lines(root / "math-ai/aime25/test.jsonl", rows)

    rows = []
    for problem in PROBLEMS:
        rows.append({"question": problem.prompt, "answer": rf"{problem.answer}^\circ"})
    folder = root / "opencompass/AIME2025"
    write_lines(folder / "aime2025-I.jsonl", rows[:15])
    write_lines(folder / "aime2025-II.jsonl", rows[15:])
    configurations = ""
    for part in ("I", "II"):
        configurations += f"- config_name: AIME2025-{part}\n"
        configurations += f"  data_files:\n  - split: test\n    path: aime2025-{part}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")


def test_both_repositories_are_read_and_evaluated_end_to_end(
    tmp_path, english, monkeypatch, capsys
):
    make_repositories(tmp_path)
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    assert load_sets(Options(model=english)) == {"2024": PROBLEMS, "2025": PROBLEMS}
    command = ["--model", english, "--samples", "2", "--max_new_tokens", "4", "--limit", "3"]
    assert eval_aime.main([*command, "--device", "cpu", "--output_dir", "out"]) == 0
    records = read_records(Path("out"))
    assert Counter(record["set"] for record in records) == {"2024": 6, "2025": 6}
    instruction = r"Please reason step by step, and put your final answer within \boxed{}."
    assert records[0]["prompt"] == f"{TEXTS[0]}\n{instruction}\n"
    printed = capsys.readouterr().out
    assert "| 2024 | 3 | 0.000 (0.000 to 0.000) |" in printed
    assert "BP-Math-7B" in printed


@pytest.mark.parametrize(
    "record, answer",
    [
        ({"problem": "p", "answer": 5}, "5"),
        ({"Problem": "p", "Answer": "005"}, "5"),
        ({"question": "p", "answer": r"336^\circ"}, "336"),
        ({"problem": "p", "answer": None, "solution": r"\boxed{1} and \boxed{016}"}, "16"),
        ({"prompt": " p\n", "answer": "$0$"}, "0"),
    ],
)
def test_rows_of_any_schema_and_the_file_of_data(tmp_path, record, answer):
    lines = tmp_path / "own.jsonl"
    columns = tmp_path / "own.parquet"
    write_lines(lines, [record])
    parquet(columns, [record])
    for path in (lines, columns):
        (problem,) = load_sets(Options(model="m", data=str(path)))["own"]
        assert problem.prompt.strip() == "p"
        assert problem.answer == answer


def test_rows_that_cannot_be_used_are_counted_and_answers_that_are_no_integers_refused(
    tmp_path, capsys
):
    path = tmp_path / "own.jsonl"
    options = Options(model="m", data=str(path))
    rows = [{"problem": "p", "answer": 1}, {"problem": "p", "answer": 2}, {"problem": "r"}]
    write_lines(path, rows)
    assert load_sets(options) == {"own": [("p", "1")]}
    counts = "3 rows, 1 used, 1 with a prompt that was there before, 1 without an answer"
    assert capsys.readouterr().out == f"own: {counts}\n"
    for value in ("1000", "x", "-1"):
        write_lines(path, [{"problem": "p", "answer": value}])
        with pytest.raises(ValueError, match=f"integers from 0 to 999, found '{value}'"):
            load_sets(options)
    write_lines(path, [{"problem": "p", "answer": [1, 2]}])
    counts = "1 rows, 0 used, 1 with an answer that is a list"
    with pytest.raises(ValueError, match=f"must have problems, found {counts}"):
        load_sets(options)
    write_lines(path, [{"text": "p", "answer": "1"}])
    with pytest.raises(ValueError, match="no row has a field prompt or problem"):
        load_sets(options)


def test_fields_and_split_choose_columns_and_parts(tmp_path, monkeypatch):
    path = tmp_path / "own.jsonl"
    row = {"problem": "no", "answer": "0", "meta": {"text": "p", "value": 7}}
    write_lines(path, [row])
    options = Options(model="m", data=str(path), fields=["meta.text", "meta.value"])
    assert load_sets(options) == {"own": [("p", "7")]}

    make_repositories(tmp_path)
    monkeypatch.chdir(tmp_path)
    for source, name, expected in (
        ("opencompass/AIME2025:AIME2025-I/test", "AIME2025", PROBLEMS[:15]),
        ("opencompass/AIME2025:AIME2025-II/test", "AIME2025", PROBLEMS[15:]),
        ("HuggingFaceH4/aime_2024:train", "aime_2024", PROBLEMS),
        ("math-ai/aime25", "aime25", PROBLEMS),  # the split test
    ):
        assert load_sets(Options(model="m", data=source)) == {name: expected}


def test_math_verify_is_asked_for_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    path = tmp_path / "own.jsonl"
    options = Options(model="m", data=str(path), grader="math")
    write_lines(path, [{"problem": "p", "answer": "1/2"}])
    assert load_sets(options) == {"own": [("p", "1/2")]}
    write_lines(path, [{"problem": "p", "answer": r"\sqrt{2}"}])
    with pytest.raises(ValueError, match="pip install math-verify"):
        load_sets(options)


def test_a_year_without_thirty_problems_is_refused_with_what_was_found(tmp_path, monkeypatch):
    pytest.importorskip("datasets")  # the years are data sets of the hub
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "math-ai/aime25/test.jsonl"
    rows = [{"problem": text, "answer": 1} for text in TEXTS[:29]]
    write_lines(path, rows)
    with pytest.raises(ValueError, match="30 problems, found 29 rows"):
        load_sets(Options(model="m", years=[2025]))
    write_lines(path, [*rows, rows[0]])
    counts = "30 rows, 29 used, 1 with a prompt that was there before"
    with pytest.raises(ValueError, match=f"30 problems, found {counts}"):
        load_sets(Options(model="m", years=[2025]))


@pytest.mark.parametrize(
    "model, options, cause",
    [
        ("nobody/no-such-model", ["--data", "one.jsonl"], "cannot load 'nobody/no-such-model'"),
        ("m", ["--years", "2025"], "cannot load 'math-ai/aime25'"),
        ("m", ["--data", "one.txt"], "Give a .jsonl"),
    ],
)
def test_without_network_the_message_says_what_to_do(tmp_path, monkeypatch, model, options, cause):
    # Without this it tries to reach the hub for half a minute.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if "one.jsonl" not in options:
        pytest.importorskip("datasets")
    if find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "one.jsonl", [{"problem": "p", "answer": "1"}])
    with pytest.raises(ValueError) as stopped:
        eval_aime.main(["--model", model, *options])
    assert cause in str(stopped.value)
    assert "hf auth login" in str(stopped.value)


@pytest.mark.parametrize(
    "model, data, cause",
    [("m", "none.jsonl", "no file 'none"), (".", "one.jsonl", "no folder '.'")],
)
def test_a_missing_file_or_model_is_named(tmp_path, monkeypatch, model, data, cause):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "one.jsonl", [{"problem": "p", "answer": "1"}])
    with pytest.raises(ValueError, match=cause):
        eval_aime.main(["--model", model, "--data", data])


def test_a_model_whose_weights_are_not_finite_is_refused(tmp_path, policy, held_out):
    """Kills: an error of the sampler that names neither the model nor the reason."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.lm_head.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    countdown.build_tokenizer().save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="broken' has weights that are NaN or infinite"):
        evaluate(str(tmp_path / "broken"), held_out, tmp_path / "out")


def test_what_is_wrong_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_aime.py", "--model", "m", "--samples", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "eval_aime.py"), run_name="__main__")
    assert ended.value.code == "eval_aime.py: samples must be at least 1, got 0"


def test_help_has_headings_and_unknown_options_a_likely_one(capsys):
    with pytest.raises(SystemExit):
        eval_aime.main(["--help"])
    printed = capsys.readouterr().out
    for heading in ("problems", "model and sampling", "machine"):
        assert f"\n{heading}:\n  --" in printed
    with pytest.raises(ValueError, match="unknown option --temprature: did you mean --temperature"):
        eval_aime.main(["--model", "m", "--temprature", "1"])


@pytest.mark.parametrize(
    "options, named",
    [
        ({"samples": 0}, "samples"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"fields": ["problem"]}, "fields takes 0 or 2 values"),
        ({"device": "tpu"}, "device"),
        ({"grader": "countdown", "data": "x.jsonl", "system": "Be brief."}, "--system"),
        ({"grader": "x"}, "grader"),
        ({"grader": "countdown"}, "--data"),
        ({"years": [2023]}, "years"),
        ({"years": [2024, 2024]}, "years"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Options(model="m", **options)


# ---------------------------------------------------------------- prompts
def test_the_chat_template_is_used_when_there_is_one_and_writes_the_only_bos(english):
    tokenizer = AutoTokenizer.from_pretrained(english)
    options = Options(model="m", system="Be brief.", instruction="Box it.")
    with pytest.raises(ValueError, match="system"):
        eval_aime.prompt_of(tokenizer, "1+1?", options)
    messages = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %}<me>{% endif %}"
    prompt, ids = eval_aime.prompt_of(tokenizer, "1+1?", options)
    assert prompt == "<system>Be brief.<user>1+1?\nBox it.<me>"
    assert tokenizer.decode(ids) == prompt
    options.system = ""
    prompt, _ = eval_aime.prompt_of(tokenizer, "1+1?", options)
    assert prompt == "<user>1+1?\nBox it.<me>"
    tokenizer = countdown.build_tokenizer()  # puts <bos> before every text
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    _, ids = eval_aime.prompt_of(tokenizer, "1", options)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_the_length_limit_is_lowered_to_the_model_s_positions(tmp_path, policy, held_out, capsys):
    evaluate(policy, held_out, tmp_path / "out", samples=1, max_new_tokens=32768, limit=2)
    assert "lowered from 32768 to 120: the model has 128 positions" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["settings"]["max_new_tokens"] == 120


# ---------------------------------------------------------------- statistics
def record(problem, answer, correct=False, truncated=False, tokens=10) -> dict:
    """What of a line of samples.jsonl is summarized."""
    return {
        "problem": problem,
        "answer": answer,
        "correct": correct,
        "truncated": truncated,
        "tokens": tokens,
        "seconds": 0.5,
        "memory_gib": 1.0,
    }


def test_the_summary_equals_counting_by_hand():
    records = [
        record(0, "1", correct=True),
        record(0, "1", correct=True),
        record(0, "2"),
        record(0, None),
        record(1, "3"),
        record(1, "3"),
        record(1, "4", correct=True),
        record(1, None, truncated=True, tokens=40),
    ]
    result = summarize(records)
    assert result["problems"] == 2
    assert result["samples"] == 4
    assert result["avg@4"] == 3 / 8
    for k in range(1, 5):
        of_both = []
        for group in ([1, 1, 0, 0], [0, 0, 1, 0]):
            passed = [any(draw) for draw in itertools.combinations(group, k)]
            of_both.append(sum(passed) / len(passed))
        assert result["pass@k"][str(k)] == pytest.approx(sum(of_both) / 2)
    assert result["maj@4"] == 0.5  # 1 wins problem 0, and 3 problem 1
    assert result["truncated"] == 1 / 8
    assert result["answerless"] == 1 / 8
    assert result["mean_tokens"] == 110 / 8
    assert result["tokens_per_second"] == 110 / 4
    assert result["peak_memory_gib"] == 1.0
    lines = report({"x": result})
    assert "avg@4" in lines[0]
    assert lines[2].startswith("| x | 2 | 0.375 (")
    assert lines[2].endswith("| 0.500 | 0.125 | 0.125 | 13.8 | 28 | 1.00 |")
    assert not any("BP-Math" in line for line in lines)


def test_every_problem_weighs_the_same_whatever_number_of_samples_exists():
    uneven = [record(0, "1", True)] + [record(1, "1") for _ in range(3)]
    assert summarize(uneven)["avg@1"] == 0.5 and summarize(uneven)["samples"] == 1


@pytest.mark.parametrize("right, problems", [(9, 30), (1, 30), (21, 30), (0, 30), (30, 30)])
def test_the_interval_has_the_exact_quantiles_of_resampled_problems(right, problems):
    # Of problems that are always right or always wrong, the resampled mean is binomial: its
    # quantiles are known exactly.
    low, high = interval([1.0] * right + [0.0] * (problems - right))
    expected = scipy.stats.binom.ppf([0.025, 0.975], problems, right / problems) / problems
    assert (low, high) == pytest.approx(tuple(expected), abs=1e-9)
    assert interval([0.5]) is None


def test_the_interval_of_general_means_is_near_the_normal_one_and_repeats():
    means = [(i * 7 % 16) / 16 for i in range(30)]
    spread = scipy.stats.norm.ppf(0.975) * torch.tensor(means).std(correction=0).item() / 30**0.5
    mean = sum(means) / 30
    low, high = interval(means)
    assert (low, high) == pytest.approx((mean - spread, mean + spread), abs=0.01)
    assert interval(means) == [low, high]


@pytest.mark.parametrize(
    "votes, expected",
    [
        ([("1", True), ("1", True), ("2", False)], 1.0),
        ([("1", True), ("2", False), ("2", False)], 0.0),
        ([("1", True), ("2", False)], 0.5),  # a tie, in either order
        ([("2", False), ("1", True)], 0.5),
        ([("2", False), ("1", True), ("3", False)], 1 / 3),
        ([("1", True), (None, False), (None, False)], 1.0),  # no answer, no vote
        ([(None, False)], 0.0),
    ],
)
def test_majority_and_its_ties(votes, expected):
    records = [record(0, answer, correct) for answer, correct in votes]
    assert majority(records) == pytest.approx(expected)


def test_answers_that_are_equal_vote_together_and_other_boxes_are_answers_too():
    for text in (r"\boxed{16}", r"\boxed{016}", r"$\boxed{16^\circ}$", r"\boxed{\text{16}}"):
        assert aime_answer(text) == "16"
    assert aime_answer(r"\boxed{ \frac{1}{2} }") == r"\frac{1}{2}"
    for text in ("the answer is 16", r"\boxed{}", r"\boxed{ }"):
        assert aime_answer(text) is None
    assert countdown_answer("4*8=32+3=35;3+8=11*4=44") == "3+8=11*4=44"
    assert countdown_answer("3+8=11*4=44;") is None


def test_truncated_is_wrong_not_graded_and_not_answerless_even_if_the_answer_stands_there(
    tmp_path, policy, held_out, monkeypatch
):
    read = []

    def noted(function):
        def note_and_call(response, *answer):
            read.append(response)
            return function(response, *answer)

        return note_and_call

    grader = Grader(noted(countdown_answer), noted(countdown.grade))
    monkeypatch.setattr(eval_aime, "GRADERS", {"countdown": grader})
    scripted = [
        Response(solution(HELD_OUT[0]), tokens=12, truncated=False),
        Response(solution(HELD_OUT[1]), tokens=28, truncated=True),
        Response("", tokens=28, truncated=True),
        Response("nonsense", tokens=9, truncated=False),
    ]
    monkeypatch.setattr(eval_aime, "draw", lambda model, tokenizer, prompts, options: scripted)
    drawn, result = evaluate(
        policy, held_out, tmp_path / "out", samples=1, limit=4, batch_tokens=10_000
    )
    assert [drawn[i, 0]["correct"] for i in range(4)] == [True, False, False, False]
    assert [drawn[i, 0]["answer"] for i in range(4)] == [scripted[0].text, None, None, None]
    assert set(read) == {scripted[0].text, "nonsense"}
    assert result["avg@1"] == 0.25
    assert result["maj@1"] == 0.25
    assert result["truncated"] == 0.5
    assert result["answerless"] == 0.25
