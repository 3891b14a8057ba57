"""integrations/trl_bapo.py on real trainers. Skipped without TRL.

What TRL's loss is given is compared with bapo.py, on the tokens that TRL's loss weighs.
"""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
pytest.importorskip("trl")

from conftest import write_lines
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo import ClipBounds, ClipSearch, contribution_masses, search_clip_bounds
from integrations import common
from integrations.trl_bapo import BAPOConfig, BAPOTrainer

# Of transformers, in TRL.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
ROOT = Path(__file__).parent.parent
WORDS = ["[PAD]", "[EOS]", "[UNK]", "a", "b", "c", "d", "e", "f", "1", "2"]
TEXTS = ["a b c", "d e", "f 1 2 a", "b"]
PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in TEXTS * 4])
# Generations are used twice, so that ratios leave 1.
OPTIONS = dict(
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=1,
    max_steps=4,
    num_generations=4,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    num_iterations=2,
    max_completion_length=10,
    learning_rate=5e-2,
)
every_scope = pytest.mark.parametrize("scope", ["micro-batch", "step"])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run each test in a folder of its own, because trainers make their output folder there."""
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- toys
def tokenizer():
    ids = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side="left",
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )


def policy():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        max_position_embeddings=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


def reward(completions, **_):
    """The more early letters the better."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(sum(word in "abc" for word in text.split())) for text in texts]


def make(trainer_class, **options):
    config_class = BAPOConfig if trainer_class is BAPOTrainer else GRPOConfig
    args = config_class(**OPTIONS | options)
    trainer = trainer_class(
        policy(), reward, args, PROMPTS, PROMPTS.select(range(4)), processing_class=tokenizer()
    )
    # train() would set it.
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def samples(seed):
    """A micro-batch as TRL's buffer holds it, with all that may weigh a token in TRL's loss.

    Lengths are unequal. The policy is nearly uniform, so its ratios to the old log-probs leave 1.
    """
    g = torch.Generator().manual_seed(seed)
    padding = torch.randint(0, 3, (8, 1), generator=g)
    lengths = torch.randint(2, 13, (8, 1), generator=g)
    shape = (8, 12)
    return {
        "prompt_ids": torch.randint(3, len(WORDS), (8, 3), generator=g),
        "prompt_mask": (torch.arange(3) >= padding).long(),
        "completion_ids": torch.randint(3, len(WORDS), shape, generator=g),
        "completion_mask": (torch.arange(12) < lengths).long(),
        "tool_mask": torch.randint(2, shape, generator=g),
        "importance_sampling_ratio": 2 * torch.rand(shape, generator=g),  # vLLM's correction
        "advantages": torch.randn(shape, generator=g) - 0.3,  # one per token
        "old_per_token_logps": 0.4 * torch.randn(shape, generator=g) - 2.4,
        "ref_per_token_logps": -2 - torch.rand(shape, generator=g),
        "num_items_in_batch": torch.tensor(100),  # of the whole generation batch
    }


def used_bounds(trainer):
    """(low, high) with which TRL computes its loss."""
    return 1 - trainer.epsilon_low, 1 + trainer.epsilon_high


def step(trainer, *micro_batches):
    """TRL's own training step on two micro-batches, without an update.

    Returns the losses, and the bounds used for each.
    """
    trainer._buffered_inputs = micro_batches
    trainer._step = 2  # not the first use, so nothing is generated
    losses = []
    bounds = []
    for _ in micro_batches:
        losses.append(trainer.training_step(trainer.model, {}, None).item())
        bounds.append(used_bounds(trainer))
    return losses, bounds


# ---------------------------------------------------------------- the oracle
def tokens(trainer, inputs):
    """Log-ratios, and weights times advantages in TRL's own loss, stacked: [2, N * T].

    Where every ratio is 1 no token is clipped, and d loss / d log-prob is -weight * advantage. So
    TRL itself tells the weights.
    """
    leaves = []

    def forward(*args, **options):
        outputs = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *args, **options)
        leaves.append(outputs[0].detach().requires_grad_())
        return leaves[0], *outputs[1:]

    metrics = copy.deepcopy(trainer._metrics)
    trainer._get_per_token_logps_and_entropies = forward
    at_one = inputs | {"old_per_token_logps": None}
    GRPOTrainer._compute_loss(trainer, trainer.model, at_one).backward()
    del trainer._get_per_token_logps_and_entropies
    trainer._metrics = metrics

    log_probs = leaves[0].detach()
    log_ratio = log_probs - inputs.get("old_per_token_logps", log_probs)
    return torch.stack([log_ratio, -leaves[0].grad]).flatten(1)


