"""rollout.py against literal softmaxes, and against models whose distributions are given.

`bigram` makes such a model: its logits depend on the last token alone, by a table. `chain` is one
that counts up: its most likely responses are known, token by token.
"""

import copy
import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from conftest import adapter_config
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

import rollout
from rollout import PartialRollouts, Rollouts, generate, load_policy, token_log_probs
from support import countdown, loading
from support.task import Problem

VOCABULARY = 20
EOS = 2
LAST = VOCABULARY - 1
SHARP = 0.001  # a temperature at which only the likeliest token is drawn
PROMPTS = [[1, 7, 8, 12], [1, 4], [1, 5, EOS, 7, 8, 9, 10], [1, 9, 9]]
RESPONSES = [[5, 6, EOS], [10, 11, 4, 4, 19, 3, 12], [EOS], [7, 13, 8, 2, 14]]


@pytest.fixture
def model(tokenizer):
    """Untrained, yet far from uniform: mistakes show."""
    return countdown.build_model(tokenizer, seed=3).eval()


def bigram(tokenizer, table: torch.Tensor):
    """A model with logits table[t] [V] after the token t. Untied, one layer, float32."""
    vocabulary = len(table)
    model = countdown.build_model(tokenizer, num_hidden_layers=1, vocab_size=vocabulary).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        # The last norm makes 8 of 1000: its root mean square is 1000 / sqrt(64).
        model.model.embed_tokens.weight.fill_diagonal_(1000.0)
        model.lm_head.weight[:, :vocabulary] = table.T / 8
    return model


def chain_table() -> torch.Tensor:
    """After t comes t + 1, and after LAST comes EOS; at a temperature of 1 mostly others."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    for token in range(LAST):
        table[token, token + 1] = 1.0
    table[LAST, EOS] = 1.0
    return table


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    """The chain and its tokenizer, saved."""
    folder = tmp_path / "model"
    bigram(tokenizer, chain_table()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chain(folder):
    return load_policy(str(folder))[0]


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def given_rollouts() -> Rollouts:
    """RESPONSES to PROMPTS, of unequal lengths."""
    return rollout.Rollouts(PROMPTS, RESPONSES, [False, True, False, True], "cpu")


def response_of(rollouts: Rollouts, row: int) -> list[int]:
    return rollouts.response_ids[row][rollouts.mask[row]].tolist()


def prompt_of(rollouts: Rollouts, row: int) -> list[int]:
    return rollouts.sequences[row, : rollouts.prompt_lengths[row]].tolist()


def literal(model, prompt: list[int], response: list[int], temperature: float):
    """Log-probs and entropies [T], token by token, from all that stands before each."""
    log_probs = []
    entropies = []
    for place, token in enumerate(response):
        logits = model(torch.tensor([prompt + response[:place]])).logits[0, -1]
        probabilities = (logits / temperature).softmax(-1)
        log_probs.append(probabilities[token].log())
        entropies.append(-(probabilities * probabilities.log()).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def assert_close(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def gradients(model) -> dict[str, torch.Tensor]:
    """Copies of all gradients, which are set back."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


@contextmanager
def kept_for_backward():
    """A list that gets all tensors that the block keeps for the backward pass."""
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield tensors


