"""eval_aime.py on a model whose every response is known beforehand."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import write_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import eval_aime
from eval_aime import summarize
from support.runs import read_json, read_lines

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
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Folder of a model whose next word depends on the last one alone, with the chances of NEXT.

    The embedding of a word is a one-hot vector, which the layer does not change.
    """
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    size = len(WORDS)
    config = LlamaConfig(
        vocab_size=size,
        max_position_embeddings=64,
        eos_token_id=0,
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.model.layers.parameters():
        parameter.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(size)
    chances = torch.full((size, size), 1e-12)
    for last, word in enumerate(WORDS):
        for following in NEXT.get(word, ["<eos>"]):
            chances[WORDS.index(following), last] += 1
    # The last norm makes size ** 0.5 of a single 1.
    model.lm_head.weight.data = chances.log() / size**0.5
    model.save_pretrained(folder)
    return str(folder)


def file_of(folder: Path, *words: str, answer="16") -> str:
    """A file with a problem of each word."""
    rows = [{"problem": word, "answer": answer} for word in words]
    return write_lines(folder / f"{'-'.join(words)}.jsonl", rows)


@pytest.fixture
def problems(tmp_path) -> str:
    return file_of(tmp_path, "sure", "unsure", "wrong", "endless", "silent")


@pytest.fixture
def evaluate(tmp_path, model):
    """A function that evaluates in batches of two, in tmp_path / folder.

    Returns the samples in the order of the file, and the summary.
    """

    def run(problems: str, folder="out", **options) -> tuple:
        out = tmp_path / folder
        words = "--device=cpu --precision=float32 --instruction= --samples=4".split()
        words += "--temperature=1.0 --seed=1 --batch_size=2 --max_new_tokens=5".split()
        words += [f"--model={model}", f"--data={problems}", f"--output_dir={out}"]
        words += [f"--{name}={value}" for name, value in options.items()]  # the last one counts
        assert eval_aime.main(words) == 0
        return read_lines(out / "samples.jsonl"), read_json(out / "summary.json")

    return run


# ---------------------------------------------------------------- end to end
def test_samples_and_results_are_those_of_the_model(tmp_path, evaluate, capsys):
    problems = file_of(tmp_path, "sure", "wrong", "endless", "silent")
    samples, summary = evaluate(problems, precision="bfloat16")
    sure, wrong, endless, silent = samples[-4:]
    assert sure == {
        "set": problems,
        "index": 3,
        "prompt": "sure",
        "gold": "16",
        "response": r"\boxed{016}",
        "correct": True,
        "truncated": False,
        "tokens": 2,
    }
    assert wrong["response"] == r"\boxed{17}" and not wrong["correct"]
    # A truncated response is wrong, whatever it holds.
    assert endless["truncated"] and endless["tokens"] == 5 and not endless["correct"]
    assert silent["response"] == "" and silent["tokens"] == 1

    for name in ("avg@k", "pass@4", "truncated"):
        assert summary[problems][name] == 0.25, name
    assert "0.25" in capsys.readouterr().out


def test_options_reach_the_sampler_and_every_batch_has_a_seed_of_its_own(tmp_path, evaluate):
    """Two problems have equal chances, and every sample is a batch."""

    def responses(name: str, **options) -> list[str]:
        problems = file_of(tmp_path / name, "unsure", "unsure unsure")
        settings = {"samples": 20, "batch_size": 1} | options
        samples, _ = evaluate(problems, name, **settings)
        return [sample["response"] for sample in samples]

    drawn = responses("a")
    assert responses("elsewhere") == drawn
    assert set(drawn[::2]) == {r"\boxed{16}", r"\boxed{17}"}
    assert drawn[::2] != drawn[1::2]
    assert responses("b", seed=2) != drawn
    assert set(responses("c", temperature=0.01)) == {r"\boxed{16}"}
    assert set(responses("d", top_p=0.5)) == {r"\boxed{16}"}
    assert responses("e", temperature=0, samples=1) == [r"\boxed{16}"] * 2  # greedy


def test_answers_that_are_no_integers_need_the_grader_math(tmp_path, evaluate):
    pytest.importorskip("math_verify")
    half = file_of(tmp_path, "fraction", answer="0.5")
    with pytest.raises(ValueError, match="grader"):
        evaluate(half)
    _, summary = evaluate(half, grader="math")
    assert summary[half]["avg@k"] == 1


def test_a_reward_of_ones_own_grades_rows_without_answers(tmp_path, evaluate):
    problems = write_lines(tmp_path / "rows.jsonl", [{"prompt": "sure"}, {"prompt": "silent"}])
    (tmp_path / "rewards.py").write_text("half = lambda response, answer: len(response) and 0.5\n")
    samples, summary = evaluate(problems, reward=f"{tmp_path}/rewards.py:half")
    assert [sample["correct"] for sample in samples[-2:]] == [0.5, 0]
    assert summary[problems]["avg@k"] == 0.25 and summary[problems]["pass@4"] == 0.5


# ---------------------------------------------------------------- killed, continued, changed
def test_a_killed_evaluation_continues_as_if_it_was_uninterrupted(
    tmp_path, evaluate, problems, monkeypatch
):
    whole = evaluate(problems)
    path = tmp_path / "out/samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:30])
    assert evaluate(problems) == whole
    monkeypatch.setattr(eval_aime, "draw", None)
    assert evaluate(problems) == whole  # nothing is drawn again


def test_samples_may_change_and_settings_may_not(tmp_path, evaluate, problems):
    four = evaluate(problems, "four")
    two = evaluate(problems, samples=2)
    assert evaluate(problems) == four  # two are added
    assert evaluate(problems, samples=2, batch_size=3) == (four[0], two[1])  # the first two
    with pytest.raises(ValueError, match="temperature was"):
        evaluate(problems, temperature=0.5)


def test_of_a_changed_file_new_problems_and_those_with_other_answers_are_drawn(evaluate, problems):
    evaluate(problems)
    rows = [{"problem": "sure sure", "answer": 16}, {"problem": "sure", "answer": 18}]
    write_lines(Path(problems), rows)
    _, summary = evaluate(problems)
    assert summary[problems]["avg@k"] == 0.5


# ---------------------------------------------------------------- refusals
def test_a_year_is_a_data_set_of_the_hub(tmp_path, evaluate, monkeypatch):
    """Read from a folder with the name and columns of the repository on the hub."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)  # a folder of that name is preferred to the hub
    rows = [{"id": n, "problem": "sure " * n, "answer": 16} for n in range(1, 31)]
    write_lines(Path("HuggingFaceH4/aime_2024/train.jsonl"), rows)
    _, summary = evaluate("2024", samples=1)
    assert summary["2024"]["avg@k"] == 1


def test_a_response_that_the_model_has_no_positions_for_is_refused(evaluate, tmp_path):
    problems = file_of(tmp_path, "sure", "sure sure")
    evaluate(problems, samples=1, max_new_tokens=62)
    with pytest.raises(ValueError, match="^max_new_tokens.*64 positions.*lower it"):
        evaluate(problems, "other", samples=1, max_new_tokens=63)


# ---------------------------------------------------------------- statistics
@pytest.mark.parametrize(
    "rewards, expected",
    [
        # Of six pairs of samples five hold a right one, and three of the other problem's.
        (
            [[1, 1, 0, 0], [0, 0, 1, 0]],
            {"avg@k": 3 / 8, "pass@2": 4 / 6, "pass@4": 1, "tokens": 10},
        ),
        # Student's interval over problems, by scipy.stats.ttest_1samp
        ([[0, 0.5], [1, 0], [0.5, 0.5], [0.5, 0]], {"95 % low": 0.1453, "95 % high": 0.6047}),
        ([[0.75], [1], [1]], {"95 % low": 0.5581, "95 % high": 1}),  # cut off at 1
        ([[1, 0]], {"95 % low": 0, "95 % high": 1}),  # one problem says nothing of others
    ],
)
def test_the_summary_equals_counting_by_hand(rewards, expected):
    samples = pd.DataFrame({"prompt": range(len(rewards)), "correct": rewards}).explode("correct")
    result = summarize(samples.assign(truncated=False, tokens=10))
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-4)
