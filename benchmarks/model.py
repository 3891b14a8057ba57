"""Speed and memory of train.py's parts, for a model with random weights. Prints one JSON object.

    python benchmarks/model.py                                           # the Countdown model
    python benchmarks/model.py --size small                              # a small Qwen2
    python benchmarks/model.py --size 0.5b --prompts 16 --tokens 512     # on a GPU: Qwen2.5-0.5B

What is measured:

- drawing: `train.draw`, 8 responses to each prompt;
- an update: `train.update_policy`, with GRPO's fixed bounds and with BAPO's search. In one
  micro-batch, of the first responses that fit --micro_batch_tokens; and in several, of all
  responses, where BAPO makes one more forward pass (`train.bounds_over_micro_batches`);
- the least that any trainer must do with the same packed tokens: one forward and backward pass of
  the same weights, with a plain output head in the precision of the other layers, the cross-entropy
  of the response tokens, and an optimizer step. The head of train.py computes in float32 (on a GPU
  by TF32); what that costs is part of the ratio to the least;
- the bound search alone.

What is compared takes turns, and medians are given. The ratios to the rollout policy are drawn at
random (standard deviation of the log-ratio: 0.1), since BAPO has nothing to do at ratio 1.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import countdown
import train
from bapo import search_clip_bounds
from reward import Problem
from rollout import CHUNK_LOGITS, Rollouts, autocast
from support.arms import Arm
from support.batches import Batch, join
from support.metrics import batch_metrics
from support.models import add_lora, checkpoint_layers

GROUP_SIZE = 8
PROMPT_TOKENS = 128  # of every model but Countdown's
MEAN_RESPONSE_TOKENS = 128  # of every model but Countdown's, before the length limit
LOG_RATIO_DEVIATION = 0.1
SEARCH_REPEATS = 20

# The fields of config.json of Qwen2.5 on the hub; "small" is no model of the hub.
SIZES = {
    "small": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


# ---------------------------------------------------------------- clocks and counters
def clock(device: str) -> float:
    """Seconds, once the device has done its work.

    On a CPU: of processor time, which other processes hardly change.
    """
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def paired_medians(
    functions: list[Callable[[], object]], repeats: int, device: str = "cpu"
) -> list[float]:
    """Median seconds of each function.

    They take turns, so that a drift of the machine's speed hits all of them. A first turn warms up
    and does not count.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, times_of_function in zip(functions, times, strict=True):
            start = clock(device)
            function()
            times_of_function.append(clock(device) - start)
    return [statistics.median(times_of_function[1:]) for times_of_function in times]


def peak_gib(device: str) -> float:
    """Largest memory since the last call, of the GPU's allocator; of the process on a CPU.

    A process does not forget its peak: on a CPU it is the largest since the beginning.
    """
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def host_waits(device: str, function: Callable[[], object]) -> int | None:
    """How often the function makes the host wait for the GPU; None on a CPU.

    PyTorch's notice that this debug mode is a prototype is no wait.
    """
    if device == "cpu":
        return None
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    return sum("called a synchronizing CUDA operation" in message for message in messages)


