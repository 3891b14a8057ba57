"""integrations/trl_bapo.py on real trainers. Skipped without TRL.

What TRL's loss is given is compared with bapo.py, on the tokens that TRL's loss weighs.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
pytest.importorskip("trl")

from conftest import CACHE
from datasets import Dataset
from trl import GRPOTrainer

from bapo import ClipBounds, ClipSearch, contribution_masses, search_clip_bounds
from integrations.trl_bapo import BAPOConfig, BAPOTrainer
from tasks import countdown

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # of transformers, in TRL
    pytest.mark.filterwarnings("error:samples are not reused"),  # where they are
]
ROOT = Path(__file__).parent.parent
PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": "348:44="}]}] * 16)
# Two optimizer steps on each batch, so that ratios leave 1.
OPTIONS = dict(
    output_dir=CACHE.name,
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
    steps_per_generation=4,
    max_completion_length=10,
    learning_rate=5e-2,
)


# ---------------------------------------------------------------- toys
def toys() -> dict:
    """A small model and the rest that a trainer needs."""
    tokenizer = countdown.build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return {
        "model": countdown.build_model(tokenizer),
        "reward_funcs": reward,
        "processing_class": tokenizer,
        "eval_dataset": PROMPTS,
    }


def reward(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


def make(**options) -> BAPOTrainer:
    args = BAPOConfig(**OPTIONS | options)
    trainer = BAPOTrainer(args=args, train_dataset=PROMPTS, **toys())
    # train() would set it.
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def samples(seed):
    """A micro-batch as TRL's buffer holds it, with all that may weigh a token in TRL's loss.

    Lengths are unequal. The policy is nearly uniform, so its ratios to the old log-probs leave 1.
    """
    g = torch.Generator().manual_seed(seed)
    shape = (8, 12)
    return {
        "prompt_ids": torch.randint(3, 20, (8, 3), generator=g),
        "prompt_mask": (torch.arange(3) >= torch.arange(8)[:, None] % 3).long(),
        "completion_ids": torch.randint(3, 20, shape, generator=g),
        "completion_mask": (torch.arange(12) < torch.arange(4, 12)[:, None]).long(),
        "tool_mask": torch.randint(2, shape, generator=g),
        "importance_sampling_ratio": 2 * torch.rand(shape, generator=g),  # vLLM's correction
        "advantages": torch.randn(shape, generator=g) - 0.3,  # one per token
        "old_per_token_logps": 0.4 * torch.randn(shape, generator=g) - 3.0,
        "num_items_in_batch": torch.tensor(100),  # of the whole generation batch
    }


def used_bounds(trainer):
    """(low, high) with which TRL computes its loss."""
    return 1 - trainer.epsilon_low, 1 + trainer.epsilon_high


def bounds_of_step(trainer, *micro_batches):
    """The bounds after TRL's own training step on two micro-batches, without an update."""
    trainer._buffered_inputs = [None, None, *micro_batches]
    trainer._step = 2  # the second optimizer step on this buffer
    for _ in micro_batches:
        trainer.training_step(trainer.model, {}, None)
    return used_bounds(trainer)


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

    trainer._get_per_token_logps_and_entropies = forward
    at_one = inputs | {"old_per_token_logps": None}
    GRPOTrainer._compute_loss(trainer, trainer.model, at_one).backward()
    del trainer._get_per_token_logps_and_entropies

    log_probs = leaves[0].detach()
    log_ratio = log_probs - inputs.get("old_per_token_logps", log_probs)
    return torch.stack([log_ratio, -leaves[0].grad]).flatten(1)


def find(parts, search) -> ClipBounds:
    """What bapo.py finds on the tokens of all parts."""
    log_ratio, weighted_advantages = torch.cat(parts, dim=1).unsqueeze(1)
    weights = torch.ones_like(log_ratio)
    masses = contribution_masses(log_ratio, weighted_advantages, weights, search)
    return search_clip_bounds(masses, search)