def find(part, search) -> ClipBounds:
    """What bapo.py finds on these tokens."""
    log_ratio, weighted_advantages = part.unsqueeze(1)
    ones = torch.ones_like(log_ratio)
    masses = contribution_masses(log_ratio, weighted_advantages, ones, search)
    return search_clip_bounds(masses, search)


def find_each(trainer, parts) -> list[ClipBounds]:
    """What bapo.py finds for each of a step's two micro-batches."""
    if trainer.args.search_scope == "step":
        parts = [torch.cat(parts, dim=1)] * 2
    return [find(part, trainer._search) for part in parts]


# ---------------------------------------------------------------- one process, made-up samples
@every_scope
def test_at_fixed_bounds_loss_and_gradient_are_grpos(scope):
    fixed = dict(rho0=0.0, low_start=0.7, low_max=0.7, high_start=1.28, high_max=1.28)
    results = []
    for trainer_class, options in [
        (GRPOTrainer, dict(epsilon=0.3, epsilon_high=0.28)),
        (BAPOTrainer, fixed | dict(search_scope=scope)),
    ]:
        trainer = make(trainer_class, **options)
        trainer.beta = 0.1  # a KL term beside it
        losses, _ = step(trainer, samples(1), samples(2))
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        results.append([losses, gradients])
    assert_close(*results, rtol=1e-5, atol=1e-8)


@every_scope
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_bounds_are_bapo_pys_on_the_tokens_of_trls_loss(loss_type, scope):
    """Whatever weighs a token in TRL's loss weighs it in rho: tools' masks, vLLM's correction."""
    trainer = make(BAPOTrainer, loss_type=loss_type, search_scope=scope)
    trainer.use_vllm = True  # for its correction
    first = samples(1)
    second = samples(2)
    parts = [tokens(trainer, first), tokens(trainer, second)]
    # The search meets this target on its way.
    rho_start = find_each(trainer, parts)[0].rho_start
    trainer._search = replace(trainer._search, rho0=rho_start + 0.002)
    searches = find_each(trainer, parts)
    assert searches[0].reached
    assert searches[0].high > trainer._search.high_start

    _, bounds = step(trainer, first, second)
    assert bounds == [search[:2] for search in searches]
    logged = searches[:1] if scope == "step" else searches
    for name in ClipBounds._fields:
        values = [float(getattr(search, name)) for search in logged]
        assert trainer._metrics["train"][f"bapo/{name}"] == pytest.approx(values, rel=1e-4)

    # The next step is searched anew. Without old log-probs every ratio is 1.
    del second["old_per_token_logps"]
    on_policy = find(tokens(trainer, second), trainer._search)[:2]
    assert on_policy != searches[0][:2]
    _, bounds = step(trainer, second, second)
    assert bounds == [on_policy] * 2


def test_rho_is_logged_only_where_a_token_has_an_advantage():
    """A 1.0 or a NaN in its place would be averaged with the rho of other searches."""
    trainer = make(BAPOTrainer)
    without = samples(1)
    without["advantages"] = torch.zeros_like(without["advantages"])
    step(trainer, without, without)
    assert set(trainer._metrics["train"]["bapo/low"]) == {0.6}
    assert "bapo/rho" not in trainer._metrics["train"]