# ---------------------------------------------------------------- what is measured
def build(size: str, device: str) -> Qwen2ForCausalLM:
    """A model with random float32 weights.

    So many of its tokens end a response that responses have MEAN_RESPONSE_TOKENS on average.
    """
    if size == "countdown":
        return countdown.build_model(countdown.build_tokenizer()).to(device).eval()
    eos_token_ids = list(range(SIZES[size]["vocab_size"] // MEAN_RESPONSE_TOKENS))
    config = Qwen2Config(**SIZES[size], max_position_embeddings=32768, eos_token_id=eos_token_ids)
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).eval()


def training_options(options: argparse.Namespace) -> train.Options:
    """The options of train.py, as with --data, but for a learning rate that moves no weight."""
    return train.Options(
        methods=["grpo", "bapo"],
        device=options.device,
        precision="float32" if options.device == "cpu" else "bfloat16",
        prompts_per_step=options.prompts,
        group_size=GROUP_SIZE,
        max_new_tokens=options.tokens,
        learning_rate=1e-9,
        max_grad_norm=1.0,
        micro_batch_tokens=options.micro_batch_tokens,
        gradient_checkpointing=options.gradient_checkpointing,
        lora_rank=options.lora_rank,
    )


def begin(options: argparse.Namespace, settings: train.Options) -> train.TrainState:
    """What train.begin makes, of a model that lies in no folder."""
    # As support.models.load_policy: with bfloat16 passes the float32 head may use TF32 on a GPU.
    torch.set_float32_matmul_precision("high" if settings.precision == "bfloat16" else "highest")
    model = build(options.size, options.device)
    if settings.lora_rank:
        add_lora(model, settings.lora_rank, settings.precision)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    return train.TrainState(model, None, optimizer, None, {}, 0)


def random_problems(options: argparse.Namespace, vocabulary: int) -> list[Problem]:
    """Prompts of random tokens that end no response."""
    length = countdown.PROMPT_TOKENS if options.size == "countdown" else PROMPT_TOKENS
    prompts = torch.randint(vocabulary // 2, vocabulary, (options.prompts, length))
    return [Problem(prompt, "") for prompt in prompts.tolist()]


def first_groups(rollouts: Rollouts, max_tokens: int) -> Tensor:
    """Bool [groups]: the first groups that have at most max_tokens together; at least one."""
    tokens = rollouts.lengths().view(-1, GROUP_SIZE).sum(1)
    kept = tokens.cumsum(0) <= max_tokens
    kept[0] = True
    return kept


def update(state: train.TrainState, batch: Batch, arm: Arm, settings: train.Options) -> None:
    """One optimizer step as train.train_run makes its second one on a batch."""
    bounds = train.bounds_over_micro_batches(state.policy, batch, arm, settings, unchanged=False)
    train.update_policy(
        state.policy, state.optimizer, batch, bounds, arm, settings, step=1, update=2
    )


def least(model, optimizer, batch: Batch, settings: train.Options) -> None:
    """The least that an optimizer step on these tokens takes: no search, no metric, no chunks.

    The output head is a plain one, which autocast may compute in bfloat16; of the tokens of the
    batch only the response's go through it.
    """
    head = model.get_output_embeddings()
    for part in batch:
        loss = 0.0
        with autocast(settings.device, settings.precision):
            for bucket in part.rollouts.buckets:
                output = model.base_model(input_ids=bucket.input_ids, use_cache=False)
                states = output.last_hidden_state.flatten(0, 1).index_select(0, bucket.predictors)
                logits = torch.nn.functional.linear(states, head.weight, head.bias)
                loss = loss + torch.nn.functional.cross_entropy(
                    logits.float(), bucket.targets, reduction="sum"
                )
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def perturb(batch: Batch) -> None:
    """Move the recorded log-probs at random: as if the policy had changed since it drew them."""
    for part in batch:
        rollouts = part.rollouts
        noise = torch.randn_like(rollouts.log_probs) * rollouts.mask
        rollouts.log_probs = rollouts.log_probs + LOG_RATIO_DEVIATION * noise


def head_share_of_flops(model, batch: Batch) -> float:
    """The output head's share of the floating-point operations of an update of all weights.

    An update takes 6 operations per weight and token: 2 in the forward pass, 4 in the backward
    pass. The head reads response tokens alone; where they do not fit one chunk of logits, its
    forward pass is made again in the backward pass, which is 8. Attention scores are left out.
    """
    head_weights = model.get_output_embeddings().weight.numel()
    embeddings = model.get_input_embeddings().weight.numel()
    all_weights = sum(parameter.numel() for parameter in model.parameters())
    tied = model.config.tie_word_embeddings
    layer_weights = all_weights - embeddings - (0 if tied else head_weights)
    response_tokens = 0
    tokens = 0
    for part in batch:
        response_tokens += int(part.rollouts.mask.sum())
        tokens += int(part.rollouts.lengths().sum())
    one_chunk = response_tokens * model.config.vocab_size <= CHUNK_LOGITS
    head = (6 if one_chunk else 8) * head_weights * response_tokens
    return head / (head + 6 * layer_weights * tokens)


# ---------------------------------------------------------------- measuring
def measure(options: argparse.Namespace) -> dict:
    """Everything that is printed."""
    settings = training_options(options)
    state = begin(options, settings)
    result = vars(options) | environment(options.device)
    result["precision"] = settings.precision
    result["parameters"] = sum(parameter.numel() for parameter in state.policy.parameters())

    torch.manual_seed(0)
    problems = random_problems(options, state.policy.config.vocab_size)
    peak_gib(options.device)  # forget what building the model took
    start = clock(options.device)
    rollouts, _, _ = train.draw(state, problems, 1, settings)
    seconds = clock(options.device) - start
    drawn_tokens = int(rollouts.mask.sum())
    result["drawing"] = {
        "tokens": drawn_tokens,
        "tokens_per_s": drawn_tokens / seconds,
        "peak_gib": peak_gib(options.device),
    }

    advantages = torch.randn(len(rollouts.mask), device=options.device)
    fitting = first_groups(rollouts, options.micro_batch_tokens)
    every = torch.ones_like(fitting)
    all_tokens = int(rollouts.lengths().sum())
    grpo, bapo = settings.arms()
    (one,) = train.make_batches(rollouts, advantages, fitting, grpo, 10**9)
    limit = min(options.micro_batch_tokens, all_tokens // 4)
    (several,) = train.make_batches(rollouts, advantages, every, grpo, limit)
    train.record(state.policy, [one, several], 1, settings)
    gaps = batch_metrics(rollouts, advantages, every, [several])
    result["sampler_gap"] = gaps["sampler_gap"].item()
    perturb(one)
    perturb(several)
    result["one_micro_batch"] = measure_updates(options, settings, state, one)
    result["several_micro_batches"] = measure_updates(options, settings, state, several)
    if not (settings.lora_rank or settings.gradient_checkpointing):
        result["head_share_of_flops"] = head_share_of_flops(state.policy, one)

    whole = join(several)
    log_ratio = LOG_RATIO_DEVIATION * torch.randn_like(whole.weights) * whole.rollouts.mask
    search = partial(search_clip_bounds, log_ratio, whole.advantages, whole.weights, bapo.search)
    (search_s,) = paired_medians([search], SEARCH_REPEATS, options.device)
    result["search_ms"] = 1e3 * search_s
    result["search/bapo"] = search_s / result["several_micro_batches"]["bapo_s"]
    result["search_waits"] = host_waits(options.device, search)
    return result


def measure_updates(
    options: argparse.Namespace, settings: train.Options, state: train.TrainState, batch: Batch
) -> dict:
    """Seconds of an update with GRPO and with BAPO and of the least, their ratios, and memory."""
    grpo, bapo = settings.arms()
    update_with_bapo = partial(update, state, batch, bapo, settings)
    functions = [
        partial(update, state, batch, grpo, settings),
        update_with_bapo,
        partial(least, state.policy, state.optimizer, batch, settings),
    ]
    grpo_s, bapo_s, least_s = paired_medians(functions, options.repeats, options.device)
    peak_gib(options.device)  # forget what the least took: it keeps all logits
    waits = host_waits(options.device, update_with_bapo)
    if waits is None:
        update_with_bapo()
    tokens = sum(int(part.rollouts.lengths().sum()) for part in batch)
    return {
        "micro_batches": len(batch),
        "tokens": tokens,
        "grpo_s": grpo_s,
        "bapo_s": bapo_s,
        "least_s": least_s,
        "bapo/grpo": bapo_s / grpo_s,
        "grpo/least": grpo_s / least_s,
        "bapo/least": bapo_s / least_s,
        "tokens_per_s": tokens / bapo_s,
        "peak_gib": peak_gib(options.device),
        "host_waits": waits,
    }


def environment(device: str) -> dict[str, str]:
    """The machine, and the versions that matter."""
    if device == "cpu":
        name = f"{platform.machine()} CPU, one thread"
    else:
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["countdown", *SIZES], default="countdown")
    parser.add_argument("--prompts", type=int, default=16, help=f"{GROUP_SIZE} responses to each")
    parser.add_argument("--tokens", type=int, default=53, help="length limit of a response")
    parser.add_argument("--micro_batch_tokens", type=int, default=2**13)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
