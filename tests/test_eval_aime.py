"""eval_aime.py: every data schema, resuming, and the statistics against computations of another kind."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import datasets
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
import support.files
import support.run_folder
import train
from eval_aime import Options, Prompt, aime_answer, countdown_answer, interval, load_sets, majority, report, summarize

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What `datasets` makes of the tests' files stays with them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A Countdown model that knows eight answers by heart."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(tokenizer, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    texts = [row.prompt + countdown.attempts_by_value(row.answer[:3])[int(row.answer[4:])][0] for row in rows()[:8]]
    batch = tokenizer([text + "<eos>" for text in texts], padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def english(tmp_path_factory):
    """An untrained model whose tokens are bytes, so that it reads any problem; without a chat template."""
    folder = tmp_path_factory.mktemp("english")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<eos>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    config = Qwen2Config(vocab_size=len(vocabulary), max_position_embeddings=256, eos_token_id=0, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rows():
    return countdown.problems()[1][:12]


@pytest.fixture
def held_out(tmp_path):
    """Twelve Countdown problems, of which `policy` knows eight, as a file."""
    return write_lines(tmp_path / "held_out.jsonl", [row._asdict() for row in rows()])


def write_lines(path: Path, records: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def arguments(policy, held_out, folder, **options) -> list[str]:
    # A budget of 120 tokens: batches of 12 / 2 / 2 = 3 problems, 8 + 28 tokens each.
    options = dict(samples=2, batch_tokens=120, max_new_tokens=28, temperature=1.0, device="cpu") | options
    pairs = [(f"--{name}", str(value)) for name, value in options.items()]
    fixed = ["--model", policy, "--data", held_out, "--grader", "countdown", "--output_dir", str(folder)]
    return [*fixed, *itertools.chain(*pairs)]


def evaluate(policy, held_out, folder, **options) -> tuple[dict, dict]:
    """Samples by (problem, index) and the summary's results, both without what depends on the clock."""
    assert eval_aime.main(arguments(policy, held_out, folder, **options)) == 0
    return samples(folder), results(folder)


def results(folder) -> dict:
    (found,) = json.loads((folder / "summary.json").read_text())["results"].values()
    return {name: value for name, value in found.items() if name not in ("tokens_per_second", "peak_memory_gib")}


def samples(folder) -> dict:
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found = {(r["problem"], r["index"]): r for r in records}
    assert len(found) == len(records)  # none twice
    for record in records:
        assert record.pop("seconds") > 0 and record.pop("memory_gib") > 0
    return found


# ---------------------------------------------------------------- end to end
def test_a_model_saved_by_train_py_gets_the_accuracy_that_train_py_measured(tmp_path, policy, held_out):
    tiny = dict(steps=1, prompts_per_step=4, group_size=4, learning_rate=1e-5, max_new_tokens=28, device="cpu")
    options = train.Options(methods=["bapo@1"], **tiny)
    run = train.Run(tmp_path / "run", options.arms()[0], policy, 0, options, {"steps": 1})
    support.run_folder.prepare_folder(run.folder, run.config, resume=False)
    train.carry_out(run, train.Task(rows(), rows(), countdown.grade))
    greedy = json.loads((run.folder / "final.json").read_text())["greedy"]
    assert 0.5 < greedy < 1
    found, result = evaluate(str(run.folder / "model"), held_out, tmp_path / "out", top_k=1)  # top_k 1 is greedy
    assert result["avg@2"] == result["maj@2"] == result["pass@k"]["2"] == pytest.approx(greedy)
    record = found[0, 1]
    assert record["prompt"] == rows()[0].prompt and record["set"] == "held_out" and not record["truncated"]
    assert record["response"] == record["answer"] and record["correct"] and record["tokens"] == len(record["response"]) + 1
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["options"]["top_k"] == 1 and summary["settings"]["seed"] == 0
    assert summary["versions"]["datasets"] == datasets.__version__ and summary["versions"]["torch"] == str(torch.__version__)