# ---------------------------------------------------------------- real training
# Runs the page's script in each process with a toy model, toy options and evaluation. It keeps the
# tokens of each micro-batch, and the bounds that TRL's loss used.
RECORDED = """
import json
import os
import runpy
import sys
import torch
import test_trl_bapo as toy
from integrations import trl_bapo

records = []

class Trainer(trl_bapo.BAPOTrainer):
    def __init__(self, model, reward_funcs, **options):
        options |= {"eval_dataset": toy.PROMPTS, "processing_class": toy.tokenizer()}
        super().__init__(toy.policy(), toy.reward, **options)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            records.append((toy.tokens(self, inputs), toy.used_bounds(self)))
        return loss

def config(**options):
    return toy.BAPOConfig(**options | toy.OPTIONS | json.loads(sys.argv[1]))

trl_bapo.BAPOTrainer = Trainer
trl_bapo.BAPOConfig = config
trainer = runpy.run_path("train_bapo.py")["trainer"]
rhos = [line["bapo/rho"] for line in trainer.state.log_history if "bapo/rho" in line]
torch.save((records, rhos), f"{trainer.accelerator.process_index}.pt")
torch.distributed.barrier()
os._exit(0)  # a normal exit sometimes aborts in the threads of torch's process groups
"""


@pytest.mark.parametrize("num_iterations, steps_per_generation", [(2, 2), (1, 4)])
def test_the_pages_script_in_two_processes_trains_with_the_bounds_of_all_their_tokens(
    tmp_path, num_iterations, steps_per_generation
):
    """Both processes use the bounds of all tokens, although they hold unequal numbers of them.
    Evaluation between the steps searches nothing."""
    page = (ROOT / "integrations/README.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (row,) = re.findall(r'^(\{"prompt": .*\})$', page, re.MULTILINE)
    (command,) = re.findall(r"^python (-m torch\..*)", page, re.MULTILINE)
    (tmp_path / "train_bapo.py").write_text(script)
    (tmp_path / "recorded.py").write_text(RECORDED)
    write_lines(tmp_path / "train.jsonl", [json.loads(row)] * 16)

    options = dict(rho0=0.74, loss_type="bnpo", eval_strategy="steps", eval_steps=1)
    options |= dict(num_iterations=num_iterations, steps_per_generation=steps_per_generation)
    words = command.replace("train_bapo.py", "recorded.py").split()
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, *words, json.dumps(options)]
    subprocess.run(command, env=environment, timeout=300, check=True)
    (first, rhos), (second, _) = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert len(first) == 8
    for i in range(4):  # a step has two micro-batches
        parts, bounds = zip(*first[2 * i : 2 * i + 2], *second[2 * i : 2 * i + 2])
        tokens_of_step = torch.cat(parts, dim=1)
        search = find(tokens_of_step, ClipSearch(rho0=0.74))
        assert bounds == (search[:2],) * 4
        assert rhos[i] == pytest.approx(search.rho, rel=1e-4)
        is_first_update = i % 2 == 0
        assert (tokens_of_step[0].abs().max() < 1e-5) == is_first_update


# ---------------------------------------------------------------- options
def test_defaults_are_those_of_the_paper():
    assert BAPOConfig(**OPTIONS).clip_search() == ClipSearch()


@pytest.mark.parametrize(
    "name, value",
    [("loss_type", "cispo"), ("epsilon", 0.1), ("epsilon_high", 0.28), ("delta", 4.0), ("rho0", 1)],
)
def test_options_that_contradict_the_search_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        BAPOConfig(**OPTIONS | {name: value})


def test_a_step_whose_samples_are_not_all_there_at_its_start_is_refused():
    uneven = dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=3)
    with pytest.raises(ValueError, match="gradient_accumulation_steps.*'micro-batch'"):
        BAPOConfig(**OPTIONS | uneven)
    BAPOConfig(**OPTIONS | uneven, search_scope="micro-batch")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(rho0=0.0), []),
        (dict(rho0=0.0, num_iterations=1), ["BAPO is GRPO"]),
        (dict(rho0=0.0, num_iterations=1, steps_per_generation=4), []),
        (dict(steps_per_generation=4), ["fewer than 16"]),
        (dict(per_device_train_batch_size=8), []),
        (dict(per_device_train_batch_size=8, search_scope="micro-batch"), ["fewer than 16"]),
    ],
)
def test_ratios_that_are_all_1_and_searches_of_few_responses_are_warned_of(options, said, recwarn):
    common.warn_of_few_responses.cache_clear()
    BAPOConfig(**OPTIONS | options)
    warned = " ".join(str(warning.message) for warning in recwarn)
    assert re.findall(r"BAPO is GRPO|fewer than 16", warned) == said
