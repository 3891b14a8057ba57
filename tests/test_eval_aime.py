"""eval_aime.py on a model whose every response is known beforehand."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import write_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import eval_aime
import reward
from eval_aime import Options, majority, summarize, vote
from support.files import read_json, read_lines

datasets = pytest.importorskip("datasets")

# Word -> the words that the model may write after it, with equal chances; after all others <eos>.
NEXT = {
    "sure": [r"\boxed{016}"],
    "wrong": [r"\boxed{17}"],
    "unsure": [r"\boxed{16}", r"\boxed{16}", r"\boxed{17}"],
    "endless": [r"\boxed{16},"],  # right, but for its length
    r"\boxed{16},": [r"\boxed{16},"],
    "fraction": [r"\boxed{\frac{1}{2}}"],
}
WORDS = ["<eos>", "silent", *NEXT]
WORDS += [r"\boxed{016}", r"\boxed{16}", r"\boxed{17}", r"\boxed{\frac{1}{2}}"]


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


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def file_of(folder: Path, *words: str, answer="16") -> str:
    """A file with a problem of each word."""
    rows = [{"problem": word, "answer": answer} for word in words]
    return write_lines(folder / f"{'-'.join(words)}.jsonl", rows)


@pytest.fixture
def problems(tmp_path) -> str:
    return file_of(tmp_path, "sure", "unsure", "wrong", "endless", "silent")


def evaluate(model, problems, folder, **options) -> tuple:
    """Evaluate in batches of two. Returns the samples in the order of the file, and the summary."""
    words = "--device=cpu --precision=float32 --instruction= --samples=4 --temperature=1.0".split()
    words += f"--seed=1 --batch_size=2 --max_new_tokens=5 --model={model}".split()
    words += [f"--data={problems}", f"--output_dir={folder}"]
    words += [f"--{name}={value}" for name, value in options.items()]  # the last one counts
    assert eval_aime.main(words) == 0
    return read_lines(folder / "samples.jsonl"), read_json(folder / "summary.json")


# ---------------------------------------------------------------- end to end
def test_samples_and_results_are_those_of_the_model(tmp_path, out, model, capsys):
    problems = file_of(tmp_path, "sure", "wrong", "endless", "silent")
    samples, summary = evaluate(model, problems, out, precision="bfloat16")
    sure, wrong, endless, silent = samples[-4:]
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
    # A truncated response is wrong and has no vote, whatever it holds.
    assert not endless["correct"] and endless["answer"] is None
    assert silent["response"] == "" and silent["tokens"] == 1

    result = summary[problems]
    for name in ("avg@k", "maj@k", "pass@2", "pass@4", "truncated", "answerless"):
        assert result[name] == 0.25, name
    assert result["tokens"] == 2.5
    assert "0.25" in capsys.readouterr().out


def test_options_reach_the_sampler_and_every_batch_has_a_seed_of_its_own(tmp_path, model):
    """Two problems have equal chances, and every sample is a batch."""
    problems = file_of(tmp_path, "unsure", "unsure unsure")

    def responses(name: str, **options) -> list[str]:
        folder = tmp_path / name
        samples, _ = evaluate(model, problems, folder, samples=10, batch_size=1, **options)
        return [sample["response"] for sample in samples]

    drawn = responses("a")
    assert set(drawn[::2]) == {r"\boxed{16}", r"\boxed{17}"}
    assert drawn[::2] != drawn[1::2]
    assert responses("b", seed=2) != drawn
    assert set(responses("c", temperature=0.01)) == {r"\boxed{16}"}
    assert set(responses("d", top_p=0.5)) == {r"\boxed{16}"}


def test_answers_that_are_no_integers_need_the_grader_math(tmp_path, out, model, monkeypatch):
    pytest.importorskip("math_verify")
    half = file_of(tmp_path, "fraction", answer="0.5")
    with pytest.raises(ValueError, match="grader"):
        evaluate(model, half, out)
    samples, _ = evaluate(model, half, out, grader="math")
    assert all(sample["correct"] and sample["answer"] == "1/2" for sample in samples)

    monkeypatch.setattr(reward, "compare_latex", lambda pairs: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # before the model is loaded
        evaluate("missing", half, tmp_path / "other", grader="math")


def test_the_chat_template_and_the_instruction_are_used(tmp_path, out, problems):
    model = save_model(tmp_path / "chat", chat_template="silent {{ messages[0].content }}")
    samples, _ = evaluate(model, problems, out, instruction="sure")
    assert samples[1]["prompt"] == "silent unsure sure"


# ---------------------------------------------------------------- killed, continued, changed
def test_a_killed_evaluation_continues_as_if_it_was_uninterrupted(
    out, model, problems, monkeypatch
):
    whole = evaluate(model, problems, out)
    path = out / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:30])
    assert evaluate(model, problems, out) == whole
    # In the middle of a batch, the other half is drawn alone, and gets other samples.
    path.write_bytes(b"".join(lines[:7]))
    samples, summary = evaluate(model, problems, out)
    assert samples[:7] == whole[0][:7]
    assert list(map(eval_aime.key, samples)) == list(map(eval_aime.key, whole[0]))
    monkeypatch.setattr(eval_aime, "draw", None)
    assert evaluate(model, problems, out) == (samples, summary)  # nothing is drawn again


def test_more_samples_are_added_and_fewer_are_the_first(tmp_path, out, model, problems):
    four = evaluate(model, problems, tmp_path / "four")
    two = evaluate(model, problems, out, samples=2)
    assert evaluate(model, problems, out) == four
    assert evaluate(model, problems, out, samples=2) == (four[0], two[1])


def test_a_changed_setting_is_refused_by_its_name(out, model, problems):
    evaluate(model, problems, out)
    with pytest.raises(ValueError, match="temperature was.*seed was"):
        evaluate(model, problems, out, temperature=0.5, seed=2)
    evaluate(model, problems, out, samples=5, batch_size=3)  # these may change


def test_a_problem_that_was_reworded_is_drawn_anew(out, model, problems):
    evaluate(model, problems, out)
    path = Path(problems)
    path.write_text(path.read_text().replace("unsure", "sure sure"))
    _, summary = evaluate(model, problems, out)
    assert summary[problems]["problems"] == 5 and summary[problems]["avg@k"] == 0.4


# ---------------------------------------------------------------- years
def test_the_years_are_read_and_evaluated(tmp_path, out, model, monkeypatch):
    """From folders with the names and columns of the repositories on the hub."""
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    rows = [{"id": n, "problem": "sure " * n, "answer": n} for n in range(1, 31)]
    for place in eval_aime.YEARS.values():
        name, _, split = place.partition(":")
        write_lines(Path(name) / f"{split or 'test'}.jsonl", rows)
    assert Options(model="m").data == ["2024", "2025"]  # the paper's
    for year in ("2024", "2025", "2026"):
        _, summary = evaluate(model, year, tmp_path / year, samples=1)
        assert summary[year]["avg@k"] == pytest.approx(1 / 30)  # one answer is 16
    write_lines(Path("math-ai/aime26/test.jsonl"), rows[1:])
    with pytest.raises(ValueError, match="math-ai/aime26"):
        evaluate(model, "2026", out)


# ---------------------------------------------------------------- refusals
def test_a_prompt_that_leaves_no_room_is_refused(tmp_path, out, model):
    problems = file_of(tmp_path, "sure", "sure sure")
    with pytest.raises(ValueError, match="max_new_tokens"):
        evaluate(model, problems, out, max_new_tokens=63)


# ---------------------------------------------------------------- statistics
def samples_of(*problems: str) -> pd.DataFrame:
    """A sample for every letter: its answer, which is right if it is a capital; "-" is none."""
    rows = []
    for number, letters in enumerate(problems):
        for letter in letters:
            answer = None if letter == "-" else letter
            rows.append({"problem": number, "answer": answer, "correct": letter.isupper()})
    return pd.DataFrame(rows).assign(truncated=False, tokens=10)


def test_the_summary_equals_counting_by_hand():
    samples = samples_of("AAb-", "ccD-")
    samples.loc[7, ["truncated", "tokens"]] = (True, 40)
    result = summarize(samples)
    assert result["problems"] == 2 and result["k"] == 4
    assert result["avg@k"] == 3 / 8
    # Of six pairs of samples five hold a right one, and three of the other problem's.
    assert result["pass@2"] == pytest.approx(4 / 6)
    assert result["pass@4"] == 1 and "pass@8" not in result
    assert result["maj@k"] == 0.5  # A wins the first problem, and c the second
    assert result["truncated"] == result["answerless"] == 1 / 8
    assert result["tokens"] == 110 / 8


@pytest.mark.parametrize(
    "problems, low, high",
    [
        (["Abbb", "AAbb", "AAbb", "Abbb"], 0.1453, 0.6047),  # by scipy.stats.ttest_1samp
        (["AAAb", "AAAA", "AAAA"], 0.5581, 1.0),  # cut off at 1
        (["Abbb"], 0.0, 1.0),  # one problem says nothing of others
    ],
)
def test_the_interval_is_student_s_over_problems_within_0_and_1(problems, low, high):
    result = summarize(samples_of(*problems))
    assert (result["95 % low"], result["95 % high"]) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    "votes, expected",
    [
        ("Abb", 0.0),
        ("bAc", 1 / 3),  # a tie
        ("A--", 1.0),  # no answer, no vote
        ("-", 0.0),
    ],
)
def test_majority_and_its_ties(votes, expected):
    assert majority(samples_of(votes)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "answers, expected",
    [
        (["016", "16", r"16\text{ cm}"], "16"),
        ([r"\frac{1}{2}", "0.5", r"x = \dfrac12"], "1/2"),
        ([r"\frac{\pi}{2}", r"\pi/2", r"\frac\pi2.", "pi/2", "π/2"], r"\pi/2"),
        (["(3,4)", "(3, 4)", r"\left(3,\,4\right)"], "(3,4)"),
        ([r"\frac{3\sqrt{3}}{4}", r"3 \sqrt 3 / 4", r"3\sqrt3/4\text{ cm}"], r"3\sqrt3/4"),
        (["C", r"\textbf{(C)}"], "c"),
        ([" ", r"\,"], None),
    ],
)
def test_equal_answers_are_one_vote(answers, expected):
    assert {vote(answer) for answer in answers} == {expected}