# ---------------------------------------------------------------- log-probs
@pytest.mark.parametrize("read_tokens, chunk_tokens", [(1000, 1000), (16, 3), (1, 1)])
def test_log_probs_entropies_and_gradients_are_those_of_a_literal_loop(
    model, monkeypatch, read_tokens, chunk_tokens
):
    """Whatever is read together, in the order of the rows that are asked for."""
    monkeypatch.setattr(rollout, "READ_TOKENS_ON_CPU", read_tokens)
    monkeypatch.setattr(rollout, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    rollouts = given_rollouts()
    rows = torch.tensor([2, 0, 1])
    log_probs, entropy = token_log_probs(model, rollouts, rows, 0.7)
    importance = torch.arange(1.0, 22.0).view(3, 7)  # every token counts differently
    (log_probs * importance).sum().backward()
    found = gradients(model)
    assert not entropy.requires_grad
    assert not log_probs[~rollouts.mask[rows]].any()
    assert not entropy[~rollouts.mask[rows]].any()
    total = 0.0
    for index, row in enumerate(rows.tolist()):
        length = len(RESPONSES[row])
        expected, expected_entropy = literal(model, PROMPTS[row], RESPONSES[row], 0.7)
        assert_close(log_probs[index, :length], expected)
        assert_close(entropy[index, :length], expected_entropy)
        total = total + (expected * importance[index, :length]).sum()
    total.backward()
    expected_gradients = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-3)


def test_micro_batches_hold_every_row_once():
    rollouts = given_rollouts()
    rows = torch.tensor([3, 0, 1])
    parts = rollout.micro_batches(rollouts, rows, 16)
    assert [part.tolist() for part in parts] == [[1], [3, 0]]  # of 9 tokens; of 8 and 7
    assert rollout.micro_batches(rollouts, rows[:0], 16) == []


@pytest.mark.parametrize("lengths", [[3, 9, 1, 7, 2, 8], [4] * 10])
@pytest.mark.parametrize("limit", [1, 8, 16, 1000])
def test_packs_hold_every_row_once_within_the_limit_and_the_longest_first(lengths, limit):
    packs = rollout.pack_by_length(lengths, limit)
    rows = sum(packs, [])
    assert sorted(rows) == list(range(len(lengths)))
    for pack in packs:
        longest = max(lengths[row] for row in pack)
        assert len(pack) == 1 or longest * len(pack) <= limit
    if len(packs) == 1:
        assert rows == sorted(rows)  # nothing is reordered without need
    else:
        assert [lengths[row] for row in rows] == sorted(lengths, reverse=True)


