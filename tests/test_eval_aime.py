"""eval_aime.py on a model whose every response is known beforehand."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import write_lines
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import eval_aime
from eval_aime import GRADERS, Options, majority, summarize, vote
from runs import read_json, read_lines

datasets = pytest.importorskip("datasets")

# Word -> the words that the model may write after it, with equal chances; after all others <eos>.
NEXT = {
    "sure": [r"\boxed{016}"],
    "wrong": [r"\boxed{17}"],
    "unsure": [r"\boxed{16}", r"\boxed{16}", r"\boxed{17}"],
    "endless": ["endless"],
    "fraction": [r"\boxed{\frac{1}{2}}"],
}
ANSWERS = [r"\boxed{016}", r"\boxed{16}", r"\boxed{17}", r"\boxed{\frac{1}{2}}"]
WORDS = ["<eos>", "<chat>", "silent", *NEXT, *ANSWERS]


# ---------------------------------------------------------------- helpers
def save_model(folder: Path, chat_template: str | None = None) -> str:
    """Save a model whose next word depends on the last one alone, with the chances of NEXT.

    The embedding of a word is a one-hot vector, which the layer does not change.
    """
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    size = len(WORDS)
    config = LlamaConfig(
        vocab_size=size,
        max_position_embeddings=64,
        eos_token_id=0,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.model.layers.parameters():
        parameter.data.zero_()
    chances = torch.full((size, size), 1e-12)
    for last, word in enumerate(WORDS):
        for following in NEXT.get(word, ["<eos>"]):
            chances[WORDS.index(following), last] += 1
    model.model.embed_tokens.weight.data = torch.eye(size)
    # The last norm makes size ** 0.5 of a single 1.
    model.lm_head.weight.data = chances.log() / size**0.5
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def file_of(folder: Path, *words: str, answer="16") -> str:
    """A file with a problem of each word."""
    rows = [{"problem": word, "answer": answer} for word in words]
    return write_lines(folder / f"{'-'.join(words)}.jsonl", rows)


@pytest.fixture
def problems(tmp_path) -> str:
    return file_of(tmp_path, "sure", "wrong", "unsure", "endless", "silent")


def evaluate(model, problems, folder, **options) -> tuple:
    """Samples in the order of problem and index, and the summary; batches of two."""
    words = ["--device=cpu", "--precision=float32", "--instruction=", "--samples=4"]
    words += ["--batch_size=2", "--max_new_tokens=5"]
    words += [f"--model={model}", f"--data={problems}", f"--output_dir={folder}"]
    words += [f"--{name}={value}" for name, value in options.items()]  # the last one counts
    assert eval_aime.main(words) == 0
    samples = read_lines(folder / "samples.jsonl")
    samples.sort(key=lambda sample: (sample["problem"], sample["index"]))
    return samples, read_json(folder / "summary.json")


# ---------------------------------------------------------------- end to end
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_samples_and_results_are_those_of_the_model(tmp_path, out, model, precision, capsys):
    problems = file_of(tmp_path, "sure", "wrong", "endless", "silent")
    samples, summary = evaluate(model, problems, out, precision=precision)
    sure, wrong, endless, silent = samples[3::4]
    assert sure == {
        "set": problems,
        "problem": 0,
        "index": 3,
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
    assert silent["response"] == "" and silent["tokens"] == 1

    result = summary[problems]
    for name in ("avg@k", "maj@k", "pass@2", "pass@4", "truncated", "answerless"):
        assert result[name] == 0.25, name
    assert result["tokens"] == 2.5
    assert "0.25" in capsys.readouterr().out


def test_a_truncated_response_is_wrong_and_has_no_vote_whatever_it_holds(tmp_path, out, model):
    samples, _ = evaluate(model, file_of(tmp_path, "sure"), out, max_new_tokens=1)
    for sample in samples:
        assert sample["response"] == r"\boxed{016}" and sample["truncated"]
        assert not sample["correct"] and sample["answer"] is None


def test_options_reach_the_sampler(tmp_path, model):
    problems = file_of(tmp_path, "unsure")

    def responses(name: str, **options) -> list[str]:
        samples, _ = evaluate(model, problems, tmp_path / name, samples=20, **options)
        return [sample["response"] for sample in samples]

    drawn = responses("a", temperature=1.0)
    assert set(drawn) == {r"\boxed{16}", r"\boxed{17}"}  # every index has draws of its own
    assert responses("b", temperature=1.0, seed=1) != drawn
    assert set(responses("c", temperature=0.01)) == {r"\boxed{16}"}
    assert set(responses("d", top_p=0.5)) == {r"\boxed{16}"}


def test_every_batch_has_a_seed_of_its_own(tmp_path, out, model):
    """Two problems with equal chances, in batches of one."""
    problems = file_of(tmp_path, "unsure", "unsure unsure")
    samples, _ = evaluate(model, problems, out, samples=20, temperature=1.0, batch_size=1)
    drawn = [sample["response"] for sample in samples]
    assert drawn[:20] != drawn[20:]


def test_answers_that_are_no_integers_need_the_grader_math(tmp_path, out, model):
    half = file_of(tmp_path, "fraction", answer="0.5")
    with pytest.raises(ValueError, match="grader"):
        evaluate(model, half, out)
    assert not (out / "settings.json").exists()  # which is written before anything is drawn
    samples, _ = evaluate(model, half, out, grader="math")
    assert all(sample["correct"] and sample["answer"] == "1/2" for sample in samples)


def test_the_chat_template_and_the_instruction_are_used(tmp_path, out, problems):
    model = save_model(tmp_path / "chat", chat_template="<chat> {{ messages[0].content }}")
    samples, _ = evaluate(model, problems, out, instruction="sure")
    assert samples[4]["prompt"] == "<chat> wrong sure"
    assert all(sample["correct"] for sample in samples)


# ---------------------------------------------------------------- killed, continued, changed
def test_interrupted_and_continued_equals_uninterrupted(tmp_path, model, problems, monkeypatch):
    whole = evaluate(model, problems, tmp_path / "whole")
    folder = tmp_path / "interrupted"
    draws = iter([eval_aime.draw] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(eval_aime, "draw", lambda *arguments: next(draws)(*arguments))
        with pytest.raises(StopIteration):
            evaluate(model, problems, folder)
    assert len(read_lines(folder / "samples.jsonl")) == 5  # one of each problem
    assert evaluate(model, problems, folder) == whole
    monkeypatch.setattr(eval_aime, "draw", None)
    assert evaluate(model, problems, folder) == whole  # nothing is drawn again


def test_wherever_the_file_ends_the_rest_is_what_it_would_have_been(out, model, problems):
    evaluate(model, problems, out)
    path = out / "samples.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for count, half in ((0, 30), (3, 0), (8, 30), (13, 1)):
        path.write_bytes(b"".join(lines[:count]) + lines[count][:half])
        evaluate(model, problems, out)
        assert path.read_bytes() == whole


def test_more_samples_are_added_and_fewer_are_the_first(tmp_path, model, problems):
    four = evaluate(model, problems, tmp_path / "four")
    two = evaluate(model, problems, tmp_path / "more", samples=2)
    assert evaluate(model, problems, tmp_path / "more") == four
    assert evaluate(model, problems, tmp_path / "more", samples=2) == (four[0], two[1])


def test_a_changed_setting_is_refused_by_its_name(out, model, problems):
    evaluate(model, problems, out)
    changed = {"temperature": 0.5, "top_p": 0.5, "max_new_tokens": 6, "seed": 1, "grader": "math"}
    for name, value in changed.items():
        with pytest.raises(ValueError, match=f"{name} was"):
            evaluate(model, problems, out, **{name: value, "samples": 5})
    evaluate(model, problems, out, samples=5, batch_size=3)  # these may change


def test_a_retrained_model_in_the_same_folder_is_refused(tmp_path, out, problems):
    model = save_model(tmp_path / "model")
    evaluate(model, problems, out)
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["lm_head.weight"][0] += 1.0
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="weights was"):
        evaluate(model, problems, out)


def test_a_line_of_another_problem_is_named_and_nothing_is_changed(out, model, problems):
    evaluate(model, problems, out, samples=1)
    before = (out / "samples.jsonl").read_bytes()
    text = Path(problems).read_text()
    Path(problems).write_text(text.replace("unsure", "fraction"))
    with pytest.raises(ValueError, match="samples.jsonl, line 3 "):
        evaluate(model, problems, out, samples=1)
    assert (out / "samples.jsonl").read_bytes() == before


# ---------------------------------------------------------------- the two years
def test_both_years_are_read_and_evaluated(tmp_path, model, monkeypatch):
    """From folders with the names and columns of the repositories on the hub."""
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    rows = [{"problem": "sure " * n, "answer": f"{7 * n:03d}"} for n in range(1, 31)]
    write_lines(Path("HuggingFaceH4/aime_2024/data/train-00000-of-00001.jsonl"), rows)
    write_lines(Path("math-ai/aime25/test.jsonl"), rows)
    words = ["--model", model, "--device=cpu", "--samples=1", "--max_new_tokens=4"]
    words += ["--output_dir=out"]
    eval_aime.main(words)
    results = read_json(Path("out/summary.json"))
    assert list(results) == ["2024", "2025"]
    assert results["2024"]["problems"] == results["2025"]["problems"] == 30
    write_lines(Path("math-ai/aime25/test.jsonl"), rows[1:])
    with pytest.raises(ValueError, match="math-ai/aime25"):
        eval_aime.main(words)


# ---------------------------------------------------------------- refusals
def test_a_wrong_option_is_refused_by_its_name():
    for name, value in {"samples": 0, "top_p": 1.1, "device": "tpu"}.items():
        with pytest.raises(ValueError, match=name):
            Options(model="m", **{name: value})


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path, out, model):
    problems = file_of(tmp_path, "sure", "sure sure")
    with pytest.raises(ValueError, match="max_new_tokens"):
        evaluate(model, problems, out, max_new_tokens=63)


# ---------------------------------------------------------------- statistics
def samples_of(*problems: list[tuple]) -> pd.DataFrame:
    """A sample of every (answer, whether it is right) of every problem."""
    rows = []
    for number, answers in enumerate(problems):
        for answer, correct in answers:
            rows.append({"problem": number, "answer": answer, "correct": correct})
    return pd.DataFrame(rows).assign(truncated=False, tokens=10)


def test_the_summary_equals_counting_by_hand():
    first = [("1", True), ("1", True), ("2", False), (None, False)]
    samples = samples_of(first, [("3", False), ("3", False), ("4", True), (None, False)])
    samples.loc[7, ["truncated", "tokens"]] = (True, 40)
    result = summarize(samples)
    assert result["problems"] == 2 and result["k"] == 4
    assert result["avg@k"] == 3 / 8
    # Of six pairs of samples five hold a right one, and three of the other problem's.
    assert result["pass@2"] == pytest.approx(4 / 6)
    assert result["pass@4"] == 1 and "pass@8" not in result
    assert result["maj@k"] == 0.5  # 1 wins problem 0, and 3 problem 1
    assert result["truncated"] == result["answerless"] == 1 / 8
    assert result["tokens"] == 110 / 8


@pytest.mark.parametrize(
    "counts, low, high",
    [
        ([1, 2, 2, 1], 0.1453, 0.6047),  # by scipy.stats.ttest_1samp
        ([3, 4, 4], 0.5581, 1.0),  # cut off at 1
        ([1], 0.0, 1.0),  # one problem says nothing of others
    ],
)
def test_the_interval_is_student_s_over_problems_within_0_and_1(counts, low, high):
    answers = [("1", True)] * 4 + [("2", False)] * 4
    result = summarize(samples_of(*[answers[4 - count : 8 - count] for count in counts]))
    assert (result["95 % low"], result["95 % high"]) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    "votes, expected",
    [
        ([("1", True), ("2", False), ("2", False)], 0.0),
        ([("2", False), ("1", True), ("3", False)], 1 / 3),  # a tie
        ([("1", True), (None, False), (None, False)], 1.0),  # no answer, no vote
        ([(None, False)], 0.0),
    ],
)
def test_majority_and_its_ties(votes, expected):
    assert majority(samples_of(votes)) == pytest.approx(expected)


def test_equal_answers_vote_together_and_other_boxes_are_answers_too():
    assert vote("016") == vote(r"\text{16}") == "16"
    assert vote(r" \frac{1}{2} ") == "1/2"
    assert vote(" x+1 ") == "x+1"
    assert vote(" ") is None
    assert GRADERS["math"][0]("Answer: 16") == "16"
    assert GRADERS["aime"][0]("Answer: 16") is None