def test_the_same_command_repeats_its_samples_and_seed_and_options_reach_the_sampler(tmp_path, policy, held_out):
    first = evaluate(policy, held_out, tmp_path / "a")
    assert evaluate(policy, held_out, tmp_path / "b") == first
    assert evaluate(policy, held_out, tmp_path / "c", seed=1)[0] != first[0]
    assert first[0][9, 0]["response"] != first[0][9, 1]["response"]  # each index has draws of its own
    greedy = [
        evaluate(policy, held_out, tmp_path / name, **o)[0] for name, o in (("d", dict(top_k=1)), ("e", dict(top_p=1e-6)))
    ]
    for found in greedy:
        assert all(found[i, 0]["response"] == found[i, 1]["response"] for i in range(12))


def test_killed_and_resumed_equals_uninterrupted_and_a_second_process_is_refused(tmp_path, policy, held_out):
    whole = evaluate(policy, held_out, tmp_path / "whole", samples=20)
    folder = tmp_path / "killed"
    command = [sys.executable, str(ROOT / "eval_aime.py"), *arguments(policy, held_out, folder, samples=20)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
    path, deadline = folder / "samples.jsonl", time.monotonic() + 600
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 50:
            assert process.poll() is None and time.monotonic() < deadline
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
    # And killed within a batch, even within a line: the rest of that batch must get the samples it would have had. It has
    # problems 9 to 11, whose answers the model does not know by heart.
    path.write_bytes(b"".join(lines[:46]) + lines[46][:40])
    assert evaluate(policy, held_out, folder, samples=20) == whole
    before = path.read_bytes()
    assert evaluate(policy, held_out, folder, samples=20) == whole and path.read_bytes() == before  # nothing left to do


def test_damaged_or_repeated_samples_are_refused_with_file_and_line_and_left_alone(tmp_path, policy, held_out):
    evaluate(policy, held_out, tmp_path / "out", samples=1)
    path, summary = tmp_path / "out/samples.jsonl", tmp_path / "out/summary.json"
    lines, results = path.read_bytes().splitlines(keepends=True), summary.read_bytes()
    damaged = [
        (lines[:2] + [lines[2][:40], *lines[3:]], r"samples.jsonl, line 3 is damaged"),  # half of it, and the next behind it
        ([b"\0" * 40 + b"\n", *lines[1:]], r"samples.jsonl, line 1 is damaged"),
        ([*lines, lines[5]], r"samples.jsonl has samples twice"),
    ]
    for content, message in damaged:
        path.write_bytes(b"".join(content))
        with pytest.raises(ValueError, match=message):
            evaluate(policy, held_out, tmp_path / "out", samples=1)
        assert path.read_bytes() == b"".join(content) and summary.read_bytes() == results
    summary.unlink()
    with pytest.raises(ValueError, match="summary.json is gone"):
        evaluate(policy, held_out, tmp_path / "out", samples=1, temperature=0.5)


def test_more_samples_top_up_and_fewer_use_the_first(tmp_path, policy, held_out):
    four = evaluate(policy, held_out, tmp_path / "four", samples=4)
    two = evaluate(policy, held_out, tmp_path / "more", samples=2)
    first_lines = (tmp_path / "more/samples.jsonl").read_bytes()
    assert evaluate(policy, held_out, tmp_path / "more", samples=4) == four
    assert (tmp_path / "more/samples.jsonl").read_bytes().startswith(first_lines)
    found, result = evaluate(policy, held_out, tmp_path / "more", samples=2)
    assert result == two[1] and found == four[0]


@pytest.mark.parametrize(
    "changed, named",
    [
        (dict(temperature=0.5), "temperature: 1.0 there, 0.5 now"),
        (dict(seed=3, top_p=0.5), "seed: 0 there, 3 now; top_p: 0.95 there, 0.5 now"),
        (dict(max_new_tokens=20), "max_new_tokens: 28 there, 20 now"),
        (dict(limit=3), "limit: 0 there, 3 now"),
        ("data", "prompts: "),
        ("weights", "weights: "),
    ],
)
def test_changed_settings_are_refused_and_named(tmp_path, policy, held_out, monkeypatch, changed, named):
    evaluate(policy, held_out, tmp_path / "out", samples=1)
    before = (tmp_path / "out/samples.jsonl").read_bytes()
    options = changed if isinstance(changed, dict) else {}
    if changed == "data":  # the same name, other problems
        write_lines(Path(held_out), [row._asdict() for row in rows()[:3]])
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
    assert named in message and "model:" not in message and "--output_dir" in message
    assert (tmp_path / "out/samples.jsonl").read_bytes() == before


# ---------------------------------------------------------------- batches
@pytest.fixture
def drawn(monkeypatch):
    """The number of prompts in every call of `generate`, which runs out of memory above `most` prompts."""
    sizes, real = [], eval_aime.generate

    def generate(model, tokenizer, prompts, **options):
        sizes.append(len(prompts))
        if len(prompts) > generate.most:
            raise torch.OutOfMemoryError("no memory")
        return real(model, tokenizer, prompts, **options)

    generate.most = 1000
    monkeypatch.setattr(eval_aime, "generate", generate)
    return generate, sizes


def test_batches_keep_within_the_token_budget_and_one_response_is_always_drawn(tmp_path, policy, held_out, drawn):
    for budget, expected in ((12 * 36, [12, 12]), (12 * 36 - 1, [6] * 4), (120, [3] * 8), (1, [1] * 24)):
        drawn[1].clear()
        evaluate(policy, held_out, tmp_path / str(budget), batch_tokens=budget)
        assert drawn[1] == expected


@pytest.mark.parametrize("prompt_tokens, expected", [(100, [7, 8, 7, 8]), (2048, [7, 8, 7, 8]), (2049, [7, 4, 4, 7, 4, 4])])
def test_the_default_budget_draws_eight_full_responses_together(tmp_path, monkeypatch, prompt_tokens, expected):
    prompts, sizes = [Prompt("2024", i, "1", "?", [0] * prompt_tokens) for i in range(30)], []

    def draw(model, tokenizer, prompts, options):
        sizes.append(len(prompts))
        return [("", 32768, True)] * len(prompts)

    monkeypatch.setattr(eval_aime, "draw", draw)
    file = support.files.Lines(tmp_path / "samples.jsonl")
    eval_aime.sample_all(None, None, {"2024": prompts}, Options(model="m", samples=1, device="cpu"), {}, file)
    assert sizes == expected


def test_out_of_memory_halves_the_batches_and_the_samples_are_those_of_the_smaller_budget(
    tmp_path, policy, held_out, drawn, capsys
):
    drawn[0].most = 4
    halved = evaluate(policy, held_out, tmp_path / "halved", batch_tokens=10_000)
    assert drawn[1] == [12, 6, *[3] * 8]  # the smaller size is kept
    assert "out of memory with 6 responses at a time: fewer from now on, as with --batch_tokens 215" in capsys.readouterr().out
    assert evaluate(policy, held_out, tmp_path / "small", batch_tokens=120) == halved
    assert evaluate(policy, held_out, tmp_path / "named", batch_tokens=215) == halved
    drawn[0].most = 0
    with pytest.raises(ValueError, match="max_new_tokens: a single response runs out of memory"):
        evaluate(policy, held_out, tmp_path / "none")


# ---------------------------------------------------------------- data
def problem_texts(count=30) -> list[str]:
    return [f"Find the remainder when {7 * i + 3} is divided by 1000." for i in range(count)]


def answers(count=30) -> list[int]:
    return [7 * i + 3 for i in range(count)]


def parquet(path: Path, columns: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(path)


def make_repositories(root: Path) -> None:
    """Folders with the names, files and columns of the repositories on the hub, and problems of our own."""
    texts, numbers = problem_texts(), answers()
    columns = dict(id=numbers, problem=texts, answer=[f"{n:03d}" for n in numbers], solution=["?"] * 30)
    parquet(root / "HuggingFaceH4/aime_2024/data/train-00000-of-00001.parquet", columns)
    write_lines(root / "math-ai/aime25/test.jsonl", [dict(problem=t, answer=str(n)) for t, n in zip(texts, numbers)])
    rows, configurations = [dict(question=t, answer=rf"{n}^\circ") for t, n in zip(texts, numbers)], "configs:\n"
    for part, of_part in (("I", rows[:15]), ("II", rows[15:])):
        write_lines(root / f"opencompass/AIME2025/aime2025-{part}.jsonl", of_part)
        files = f"  data_files:\n  - split: test\n    path: aime2025-{part}.jsonl\n"
        configurations += f"- config_name: AIME2025-{part}\n" + files
    (root / "opencompass/AIME2025/README.md").write_text(f"---\n{configurations}---\n")


def test_both_repositories_are_read_and_evaluated_end_to_end(tmp_path, english, monkeypatch, capsys):
    make_repositories(tmp_path)
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    pairs = load_sets(Options(model=english))
    assert pairs == {year: list(zip(problem_texts(), map(str, answers()))) for year in ("2024", "2025")}
    command = ["--model", english, "--samples", "2", "--max_new_tokens", "4", "--limit", "3", "--device", "cpu"]
    assert eval_aime.main([*command, "--output_dir", "out"]) == 0
    found = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    assert Counter(r["set"] for r in found) == {"2024": 6, "2025": 6}
    instruction = r"Please reason step by step, and put your final answer within \boxed{}."
    assert found[0]["prompt"] == f"{problem_texts()[0]}\n{instruction}\n"
    printed = capsys.readouterr().out
    assert "| 2024 | 3 | 0.000 (0.000 to 0.000) |" in printed and "BP-Math-7B" in printed


@pytest.mark.parametrize(
    "record, answer",
    [
        (dict(problem="p", answer=5), "5"),
        (dict(Problem="p", Answer="005"), "5"),
        (dict(question="p", answer=r"336^\circ"), "336"),
        (dict(problem="p", answer=None, solution=r"\boxed{1} and \boxed{016}"), "16"),
        (dict(prompt=" p\n", answer="$0$"), "0"),
    ],
)
def test_rows_of_any_schema_and_the_file_of_data(tmp_path, record, answer):
    for suffix in ("jsonl", "parquet"):
        path = tmp_path / f"own.{suffix}"
        write_lines(path, [record]) if suffix == "jsonl" else parquet(path, {name: [value] for name, value in record.items()})
        (problem,) = load_sets(Options(model="m", data=str(path)))["own"]
        assert problem.prompt.strip() == "p" and problem.answer == answer


def test_rows_that_cannot_be_used_are_counted_and_answers_that_are_no_integers_refused(tmp_path, capsys):
    records = [dict(problem="p", answer=1), dict(problem="p", answer=2), dict(problem="r")]
    path = write_lines(tmp_path / "own.jsonl", records)
    assert load_sets(Options(model="m", data=path)) == {"own": [("p", "1")]}
    printed = capsys.readouterr().out
    assert printed == "own: 3 rows, 1 used, 1 with a prompt that was there before, 1 without an answer\n"
    for value in ("1000", "x", "-1"):
        write_lines(Path(path), [dict(problem="p", answer=value)])
        with pytest.raises(ValueError, match=f"integers from 0 to 999, found '{value}'"):
            load_sets(Options(model="m", data=path))
    write_lines(Path(path), [dict(problem="p", answer=[1, 2])])
    with pytest.raises(ValueError, match="must have problems, found 1 rows, 0 used, 1 with an answer that is a list"):
        load_sets(Options(model="m", data=path))
    write_lines(Path(path), [dict(text="p", answer="1")])
    with pytest.raises(ValueError, match="no row has a field prompt or problem"):
        load_sets(Options(model="m", data=path))


def test_fields_and_split_choose_columns_and_parts(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "own.jsonl", [dict(problem="no", answer="0", meta=dict(text="p", value=7))])
    assert load_sets(Options(model="m", data=path, fields=["meta.text", "meta.value"])) == {"own": [("p", "7")]}
    make_repositories(tmp_path)
    monkeypatch.chdir(tmp_path)
    pairs = list(zip(problem_texts(), map(str, answers())))
    for part, expected in (("AIME2025-II/test", pairs[15:]), ("AIME2025-I/test", pairs[:15])):
        assert load_sets(Options(model="m", data="opencompass/AIME2025", split=part)) == {"AIME2025": expected}
    for source, split in (("HuggingFaceH4/aime_2024", "train"), ("math-ai/aime25", "test")):
        assert load_sets(Options(model="m", data=source, split=split)) == {source.split("/")[1]: pairs}


def test_math_verify_is_asked_for_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    path = write_lines(tmp_path / "own.jsonl", [dict(problem="p", answer="1/2")])
    assert load_sets(Options(model="m", data=path, grader="math")) == {"own": [("p", "1/2")]}
    write_lines(Path(path), [dict(problem="p", answer=r"\sqrt{2}")])
    with pytest.raises(ValueError, match="pip install math-verify"):
        load_sets(Options(model="m", data=path, grader="math"))


def test_a_year_without_thirty_problems_is_refused_with_what_was_found(tmp_path, monkeypatch):
    make_repositories(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "math-ai/aime25/test.jsonl"
    write_lines(path, [dict(problem=t, answer=1) for t in problem_texts(29)])
    with pytest.raises(ValueError, match="30 problems, found 29 rows"):
        load_sets(Options(model="m", years=[2025]))
    write_lines(path, [dict(problem=t, answer=1) for t in [*problem_texts(29), problem_texts()[0]]])
    with pytest.raises(ValueError, match="30 problems, found 30 rows, 29 used, 1 with a prompt that was there before"):
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
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it tries for half a minute
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "one.jsonl", [dict(problem="p", answer="1")])
    with pytest.raises(ValueError) as stopped:
        eval_aime.main(["--model", model, *options])
    assert cause in str(stopped.value) and "hf auth login" in str(stopped.value)


@pytest.mark.parametrize("model, data, cause", [("m", "none.jsonl", "no file 'none"), (".", "one.jsonl", "no folder '.'")])
def test_a_missing_file_or_model_is_named(tmp_path, monkeypatch, model, data, cause):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "one.jsonl", [dict(problem="p", answer="1")])
    with pytest.raises(ValueError, match=cause):
        eval_aime.main(["--model", model, "--data", data])


def test_the_script_needs_neither_train_py_nor_matplotlib_and_says_what_is_wrong_in_one_line():
    code = "import runpy, sys; sys.modules['train'] = sys.modules['matplotlib'] = None; "
    code += "runpy.run_path('eval_aime.py', run_name='__main__')"
    command = [sys.executable, "-c", code, "--model", "m", "--samples", "0"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, "eval_aime.py: samples must be at least 1, got 0\n")


def test_help_has_headings_and_unknown_options_a_likely_one(capsys):
    with pytest.raises(SystemExit):
        eval_aime.main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n{heading}:\n  --" in printed for heading in ("problems", "model and sampling", "machine"))
    with pytest.raises(ValueError, match="unknown option --temprature: did you mean --temperature"):
        eval_aime.main(["--model", "m", "--temprature", "1"])


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(samples=0), "samples"),
        (dict(batch_tokens=0), "batch_tokens"),
        (dict(top_k=-1), "top_k"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.01), "top_p"),
        (dict(fields=["problem"]), "fields takes 0 or 2 values"),
        (dict(device="tpu"), "device"),
        (dict(grader="countdown", data="x.jsonl", system="Be brief."), "--system"),
        (dict(grader="x"), "grader"),
        (dict(grader="countdown"), "--data"),
        (dict(years=[2023]), "years"),
        (dict(years=[2024, 2024]), "years"),
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
    assert eval_aime.prompt_of(tokenizer, "1+1?", options)[0] == "<user>1+1?\nBox it.<me>"
    countdown_tokenizer = countdown.build_tokenizer()  # puts <bos> before every text
    countdown_tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert eval_aime.prompt_of(countdown_tokenizer, "1", options)[1].count(countdown_tokenizer.bos_token_id) == 1


