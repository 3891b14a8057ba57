"""Speed and memory of train.py's parts for a model built from its public configuration, with random weights.

    python benchmarks/model.py                                          # on a CPU: a small Qwen2, one thread
    python benchmarks/model.py --size 0.5b --prompts 16 --tokens 512    # on a GPU: Qwen2.5-0.5B; also 1.5b
    python benchmarks/model.py --head                                   # memory of the output head alone, vocabulary 151,936
    python benchmarks/model.py --activations                            # bytes that a layer keeps per token, all sizes

Prints tokens per second of generation and training, peak memory, seconds of an update with GRPO's fixed bounds and with
BAPO's search, in one micro-batch and in several (where BAPO needs one more forward pass), and the search's own time; on a
GPU also how often the host waits for the device. Ratios of the rollout policy are drawn at random (sigma 0.1), since
BAPO at ratio 1 has nothing to do. GRPO and BAPO take turns; medians.

--head compares token_log_probs' way, hidden states through the head in chunks, with the plain one, all logits and their
log-softmax at once: the memory that each needs beyond the hidden states and the head, forward and backward.
"""

import argparse
import resource
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from timing import clock, paired_medians
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import metrics
import rollout
import train
from bapo import bapo_loss, search_clip_bounds

# width, feed-forward, layers, heads, key-value heads, vocabulary, tied embeddings: config.json of Qwen2.5 on the hub
SIZES = {
    "small": (256, 1024, 4, 4, 2, 8192, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
}
HEAD = dict(tokens=4096, width=64, vocabulary=151936)


def build(size: str, device: str, layers: int = 0) -> Qwen2ForCausalLM:
    """Random float32 weights; all layers unless a number is given."""
    width, feed_forward, all_layers, heads, kv_heads, vocabulary, tied = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        eos_token_id=list(range(vocabulary // 128)),  # random responses end after 128 tokens on average
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).eval()


def peak_gib(device: str) -> float:
    """Largest memory since the last call, of the GPU's allocator; of the process so far on a CPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def host_waits(device: str, function) -> str:
    """How often the function makes the host wait for the GPU."""
    if device == "cpu":
        return "no device to wait for"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return f"{sum('synchroniz' in str(warning.message) for warning in caught)} host waits"


def update(model, optimizer, batch: rollout.Batch, run: train.Run) -> None:
    """One optimizer step, as train.train_run makes its second one on a batch."""
    bounds, options = train.bounds_of_update(model, batch, 2, run), run.options
    now = torch.zeros_like(batch.weights), torch.zeros_like(batch.weights)
    for rows, part in batch.micro_batches:
        columns = slice(part.mask.shape[1])
        with rollout.autocast(options.device, options.precision):
            log_probs, entropy = rollout.token_log_probs(model, part, options.temperature)
        old, weights = batch.rollouts.log_probs[rows, columns], batch.weights[rows, columns]
        arguments = (log_probs, old, batch.advantages[rows], part.mask, run.arm.search)
        loss, found = bapo_loss(*arguments, weights=weights, bounds=bounds)
        loss.backward()
        now[0][rows, columns], now[1][rows, columns] = log_probs.detach(), entropy
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = metrics.update_metrics(found, bounds, *now, batch, run.arm.search)
    metrics.read_numbers(found | {"loss": loss, "grad_norm": norm})
    optimizer.step()
    optimizer.zero_grad()


def measure(options) -> None:
    """Everything but --head and --activations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = train.Options(
        methods=["grpo", "bapo"], device=device, prompts_per_step=options.prompts, group_size=8, max_new_tokens=options.tokens,
        learning_rate=1e-9, gradient_checkpointing=options.gradient_checkpointing,
    )  # fmt: skip
    runs = [train.Run(Path(), arm, "", 0, settings, {}) for arm in settings.arms()]
    model = build(options.size, device)
    if options.gradient_checkpointing:
        rollout.checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU, one thread"
    print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}, {settings.precision}")
    print(f"Qwen2 {options.size}, {parameters / 1e6:.0f} M parameters; {options.prompts} prompts x 8, {options.tokens} tokens")

    vocabulary = model.config.vocab_size
    prompts = torch.randint(vocabulary // 2, vocabulary, (options.prompts, 128)).tolist()
    rows, tokenizer = [SimpleNamespace(prompt=prompt) for prompt in prompts], SimpleNamespace()
    start = clock(device)
    rollouts, _, _ = train.draw(model, tokenizer, rows, 1, None, settings)
    seconds, tokens = clock(device) - start, int(rollouts.mask.sum())
    print(f"generation: {tokens / seconds:.0f} tokens/s ({tokens} tokens, {seconds:.1f} s), peak {peak_gib(device):.2f} GiB")

    advantages, read = torch.randn(len(rollouts.mask), device=device), int(rollouts.lengths().sum())
    kept = torch.ones(options.prompts, dtype=torch.bool, device=device)
    for what, limit in (("one micro-batch", 10**9), ("several micro-batches", read // 4)):
        (batch,) = rollout.make_batches(rollouts, advantages, kept, runs[0].arm, limit)
        log_probs, batch.rollouts.entropy = train.record(model, batch, settings)
        gap = ((log_probs - batch.rollouts.sampler_log_probs).abs() * batch.rollouts.mask).sum().item() / tokens
        batch.rollouts.log_probs = log_probs + 0.1 * torch.randn_like(log_probs) * batch.rollouts.mask
        steps = [partial(update, model, optimizer, batch, run) for run in runs]
        grpo, bapo = paired_medians(steps, options.repeats, device)
        print(
            f"update in {what} ({len(batch.micro_batches)}): GRPO {grpo:.3f} s, BAPO {bapo:.3f} s, ratio {bapo / grpo:.3f}; "
            f"BAPO reads {read / bapo:.0f} tokens/s, peak {peak_gib(device):.2f} GiB, {host_waits(device, steps[1])}"
        )
    print(f"sampler's log-probs against the training forward's: mean gap {gap:.2g}")
    arguments = (log_probs - batch.rollouts.log_probs, batch.advantages, batch.weights, runs[1].arm.search)
    (search_s,) = paired_medians([partial(search_clip_bounds, *arguments)], 20, device)
    waits = host_waits(device, partial(search_clip_bounds, *arguments))
    print(f"search: {search_s * 1e3:.2f} ms, {search_s / bapo:.2%} of that update, {waits}")


def head_memory(way: str, device: str) -> None:
    """One forward and backward pass of the head; prints the peak in GiB."""
    torch.manual_seed(0)
    head = nn.Linear(HEAD["width"], HEAD["vocabulary"], bias=False, device=device)
    # One sequence: a prompt of one token, and the response.
    states = torch.randn(1, HEAD["tokens"] + 1, HEAD["width"], device=device, requires_grad=True)
    targets = torch.randint(HEAD["vocabulary"], (1, HEAD["tokens"]), device=device)
    head.weight.grad = torch.zeros_like(head.weight)
    if way == "chunks":
        model = SimpleNamespace(base_model=lambda **_: SimpleNamespace(last_hidden_state=states))
        rollout.plain_head = lambda _: head
        mask = torch.ones_like(targets, dtype=torch.bool)
        prompt = targets.new_zeros(1, 1)
        rollouts = rollout.Rollouts(prompt, prompt == 0, targets, mask, mask[:, 0])
        rollout.token_log_probs(model, rollouts)[0].sum().backward()
    elif way == "whole":
        log_softmax = head(states[:, :-1]).float().log_softmax(-1)
        with torch.no_grad():
            -(log_softmax.exp() * log_softmax).sum(-1)
        log_softmax.gather(-1, targets.unsqueeze(-1)).sum().backward()
    print(peak_gib(device))


def activation_bytes(size: str, device: str, layers: int, tokens: int = 61) -> float:
    """Bytes per token that a forward pass under bfloat16 autocast keeps for the backward pass, weights and their copies
    not counted. (Copies are told by their size: a prime number of tokens gives activations another.)"""
    model, kept = build(size, device, layers), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copies = {parameter.numel() * 2 for parameter in model.parameters() if parameter.dim() == 2}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() not in copies:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor itself, or its address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast(device, torch.bfloat16):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=device), use_cache=False)
    return sum(size for size, _ in kept.values()) / tokens


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="length limit of a response")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--head", action="store_true", help="memory of the output head instead")
    parser.add_argument("--activations", action="store_true", help="bytes kept per token instead")
    parser.add_argument("--way", choices=["nothing", "chunks", "whole"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.way:
        head_memory(options.way, device)
    elif options.activations:
        for size, (width, _, layers, *_) in SIZES.items():
            per_layer = activation_bytes(size, device, 2) - activation_bytes(size, device, 1)
            total = per_layer * layers / 1e6
            print(
                f"{size}: {per_layer:.0f} bytes per token and layer, {per_layer / width:.0f} x width; {total:.2f} MB per token"
            )
    elif options.head:
        command = [sys.executable, __file__, "--way"]
        peaks = {
            way: float(subprocess.run([*command, way], capture_output=True, text=True, check=True).stdout)
            for way in ("nothing", "chunks", "whole")
        }
        chunks, whole = (peaks[way] - peaks["nothing"] for way in ("chunks", "whole"))
        print(f"{HEAD}: chunks {chunks:.2f} GiB, whole logits {whole:.2f} GiB: 1/{whole / chunks:.1f} of the extra memory")
    else:
        measure(options)


if __name__ == "__main__":
    main()