# ---------------------------------------------------------------- one process, made-up samples
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_bounds_are_bapo_pys_on_the_tokens_of_trls_loss(loss_type):
    """Whatever weighs a token in TRL's loss weighs it in rho: tools' masks, vLLM's correction.

    Without old log-probs every ratio is 1.
    """
    trainer = make(loss_type=loss_type)
    trainer.use_vllm = True  # for its correction
    micro_batches = [samples(1), samples(2)]
    del micro_batches[1]["old_per_token_logps"]
    parts = [tokens(trainer, inputs) for inputs in micro_batches]
    # The search meets this target on its way.
    trainer.args.rho0 = find(parts, ClipSearch()).rho_start + 0.002
    search = find(parts, trainer.args.clip_search())
    assert search.reached
    assert search.high > 1.2

    assert bounds_of_step(trainer, *micro_batches) == search[:2]
    assert trainer._metrics["train"]["bapo/rho"] == [pytest.approx(search.rho, rel=1e-4)]


def test_without_advantages_rho_is_not_logged():
    """A NaN would be averaged with the rho of other searches."""
    trainer = make()
    inputs = samples(1) | {"advantages": torch.zeros(8, 12)}
    assert bounds_of_step(trainer, inputs, inputs) == (0.6, 1.2)
    assert "bapo/rho" not in trainer._metrics["train"]


# ---------------------------------------------------------------- real training
# Runs the page's script in each process with a toy model, toy options and evaluation. It keeps the
# tokens of each micro-batch, and the bounds that TRL's loss used.
RECORDED = """
import os
import runpy
import torch
import test_trl_bapo as toy
from integrations import trl_bapo

records = []

class Trainer(trl_bapo.BAPOTrainer):
    def __init__(self, **options):
        super().__init__(**options | toy.toys())

    def _search_bounds(self):
        assert self.model.training
        super()._search_bounds()

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            records.append((toy.tokens(self, inputs), toy.used_bounds(self)))
        return loss

def config(**options):
    evaluation = dict(eval_strategy="steps", eval_steps=1)
    toy_options = toy.OPTIONS | evaluation | dict(rho0=toy.RHO0, loss_type="bnpo", num_iterations=1)
    return toy.BAPOConfig(**options | toy_options)

trl_bapo.BAPOTrainer = Trainer
trl_bapo.BAPOConfig = config
trainer = runpy.run_path("train_bapo.py")["trainer"]
torch.save(records, f"{trainer.accelerator.process_index}.pt")
torch.distributed.barrier()
os._exit(0)  # a normal exit sometimes aborts in the threads of torch's process groups
"""
RHO0 = 0.74


def test_the_pages_script_in_two_processes_trains_with_the_bounds_of_all_their_tokens(tmp_path):
    """Both processes use the bounds of all tokens, although they hold unequal numbers of them.
    Evaluation between the steps searches nothing."""
    page = (ROOT / "integrations/README.md").read_text()
    script = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "train_bapo.py").write_text(script)
    (tmp_path / "recorded.py").write_text(RECORDED)
    PROMPTS.to_json(tmp_path / "train.jsonl")

    command = "-m torch.distributed.run --standalone --nproc_per_node=2 recorded.py"
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=environment,
        timeout=300,
        check=True,
    )
    first, second = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for i in range(0, 8, 2):  # four steps of two micro-batches
        parts, bounds = zip(*first[i : i + 2], *second[i : i + 2])
        assert bounds == (find(parts, ClipSearch(rho0=RHO0))[:2],) * 4


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "name, value", [("loss_type", "cispo"), ("rho0", 1.0), ("gradient_accumulation_steps", 3)]
)
def test_options_that_contradict_the_search_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        BAPOConfig(**OPTIONS | {name: value})


def test_ratios_that_are_all_1_are_warned_of():
    with pytest.warns(match="BAPO is GRPO"):
        BAPOConfig(**OPTIONS | {"steps_per_generation": 2})