def test_the_length_limit_is_lowered_to_the_model_s_positions(tmp_path, policy, held_out, capsys):
    evaluate(policy, held_out, tmp_path / "out", samples=1, max_new_tokens=32768, limit=2)
    assert "lowered from 32768 to 120: the model has 128 positions" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/summary.json").read_text())["settings"]["max_new_tokens"] == 120


# ---------------------------------------------------------------- statistics
def record(problem, answer, correct=False, truncated=False, tokens=10):
    return dict(
        problem=problem, answer=answer, correct=correct, truncated=truncated, tokens=tokens, seconds=0.5, memory_gib=1.0
    )


def test_the_summary_equals_counting_by_hand():
    records = [
        *(record(0, "1", True), record(0, "1", True), record(0, "2"), record(0, None)),
        *(record(1, "3"), record(1, "3"), record(1, "4", True), record(1, None, truncated=True, tokens=40)),
    ]
    result = summarize(records)
    assert (result["problems"], result["samples"], result["avg@4"]) == (2, 4, 3 / 8)
    for k in range(1, 5):
        draws = [[any(draw) for draw in itertools.combinations(group, k)] for group in ([1, 1, 0, 0], [0, 0, 1, 0])]
        assert result["pass@k"][str(k)] == pytest.approx(sum(sum(d) / len(d) for d in draws) / 2)
    assert result["maj@4"] == 0.5  # 1 wins problem 0, and 3 problem 1
    assert (result["truncated"], result["answerless"], result["mean_tokens"]) == (1 / 8, 1 / 8, 110 / 8)
    assert (result["tokens_per_second"], result["peak_memory_gib"]) == (110 / 4, 1.0)
    assert "avg@4" in report({"x": result})[0] and not any("BP-Math" in line for line in report({"x": result}))