@pytest.mark.parametrize("chunk_tokens, is_kept", [(1000, True), (3, False)])
def test_the_logits_of_several_chunks_are_not_kept_for_the_backward_pass(
    model, monkeypatch, chunk_tokens, is_kept
):
    monkeypatch.setattr(rollout, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    with kept_for_backward() as tensors:
        token_log_probs(model, given_rollouts(), torch.arange(4))
    assert any(tensor.shape[-1:] == (VOCABULARY,) for tensor in tensors) == is_kept


def test_the_head_is_float32_under_autocast(tokenizer, tmp_path):
    """Logits in [16, 32) have steps of 0.125 in bfloat16; these differ by less."""
    row = torch.linspace(16.01, 16.9, VOCABULARY)
    bigram(tokenizer, row.expand(VOCABULARY, -1)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(str(tmp_path), precision="bfloat16")
    rollouts = given_rollouts()
    with loading.autocast("cpu", "bfloat16"):
        log_probs, _ = token_log_probs(model, rollouts, torch.arange(4))
        drawn_from = model(rollouts.sequences).logits
        in_bfloat16 = torch.ones(2, 2) @ torch.ones(2, 2)
    assert in_bfloat16.dtype == torch.bfloat16
    expected = row.log_softmax(-1)[rollouts.response_ids] * rollouts.mask
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn_from[0, 0], row, rtol=0, atol=1e-4)
    log_probs.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    with loading.autocast("cpu", "float32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


# ---------------------------------------------------------------- sampling
@pytest.mark.parametrize("batch_tokens", [10_000, 30, 1])
def test_responses_come_in_the_order_of_their_prompts_groups_together(
    chain, tokenizer, batch_tokens
):
    """An EOS in a prompt ends nothing; one in a response belongs to it, and pads (pad is EOS)."""
    prompts = [[1, 17], [1, EOS, 15, 15], [1, 5, EOS, 9, 18], [LAST]]
    rollouts = generate(
        chain,
        prompts,
        max_new_tokens=4,
        group_size=2,
        temperature=SHARP,
        batch_tokens=batch_tokens,
    )
    expected = [[18, 19, EOS], [16, 17, 18, 19], [19, EOS], [EOS]]
    for row in range(8):
        assert prompt_of(rollouts, row) == prompts[row // 2]
        assert response_of(rollouts, row) == expected[row // 2]
        whole = prompts[row // 2] + expected[row // 2]
        assert rollouts.sequences[row, : len(whole)].tolist() == whole
        assert rollouts.lengths[row] == len(whole)
    assert rollouts.truncated.tolist() == [False, False, True, True, False, False, False, False]
    texts = rollout.response_texts(tokenizer, rollouts)
    assert texts[::2] == [":;", "*=:;", ";", ""]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_sampling_options_of_the_model_s_own_change_nothing(folder, tokenizer, lora_rank):
    """Pairs of tokens are drawn as often as the table says, at the temperature that is given."""
    if lora_rank:
        pytest.importorskip("peft")
    vocabulary = 64  # the library's default of top_k would leave 50
    table = 0.2 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
    table += 3 * torch.eye(vocabulary)  # repetitions are likely, and a penalty shows
    table[:, EOS] = -100.0
    bigram(tokenizer, table).save_pretrained(folder)
    edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.1,
        top_k=1,
        top_p=0.1,
        min_p=0.9,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
    )
    model, _ = load_policy(str(folder), lora_rank=lora_rank)
    torch.manual_seed(0)
    rollouts = generate(model, [[1, 7]], group_size=4000, max_new_tokens=2, temperature=0.7)
    probabilities = (table / 0.7).softmax(-1)
    expected = probabilities[7].unsqueeze(1) * probabilities
    first, second = rollouts.response_ids.T
    counts = torch.bincount(vocabulary * first + second, minlength=vocabulary**2)
    found = counts.view(vocabulary, vocabulary) / 4000
    assert (found - expected).abs().max() < 0.05  # six standard errors
    assert (found.sum(1) > 0).sum() == vocabulary - 1


def test_a_batch_is_bounded_with_the_tokens_that_will_be_drawn(chain, monkeypatch):
    """batch_tokens bounds the key-value cache, which new tokens fill as well."""
    shapes = []
    draw = chain.generate

    def recording(prompt_ids, **options):
        shapes.append(prompt_ids.shape)
        return draw(prompt_ids, **options)

    monkeypatch.setattr(chain, "generate", recording)
    generate(chain, [[1, 4], [1, 5], [1, 6]], max_new_tokens=8, batch_tokens=20)
    assert shapes == [(2, 2), (1, 2)]


def test_every_token_of_a_prompt_is_read_also_one_with_the_id_0(policy):
    """Sharp sampling draws the likeliest tokens of the sequence without padding."""
    model, _ = load_policy(policy)
    model.lm_head.weight.data *= 20
    prompts = [[1, 0, 8, 12], [0, 4], [1, 5, EOS, 7, 0, 9, 10]]
    rollouts = generate(model, prompts, max_new_tokens=5, temperature=SHARP)
    for row, prompt in enumerate(prompts):
        response = response_of(rollouts, row)
        for place, token in enumerate(response):
            logits = model(torch.tensor([prompt + response[:place]])).logits[0, -1]
            assert logits[token] > logits.max() - 0.1


def test_texts_keep_their_spaces():
    vocabulary = {"<eos>": 0, "3": 1, " ": 2, ".": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")),
        eos_token="<eos>",
        clean_up_tokenization_spaces=True,
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    rollouts = rollout.Rollouts([[1]], [[1, 2, 3]], [True], "cpu")
    assert rollout.response_texts(tokenizer, rollouts) == ["3 ."]


def test_texts_end_before_the_eos_and_other_special_tokens_stay_visible(tokenizer):
    rollouts = rollout.Rollouts([[1], [1]], [[7, 0, 12, EOS], [7, 14, 12]], [False, True], "cpu")
    assert rollout.response_texts(tokenizer, rollouts) == ["3<pad>8", "3+8"]


def test_every_eos_of_model_and_tokenizer_ends_a_response(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[18])
    edit_json(folder / "config.json", eos_token_id=14)
    model, _ = load_policy(str(folder))
    rollouts = generate(model, [[4], [15], [LAST]], max_new_tokens=20, temperature=SHARP)
    found = [response_of(rollouts, row) for row in range(3)]
    assert found == [list(range(5, 15)), [16, 17, 18], [EOS]]
    assert not rollouts.truncated.any()


# ---------------------------------------------------------------- partial rollouts
def test_every_token_keeps_the_log_prob_of_the_policy_that_drew_it(model, tmp_path):
    """Also if what waits was saved between the steps. A policy is another one at every step."""
    options = {"budget": 2, "max_new_tokens": 7, "group_size": 3, "temperature": 0.7}
    model.generation_config.eos_token_id = [EOS, 7, 8]  # some responses end early
    torch.manual_seed(0)
    policies = {}
    waiting = []
    resumed = 0
    for step in range(1, 7):
        policies[step] = copy.deepcopy(model)
        partial = PartialRollouts(**options)
        partial.restore(waiting)
        problems = [Problem(prompt, str(step)) for prompt in PROMPTS[:2]]
        rollouts, answered = partial.advance(model, problems, step)
        torch.save(partial.saved(), tmp_path / "waiting.pt")
        waiting = torch.load(tmp_path / "waiting.pt", weights_only=True)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        if rollouts is None:
            continue
        assert len(rollouts.mask) == 3 * len(answered)  # whole groups only
        for row, inside in enumerate(rollouts.mask):
            prompt = prompt_of(rollouts, row)
            response = response_of(rollouts, row)
            assert prompt == answered[row // 3].prompt
            assert rollouts.truncated[row] == (response[-1] not in [EOS, 7, 8])
            assert not set(response[:-1]) & {EOS, 7, 8}
            versions = rollouts.versions[row][inside]
            assert versions[0] == int(answered[row // 3].answer)
            resumed += int(versions[-1] > versions[0])
            for version in versions.unique().tolist():
                drawn = versions == version
                expected = literal(policies[version], prompt, response, 0.7)
                assert_close(rollouts.rollout_log_probs[row][inside][drawn], expected[0][drawn])
                assert_close(rollouts.entropy[row][inside][drawn], expected[1][drawn])
    assert resumed


@torch.no_grad()
def versions_of_steps(chain, prompts: list[list[int]], **options) -> list[list]:
    """A group of one begins at each step with the next prompt: what is given out at each step.

    Of each response: its tokens, their versions, and whether it was cut off.
    """
    partial = PartialRollouts(group_size=1, temperature=SHARP, **options)
    given_out = []
    for step, prompt in enumerate(prompts, 1):
        rollouts, problems = partial.advance(chain, [Problem(prompt, "")], step)
        found = []
        for row in range(len(problems)):
            response = response_of(rollouts, row)
            versions = rollouts.versions[row][rollouts.mask[row]].tolist()
            found.append((response, versions, bool(rollouts.truncated[row])))
        given_out.append(found)
    return given_out


def test_responses_grow_by_the_budget_up_to_the_limit_whatever_the_others_have_left(chain):
    """At the third step an EOS lies just within the limit of one response, and past the other's."""
    steps = versions_of_steps(chain, [[14], [15], [4], [4]], budget=2, max_new_tokens=5)
    assert steps == [
        [],
        [],
        [([15, 16, 17, 18, 19], [1, 1, 2, 2, 3], True)],
        [([16, 17, 18, 19, EOS], [2, 2, 3, 3, 4], False)],
    ]


# ---------------------------------------------------------------- loading
def without_a_weight(folder: Path, **others) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights | others, folder / "model.safetensors", {"format": "pt"})


def with_a_weight_of_another_shape(folder: Path) -> None:
    without_a_weight(folder, **{"lm_head.weight": torch.zeros(VOCABULARY + 1, 64)})


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_nan(folder: Path) -> None:
    without_a_weight(folder, **{"lm_head.weight": torch.full((VOCABULARY, 64), torch.nan)})


def without_eos(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)


def with_capped_logits(folder: Path) -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, named",
    [
        (without_a_weight, "lm_head.weight"),
        (with_a_weight_of_another_shape, "lm_head.weight"),
        (without_tokenizer, "tokenizer"),
        (with_nan, "NaN"),
        (without_eos, "EOS"),
        (with_capped_logits, "model"),
    ],
)
def test_what_would_train_something_else_is_refused(folder, damage, named):
    """Files that are cut off or gone: test_resume.py."""
    damage(folder)
    with pytest.raises(ValueError, match=f"^model: .*{named}"):
        load_policy(str(folder))


@pytest.mark.parametrize("name", ["missing/folder", "README.md"])
def test_a_model_that_is_not_there_is_refused_in_one_line(name):
    with pytest.raises(ValueError, match=f"^model: .*'{name}'") as raised:
        load_policy(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "tied, options", [(False, {}), (True, {}), (False, {"gradient_checkpointing": True})]
)
def test_a_policy_has_float32_weights_no_dropout_and_the_head_that_was_saved(
    tmp_path, tokenizer, tied, options
):
    saved = countdown.build_model(tokenizer, tie_word_embeddings=tied, attention_dropout=0.5)
    saved.to(torch.bfloat16).save_pretrained(tmp_path)  # as most models come
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(str(tmp_path), **options)
    log_probs, _ = token_log_probs(model, given_rollouts(), torch.tensor([1]))
    expected, _ = literal(saved.float().eval(), PROMPTS[1], RESPONSES[1], 1.0)
    assert_close(log_probs[0], expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    tensors = dict(saved.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name]), name
    assert len(tensors) == len(list(model.parameters()))


# ---------------------------------------------------------------- memory
# Layers of Qwen2.5, smaller: width, that between, heads, key-value heads.
LIKE_1_5B = (384, 2240, 12, 2)
LIKE_7B = (448, 2368, 28, 4)
TOKENS = 50


def memory(model) -> torch.Tensor:
    """Parameters; bytes of activations, of copies of weights, and of keys and values."""
    rollouts = rollout.Rollouts([[1]], [[5] * (TOKENS - 1)], [True], "cpu")
    with loading.autocast("cpu", "bfloat16"):
        with kept_for_backward() as tensors:
            token_log_probs(model, rollouts, torch.arange(1))
        with torch.no_grad():
            cache = model(rollouts.sequences).past_key_values
    activations = {}  # bytes, by the place of a storage
    copies = {}
    for tensor in tensors:
        kept = activations if {TOKENS, TOKENS - 1} & {*tensor.shape} else copies
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for parameter in model.parameters():
        copies.pop(parameter.untyped_storage().data_ptr(), None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return torch.tensor([parameters, sum(activations.values()), sum(copies.values()), cached])


@pytest.mark.parametrize(
    "shape, options, activations, copies, cached",
    [
        (LIKE_1_5B, {}, 77, 2, 8),
        (LIKE_1_5B, {"gradient_checkpointing": True}, 4, 0, 8),
        (LIKE_7B, {"lora_rank": 4}, 67, 0, 4),
        (LIKE_7B, {"lora_rank": 4, "gradient_checkpointing": True}, 2, 0, 4),
    ],
)
def test_a_layer_takes_the_memory_that_the_page_says(
    tmp_path, tokenizer, shape, options, activations, copies, cached
):
    """It is what a second layer adds to the first, in the units of docs/own_model.md."""
    if torch.__version__ < (2, 11):
        pytest.skip("older versions take more, as the page says")
    if "lora_rank" in options:
        pytest.importorskip("peft")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    tokenizer.save_pretrained(tmp_path)
    memories = []
    for layers in (1, 2):
        sizes = dict(zip(names, shape), num_hidden_layers=layers)
        countdown.build_model(tokenizer, **sizes).save_pretrained(tmp_path)
        model, _ = load_policy(str(tmp_path), precision="bfloat16", **options)
        memories.append(memory(model))
    of_layer = (memories[1] - memories[0]).tolist()
    width, _, heads, key_value_heads = shape
    assert of_layer[1] / TOKENS / width == pytest.approx(activations, abs=0.5)
    assert of_layer[2] / of_layer[0] == pytest.approx(copies, abs=0.05)
    if cached == 8 and Version(transformers.__version__) >= Version("5.24"):
        cached = 6  # it keeps values in bfloat16 beside float32 keys, as the page says
    assert of_layer[3] == cached * TOKENS * key_value_heads * width / heads
    page = Path(rollout.__file__).with_name("docs").joinpath("own_model.md").read_text()
    assert f"{activations} · layers · width" in page
    assert re.search(rf"\b{cached} (· layers · key-value heads|instead of 8)", page)


# ---------------------------------------------------------------- adapters
def test_adapters_begin_as_nothing_and_are_all_that_is_trained_and_saved(
    policy, tokenizer, tmp_path, monkeypatch
):
    """The oracle is peft's own merge. They come back exactly, from wherever they are loaded."""
    pytest.importorskip("peft")
    folder = tmp_path / "adapters"
    monkeypatch.chdir(Path(policy).parent)
    relative = Path(policy).name
    plain, _ = load_policy(policy)
    model, _ = load_policy(relative, lora_rank=3)
    torch.rand(7)  # what was drawn before does not decide how they begin
    other, _ = load_policy(policy, lora_rank=3)
    rollouts = given_rollouts()
    rows = torch.arange(4)
    before, _ = token_log_probs(plain, rollouts, rows)
    log_probs, _ = token_log_probs(model, rollouts, rows)
    assert_close(log_probs, before)
    log_probs.sum().backward()
    linear = [m for m in plain.modules() if isinstance(m, torch.nn.Linear)]
    trained = gradients(model)
    assert len(trained) == 2 * (len(linear) - 1)  # all but the head
    same = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name) == (name in trained)
        assert torch.equal(parameter, same[name])
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    log_probs, _ = token_log_probs(model, rollouts, rows)
    assert (log_probs - before).abs().max() > 0.01

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    monkeypatch.chdir(tmp_path)
    loaded, _ = load_policy(str(folder))
    expected = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad == expected[name].requires_grad, name
    loaded.save_pretrained(tmp_path / "again")
    config = adapter_config(folder)
    assert config == adapter_config(tmp_path / "again")
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    load_policy(str(folder), lora_rank=3)  # as a resumed run does
    with pytest.raises(ValueError, match="lora_rank.*rank 3, got 64"):
        load_policy(str(folder), lora_rank=64)
    merged, _ = token_log_probs(loaded.merge_and_unload(), rollouts, rows)
    assert_close(merged, log_probs)


def test_adapters_are_float32_beside_frozen_weights_in_bfloat16(policy):
    pytest.importorskip("peft")
    model, _ = load_policy(policy, precision="bfloat16", lora_rank=2, gradient_checkpointing=True)
    with loading.autocast("cpu", "bfloat16"):
        log_probs, _ = token_log_probs(model, given_rollouts(), torch.arange(4))
    assert log_probs.dtype == torch.float32
    log_probs.sum().backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
    for name, parameter in model.named_parameters():
        if "base_layer" in name and "norm" not in name:
            assert parameter.dtype == torch.bfloat16
