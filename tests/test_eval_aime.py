"""eval_aime.py on a model whose every response is known beforehand."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from conftest import write_lines
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import eval_aime
from eval_aime import GRADERS, Options, majority, summarize, vote

datasets = pytest.importorskip("datasets")

ROOT = Path(__file__).parent.parent
# Word -> the words that the model writes after it, each with its probability.
NEXT = {
    "sure": {r"\boxed{016}": 1.0},
    "wrong": {r"\boxed{17}": 1.0},
    "unsure": {r"\boxed{16}": 0.6, r"\boxed{17}": 0.4},
    "endless": {"endless": 1.0},
    "silent": {"<eos>": 1.0},
    "fraction": {r"\boxed{\frac{1}{2}}": 1.0},
}
WORDS = ["<eos>", "<chat>", *NEXT, r"\boxed{016}", r"\boxed{16}", r"\boxed{17}"]
WORDS.append(r"\boxed{\frac{1}{2}}")
POSITIONS = 64


# ---------------------------------------------------------------- helpers
def save_model(folder: Path, chat_template: str = "") -> str:
    """Save a model whose next word depends on the last one alone, with the chances of NEXT.

    All layers add nothing, so that the head reads which word came last.
    """
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
    tokenizer.chat_template = chat_template or None
    tokenizer.save_pretrained(folder)
    size = 16
    config = LlamaConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=POSITIONS,
        eos_token_id=0,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(WORDS)])
        chances = torch.full((len(WORDS), len(WORDS)), 1e-12)
        for word in WORDS:
            for following, chance in NEXT.get(word, {"<eos>": 1.0}).items():
                chances[vocabulary[following], vocabulary[word]] = chance
        # The last norm makes size ** 0.5 of a single 1.
        model.lm_head.weight[:, : len(WORDS)] = chances.log() / size**0.5
        model.lm_head.weight[:, len(WORDS) :] = 0.0
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What `datasets` makes of the tests' files stays with them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def problems(tmp_path) -> str:
    """A file of five problems with the answer 16."""
    words = ["sure", "wrong", "unsure", "endless", "silent"]
    return write_lines(tmp_path / "five.jsonl", [{"problem": w, "answer": 16} for w in words])


def arguments(model, problems, folder, **options) -> list[str]:
    """A command line: batches of two of the five problems."""
    defaults = {"samples": 4, "batch_size": 2, "max_new_tokens": 5, "device": "cpu"}
    defaults |= {"precision": "float32", "instruction": ""}
    words = ["--model", model, "--data", problems, "--output_dir", str(folder)]
    for name, value in (defaults | options).items():
        words += [f"--{name}", str(value)]
    return words


def evaluate(model, problems, folder, **options) -> tuple[list[dict], dict]:
    """Samples in the order of problem and index, and the summary."""
    assert eval_aime.main(arguments(model, problems, folder, **options)) == 0
    return samples_in(folder), json.loads((folder / "summary.json").read_text())


def samples_in(folder: Path) -> list[dict]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return sorted(records, key=lambda record: (record["problem"], record["index"]))


# ---------------------------------------------------------------- end to end
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_samples_and_results_are_those_of_the_model(tmp_path, out, model, precision, capsys):
    words = ["sure", "wrong", "endless", "silent"]
    records = [{"problem": word, "answer": 16} for word in words]
    problems = write_lines(tmp_path / "four.jsonl", records)
    samples, summary = evaluate(model, problems, out, precision=precision)

    numbers = [(sample["problem"], sample["index"]) for sample in samples]
    assert numbers == list(itertools.product(range(4), range(4)))
    sure, wrong, endless, silent = samples[::4]
    assert sure == {
        "set": problems,
        "problem": 0,
        "index": 0,
        "prompt": "sure",
        "gold": "16",
        "response": r"\boxed{016}",
        "answer": "16",
        "correct": True,
        "truncated": False,
        "tokens": 2,
    }
    assert wrong["answer"] == "17" and not wrong["correct"]
    assert endless["truncated"] and endless["tokens"] == 5
    assert silent["response"] == "" and silent["tokens"] == 1 and not silent["truncated"]

    result = summary[problems]
    assert result["problems"] == result["k"] == 4
    for name in ("avg@k", "maj@k", "pass@2", "pass@4", "truncated", "answerless"):
        assert result[name] == 0.25, name
    assert result["tokens"] == 2.5
    assert result["95 % low"] < 0.25 < result["95 % high"]
    assert "0.25" in capsys.readouterr().out


def test_a_truncated_response_is_wrong_and_has_no_vote_whatever_it_holds(tmp_path, out, model):
    problems = write_lines(tmp_path / "one.jsonl", [{"problem": "sure", "answer": 16}])
    samples, _ = evaluate(model, problems, out, max_new_tokens=1)
    for sample in samples:
        assert sample["response"] == r"\boxed{016}" and sample["truncated"]
        assert not sample["correct"] and sample["answer"] is None


def test_options_reach_the_sampler(tmp_path, model):
    problems = write_lines(tmp_path / "one.jsonl", [{"problem": "unsure", "answer": 16}])

    def responses(name: str, **options) -> list[str]:
        samples, _ = evaluate(model, problems, tmp_path / name, samples=20, **options)
        return [sample["response"] for sample in samples]

    drawn = responses("a", temperature=1.0)
    assert set(drawn) == {r"\boxed{16}", r"\boxed{17}"}  # every index has draws of its own
    assert responses("b", temperature=1.0) == drawn
    assert responses("c", temperature=1.0, seed=1) != drawn
    # Batches of one sample each: their seeds differ by the number of the problem, too.
    twins = [{"problem": word, "answer": 16} for word in ("unsure", "unsure unsure")]
    both = write_lines(tmp_path / "two.jsonl", twins)
    samples, _ = evaluate(model, both, tmp_path / "f", samples=20, temperature=1.0, batch_size=1)
    drawn = [sample["response"] for sample in samples]
    assert drawn[:20] != drawn[20:]
    assert set(responses("d", temperature=0.01)) == {r"\boxed{16}"}
    assert set(responses("e", top_p=0.5)) == {r"\boxed{16}"}


def test_answers_that_are_no_integers_need_the_grader_math(tmp_path, out, model, monkeypatch):
    half = write_lines(tmp_path / "half.jsonl", [{"problem": "fraction", "answer": "0.5"}])
    with pytest.raises(ValueError, match="grader"):
        evaluate(model, half, out)
    assert not (out / "settings.json").exists()  # which is written before anything is drawn
    samples, _ = evaluate(model, half, out, grader="math")
    assert all(sample["correct"] and sample["answer"] == "1/2" for sample in samples)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    root = write_lines(tmp_path / "root.jsonl", [{"problem": "sure", "answer": r"\sqrt{2}"}])
    with pytest.raises(ValueError, match="pip install math-verify"):
        evaluate(model, root, tmp_path / "root", grader="math")


def test_the_chat_template_and_the_instruction_are_used(tmp_path, out, model, problems):
    template = "<chat> {{ messages[0].content }}"
    chat_model = save_model(tmp_path / "chat", chat_template=template)
    samples, _ = evaluate(chat_model, problems, out, instruction="sure")
    assert samples[4]["prompt"] == "<chat> wrong sure"
    assert all(sample["correct"] for sample in samples)


# ---------------------------------------------------------------- killed, continued, changed
def test_killed_and_continued_equals_uninterrupted(tmp_path, model, problems):
    whole = evaluate(model, problems, tmp_path / "whole", samples=20)
    folder = tmp_path / "killed"
    path = folder / "samples.jsonl"
    process = subprocess.Popen(
        [sys.executable, "eval_aime.py", *arguments(model, problems, folder, samples=20)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert path.read_bytes().count(b"\n") < 100
    assert not (folder / "summary.json").exists()
    assert evaluate(model, problems, folder, samples=20) == whole


def test_wherever_the_file_ends_the_rest_is_what_it_would_have_been(out, model, problems):
    # The answers to problem 2 are drawn, and it shares a batch with problem 3.
    _, whole = evaluate(model, problems, out)
    path = out / "samples.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for count, half in ((0, 30), (3, 0), (8, 30), (13, 1), (14, 30)):
        whole_lines = b"".join(lines[:count])
        path.write_bytes(whole_lines + lines[count][:half])
        _, summary = evaluate(model, problems, out)
        assert summary == whole
        assert path.read_bytes() == content


def test_more_samples_are_added_and_fewer_are_the_first(tmp_path, model, problems):
    four = evaluate(model, problems, tmp_path / "four")
    _, summary_of_two = evaluate(model, problems, tmp_path / "more", samples=2)
    assert evaluate(model, problems, tmp_path / "more") == four
    samples, summary = evaluate(model, problems, tmp_path / "more", samples=2)
    assert (samples, summary) == (four[0], summary_of_two)


def test_a_changed_setting_is_refused_by_its_name(out, model, problems):
    evaluate(model, problems, out)
    before = (out / "samples.jsonl").read_bytes()
    changed = {"temperature": 0.5, "top_p": 0.5, "max_new_tokens": 6, "seed": 1, "grader": "math"}
    for name, value in changed.items():
        with pytest.raises(ValueError, match=f"{name} was"):
            evaluate(model, problems, out, **{name: value, "samples": 5})
        assert (out / "samples.jsonl").read_bytes() == before
    evaluate(model, problems, out, samples=5, batch_size=3)  # these may change


def test_other_weights_and_other_problems_are_refused(tmp_path, out, problems):
    model = save_model(tmp_path / "model")
    evaluate(model, problems, out)
    rows = [{"problem": word, "answer": 17} for word in ("sure", "wrong", "unsure")]
    with pytest.raises(ValueError, match="samples.jsonl, line 1 "):
        evaluate(model, write_lines(Path(problems), rows), out)
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["lm_head.weight"][0] += 1.0
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="weights was"):
        evaluate(model, problems, out)


def test_a_line_of_another_sample_is_named_and_nothing_is_changed(out, model, problems):
    evaluate(model, problems, out, samples=1)
    path = out / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="samples.jsonl, line 3 "):
        evaluate(model, problems, out, samples=1)
    assert path.read_bytes() == b"".join(lines)


# ---------------------------------------------------------------- the two years
def aime(count: int = 30) -> list[dict]:
    return [{"problem": f"{'sure ' * n}sure", "answer": f"{7 * n:03d}"} for n in range(count)]


def test_both_years_are_read_and_evaluated(tmp_path, model, monkeypatch):
    """From folders with the names, files and columns of the repositories on the hub."""
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    of_2024 = Path("HuggingFaceH4/aime_2024/data/train-00000-of-00001.parquet")
    of_2024.parent.mkdir(parents=True)
    rows = [row | {"id": number, "solution": "?"} for number, row in enumerate(aime())]
    datasets.Dataset.from_list(rows).to_parquet(of_2024)
    of_2025 = Path("math-ai/aime25/test.jsonl")
    write_lines(of_2025, [row | {"answer": rf"{row['answer']}^\circ"} for row in aime()])
    words = ["--model", model, "--samples", "1", "--max_new_tokens", "4", "--device", "cpu"]
    assert eval_aime.main([*words, "--instruction", "", "--output_dir", "out"]) == 0
    results = json.loads(Path("out/summary.json").read_text())
    assert list(results) == ["2024", "2025"]
    assert results["2024"]["problems"] == results["2025"]["problems"] == 30
    assert len(samples_in(Path("out"))) == 60
    for rows in (aime(29), [*aime(29), aime(1)[0]], [*aime(29), {"problem": "p", "answer": "x"}]):
        write_lines(of_2025, rows)
        with pytest.raises(ValueError, match="math-ai/aime25|answer.*'x'"):
            eval_aime.main([*words, "--data", "2025", "--output_dir", "other"])


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "name, value",
    [("samples", 0), ("top_p", 1.1), ("device", "tpu"), ("data", ["2024", "2025", "2024"])],
)
def test_a_wrong_option_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        Options(model="m", **{name: value})


# ---------------------------------------------------------------- statistics
def test_the_summary_equals_counting_by_hand():
    samples = pd.DataFrame({"problem": [0, 0, 0, 0, 1, 1, 1, 1]})
    samples["answer"] = ["1", "1", "2", None, "3", "3", "4", None]
    samples["correct"] = [True, True, False, False, False, False, True, False]
    samples["truncated"] = [False] * 7 + [True]
    samples["tokens"] = [10] * 7 + [40]
    result = summarize(samples)
    assert result["problems"] == 2 and result["k"] == 4
    assert result["avg@k"] == 3 / 8
    # Of six pairs of samples five hold a right one, and three of the other problem's.
    assert result["pass@2"] == pytest.approx(4 / 6)
    assert result["pass@4"] == 1 and "pass@8" not in result
    assert result["maj@k"] == 0.5  # 1 wins problem 0, and 3 problem 1
    assert result["truncated"] == result["answerless"] == 1 / 8
    assert result["tokens"] == 110 / 8


@pytest.mark.parametrize("counts", [[0, 1, 4, 2, 2], [3, 4, 4], [0, 0], [1]])
def test_the_interval_is_student_s_over_problems_within_0_and_1(counts):
    rows = []
    for problem, count in enumerate(counts):
        rows += [{"problem": problem, "correct": index < count} for index in range(4)]
    result = summarize(pd.DataFrame(rows).assign(answer="1", truncated=False, tokens=1))
    expected = (0.0, 1.0)  # one problem says nothing of others
    if len(counts) > 1:
        means = [count / 4 for count in counts]
        interval = scipy.stats.ttest_1samp(means, 0).confidence_interval()
        expected = np.clip(interval, 0, 1)
    assert (result["95 % low"], result["95 % high"]) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(
    "votes, expected",
    [
        ([("1", True), ("2", False), ("2", False)], 0.0),
        ([("2", False), ("1", True)], 0.5),  # a tie
        ([("2", False), ("1", True), ("3", False)], 1 / 3),
        ([("1", True), (None, False), (None, False)], 1.0),  # no answer, no vote
        ([(None, False)], 0.0),
    ],
)
def test_majority_and_its_ties(votes, expected):
    samples = pd.DataFrame(votes, columns=["answer", "correct"])
    assert majority(samples) == pytest.approx(expected)


def test_equal_answers_vote_together_and_other_boxes_are_answers_too():
    for answer in ("016", r"\text{16}"):
        assert vote(answer) == "16"
    assert vote(r" \frac{1}{2} ") == "1/2"
    assert vote(" x+1 ") == "x+1"
    assert vote(" ") is None
    assert GRADERS["math"][0]("Answer: 16") == "16"
    assert GRADERS["aime"][0]("Answer: 16") is None