def test_every_problem_weighs_the_same_whatever_number_of_samples_exists():
    uneven = [record(0, "1", True)] + [record(1, "1") for _ in range(3)]
    assert summarize(uneven)["avg@1"] == 0.5 and summarize(uneven)["samples"] == 1


@pytest.mark.parametrize("right, problems", [(9, 30), (1, 30), (21, 30), (0, 30), (30, 30)])
def test_the_interval_has_the_exact_quantiles_of_resampled_problems(right, problems):
    # Of problems that are always right or always wrong, the resampled mean is binomial: its quantiles are known exactly.
    low, high = interval([1.0] * right + [0.0] * (problems - right))
    expected = scipy.stats.binom.ppf([0.025, 0.975], problems, right / problems) / problems
    assert (low, high) == pytest.approx(tuple(expected), abs=1e-9)
    assert interval([0.5]) is None


def test_the_interval_of_general_means_is_near_the_normal_one_and_repeats():
    means = [(i * 7 % 16) / 16 for i in range(30)]
    spread = scipy.stats.norm.ppf(0.975) * torch.tensor(means).std(correction=0).item() / 30**0.5
    low, high = interval(means)
    assert (low, high) == pytest.approx((sum(means) / 30 - spread, sum(means) / 30 + spread), abs=0.01)
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
    assert majority([record(0, answer, correct) for answer, correct in votes]) == pytest.approx(expected)


