"""Time train.py against TRL's GRPOTrainer in one run, on one thread: samples and updates per second.

    pip install trl==1.16.0 && python benchmarks/vs_trl.py

Both train the Countdown model from the same random weights on the same prompts: 16 prompts x 8 responses of at most 28
tokens, drawn by Hugging Face `generate`, then 8 full-batch updates with GRPO's bounds, AdamW, float32, no KL, no gradient
checkpointing. The learning rate is tiny, so that both see responses of the same lengths throughout. Logging of each is left
on, checkpoints are not. They take turns; reported are medians over batches of rollouts, the first of each turn left out.

It compares the loops around one small model, where Python and memory traffic count. It does not compare samplers (both use
`generate`; TRL can use vLLM) or several GPUs (train.py has none), and a large model on a GPU hides much of the difference.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import countdown
import train

PROMPTS, GROUP, LENGTH, RATE = 16, 8, 28, 1e-9


def even(response: str, answer: str) -> bool:
    """A reward that an untrained model earns half the time, so that no group is dropped."""
    return len(response) % 2 == 0


def ours(policy: str, batches: int, updates: int) -> list[float]:
    """Seconds of each batch of rollouts with its updates."""
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        options = train.Options(
            methods=[f"grpo@{updates}"], steps=batches, prompts_per_step=PROMPTS, group_size=GROUP, max_new_tokens=LENGTH,
            device="cpu", learning_rate=RATE, checkpoint_every=batches,
        )  # fmt: skip
        task = train.Task(*countdown.problems(), even)
        run = train.make_runs(options, task)[0]._replace(folder=Path(folder), start=policy)
        train.train_run(run, task, watch=lambda step, update, *_: ends.append(time.perf_counter()))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    print(f"train.py: mean response {statistics.fmean(line['response_length'] for line in lines):.1f} tokens")
    ends = ends[updates - 1 :: updates]
    return [b - a for a, b in zip(ends, ends[1:])]


class BatchEnds(TrainerCallback):
    """Notes the time after the last update on each batch of rollouts."""

    def __init__(self, updates: int):
        self.updates, self.ends = updates, []

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.updates == 0:
            self.ends.append(time.perf_counter())


def of_trl(policy: str, batches: int, updates: int) -> list[float]:
    """The same with TRL."""
    rows = countdown.problems()[0]
    data = Dataset.from_list([{"prompt": row.prompt, "answer": row.answer} for row in rows])
    callback = BatchEnds(updates)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=1, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            num_iterations=updates, max_steps=batches * updates, max_completion_length=LENGTH, temperature=1.0, top_k=0,
            beta=0.0, loss_type="bnpo", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip

        def reward(completions, answer, **_):
            return [float(even(c, a)) for c, a in zip(completions, answer)]

        tokenizer = AutoTokenizer.from_pretrained(policy)
        trainer = trl.GRPOTrainer(policy, reward, config, data, processing_class=tokenizer, callbacks=[callback])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line]
    print(f"TRL: mean response {statistics.fmean(lengths):.1f} tokens")
    return [b - a for a, b in zip(callback.ends, callback.ends[1:])]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=7, help="batches of rollouts per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="updates on each batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    seconds = {ours: [], of_trl: []}
    with tempfile.TemporaryDirectory() as policy:
        tokenizer = countdown.build_tokenizer()
        countdown.build_model(tokenizer).save_pretrained(policy)
        tokenizer.save_pretrained(policy)
        for _ in range(options.turns):
            for function, found in seconds.items():
                found += function(policy, options.batches, options.updates)
    a, b = (statistics.median(found) for found in seconds.values())
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}, one thread")
    for name, median in (("train.py", a), ("TRL", b)):
        print(f"{name}: {PROMPTS * GROUP / median:.0f} samples/s, {options.updates / median:.1f} updates/s")
    print(f"train.py is {b / a:.2f} times as fast as TRL")


if __name__ == "__main__":
    main()
