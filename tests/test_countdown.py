"""countdown.py: problems, grades, demonstrations and the supervised checkpoint."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks import countdown, problems_of_step
from tasks.countdown import demonstration, grade, load_task


def test_problems_are_disjoint_and_repeatable_and_every_epoch_has_an_order_of_its_own(tokenizer):
    train, held_out, _ = load_task()
    assert (len(train), len(held_out)) == (1604, 256)
    assert len({problem.answer for problem in train + held_out}) == 1860
    assert train == load_task().train
    both = problems_of_step(train, 1, 2 * 1604, seed=0)
    first, second = both[:1604], both[1604:]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(train)
    for prompt, answer in train:
        assert len(prompt) == countdown.PROMPT_TOKENS
        assert tokenizer.decode(prompt) == f"<bos>{answer}="


@pytest.mark.parametrize(
    "response, right",
    [
        ("3+8=11*4=44", True),
        ("4*8=32+3=35;3+8=11*4=44", True),
        ("3+8=11*4=44;4*8=32+3=35", False),  # the last attempt counts
        ("3+8=11*4=44;", False),
        ("3+8=12*4=44", False),  # wrong arithmetic
        ("5+6=11*4=44", False),  # other numbers
        ("3-8=-5*4=-20", False),  # another value
    ],
)
def test_a_grade_is_that_of_the_last_attempt(response, right):
    assert grade(response, "348:44") is right


def test_an_answer_has_all_attempts_from_left_to_right():
    assert countdown.attempts_by_answer("348")["348:44"] == ["3+8=11*4=44", "8+3=11*4=44"]
    assert countdown.attempts_by_answer("111")["111:-1"] == ["1-1=0-1=-1"]


def test_demonstrations_end_with_the_first_right_attempt_or_the_second_one():
    rng = random.Random(0)
    right = 0
    for _, answer in rng.choices(load_task().train, k=4000):
        attempts = demonstration(answer, rng).split(";")
        grades = [grade(attempt, answer) for attempt in attempts]
        assert grades in ([True], [False, True], [False, False])
        right += grades[-1]
    assert right / 4000 == pytest.approx(0.75, abs=0.05)  # seven standard errors


def test_the_tokenizer_has_a_token_per_character(tokenizer):
    text = "348:44=4*8=32+3=35;3-8=-5*4=-20"
    ids = tokenizer(f"{text}<eos>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *text, "<eos>"]
    assert tokenizer.decode(ids) == f"<bos>{text}<eos>"


@pytest.mark.parametrize("steps", [0, 3])
def test_two_commands_at_once_make_one_checkpoint_which_its_seed_decides(
    steps, tmp_path, monkeypatch
):
    monkeypatch.setattr(countdown, "SUPERVISED_STEPS", steps)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(countdown.supervised_checkpoint, tmp_path, 1) for _ in range(2)]
    folder, other = [call.result() for call in calls]
    assert folder == other
    saved = weights(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(saved, weights(countdown.train_supervised(seed=1)[0]))
    assert not torch.equal(saved, weights(countdown.train_supervised(seed=0)[0]))


def weights(model) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_supervised_checkpoint_learns_the_responses(monkeypatch):
    """The loss is the responses' own: what a demonstration's tokens cost, the EOS included."""
    monkeypatch.setattr(countdown, "SUPERVISED_STEPS", 100)
    model, tokenizer = countdown.train_supervised(seed=0)
    ids = tokenizer("348:44=3+8=11*4=44<eos>", return_tensors="pt").input_ids
    predicted = model.eval()(ids).logits.log_softmax(-1)[0]
    log_probs = predicted[7:-1].gather(1, ids[0, 8:, None])
    assert log_probs.mean() > -2  # uniform ones: -3.0; after these steps about -1
    assert log_probs[-1] > -2  # the EOS
    assert predicted[-1, tokenizer.pad_token_id] < -2  # padding after the EOS is no target