def test_answers_that_are_equal_vote_together_and_other_boxes_are_answers_too():
    assert {aime_answer(text) for text in (r"\boxed{16}", r"\boxed{016}", r"$\boxed{16^\circ}$", r"\boxed{\text{16}}")} == {
        "16"
    }
    assert aime_answer(r"\boxed{ \frac{1}{2} }") == r"\frac{1}{2}"
    assert aime_answer("the answer is 16") is aime_answer(r"\boxed{}") is aime_answer(r"\boxed{ }") is None
    assert countdown_answer("4*8=32+3=35;3+8=11*4=44") == "3+8=11*4=44"
    assert countdown_answer("3+8=11*4=44;") is None


def test_truncated_is_wrong_not_graded_and_not_answerless_even_if_the_answer_stands_there(
    tmp_path, policy, held_out, monkeypatch
):
    right, read = [countdown.attempts_by_value(row.answer[:3])[int(row.answer[4:])][0] for row in rows()], []

    def noted(function):
        return lambda response, *answer: read.append(response) or function(response, *answer)

    graders = {"countdown": (noted(countdown_answer), noted(countdown.grade))}
    monkeypatch.setattr(eval_aime, "GRADERS", graders)
    scripted = [(right[0], 12, False), (right[1], 28, True), ("", 28, True), ("nonsense", 9, False)]
    monkeypatch.setattr(eval_aime, "draw", lambda model, tokenizer, prompts, options: scripted)
    found, result = evaluate(policy, held_out, tmp_path / "out", samples=1, limit=4, batch_tokens=10_000)
    assert [found[i, 0]["correct"] for i in range(4)] == [True, False, False, False]
    assert [found[i, 0]["answer"] for i in range(4)] == [right[0], None, None, None]
    assert sorted(set(read)) == sorted({right[0], "nonsense"})
    assert (result["avg@1"], result["maj@1"], result["truncated"], result["answerless"]) == (0.25, 0.25, 0.5, 0.25)
