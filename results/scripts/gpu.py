"""Time train.py on a GPU: the parts of a step and peak memory.

    python -m results.scripts.gpu half words search

`words` needs the model of results/scripts/smollm2.py in runs/gpu/smollm2. On the one GPU that this
ran on, "half" never came to its kill: its policy had collapsed in the first step, and the later
steps were over at once. "one-and-a-half" ran out of time.

The models have random weights, in Qwen2.5's shapes. A constant in the first dimension of the
embeddings lets their responses end after about as many tokens as it should.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

RUNS = Path("runs/gpu")
STARTED = time.perf_counter()
SHAPES = {  # hidden size, MLP size, layers, heads, key-value heads: of Qwen2.5-0.5B and -1.5B
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "tiny": (64, 128, 2, 4, 2),
}
VOCABULARY = 151936
PROMPT_TOKENS = 128


def odd(response: str, answer: str) -> bool:
    """A reward that half of the responses get."""
    return len(response) % 2 == 1


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:.0f} s] {text}", flush=True)


def random_model(shape: str, mean_length: int) -> Path:
    """Write a random model in bfloat16, its tokenizer of numbers, and prompts of numbers."""
    import tokenizers
    import transformers

    folder = RUNS / f"random-{shape}"
    width, mlp, layers, heads, key_value_heads = SHAPES[shape]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device), torch.no_grad():
        model = transformers.LlamaForCausalLM(config)
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 5
        tokens = torch.randint(1, VOCABULARY, (4, 128))
        states = model.get_decoder()(tokens).last_hidden_state.flatten(0, 1)
        # The mean of 1 / (1 + others / e^boost) over states should be 1 / mean_length.
        low, high = 0.0, 300.0
        for _ in range(30):
            boost = (low + high) / 2
            odds = (boost * states[:, 0]).exp() / VOCABULARY
            chance = (odds / (1 + odds)).mean().item()
            low, high = (boost, high) if chance < 1 / mean_length else (low, boost)
        embeddings[0, 0] += boost
    model.to(torch.bfloat16).save_pretrained(folder)
    words = {"<eos>": 0} | {str(number): number for number in range(1, VOCABULARY - 1)}
    words["0"] = VOCABULARY - 1
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>"
    ).save_pretrained(folder)
    with (RUNS / "numbers.jsonl").open("w") as file:
        for row in torch.randint(1, VOCABULARY, (300, PROMPT_TOKENS), device="cpu").tolist():
            message = {"role": "user", "content": " ".join(map(str, row))}
            file.write(json.dumps({"prompt": [message], "answer": "1"}) + "\n")
    say(f"{folder}: chance of EOS {chance:.5f} with {boost:.3f}")
    return folder


def command(shape: str, name: str, *options: str) -> list[str]:
    return [
        *(sys.executable, "train.py", "--model", f"{RUNS}/random-{shape}"),
        *("--data", f"{RUNS}/numbers.jsonl", "--reward", f"{__file__}:odd", "--held_out", "1"),
        *("--jobs", "1", "--output_dir", f"{RUNS}/{name}", *options),
    ]


def call(arguments: list[str], limit: float, kill_at: tuple | None = None) -> None:
    """Run a command for at most `limit` seconds, or until a run has logged a line.

    kill_at: the run's folder, and the step and update of that line.
    """
    say(" ".join(arguments[1:]))
    with open(RUNS / "output.txt", "a") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        began = time.perf_counter()
        while process.poll() is None:
            time.sleep(0.2)
            done = kill_at and any(
                (line["step"], line["update"]) == kill_at[1:] for line in lines_of(kill_at[0])
            )
            if done or time.perf_counter() - began > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                say("killed" + ("" if done else ": out of time"))
    say(f"exit status {process.returncode} after {time.perf_counter() - began:.0f} s")
    if process.returncode not in (0, -9):
        print((RUNS / "output.txt").read_text()[-3000:])


def lines_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def report(name: str, run: str) -> None:
    """Print the seconds and the memory of a run's steps."""
    lines = lines_of(RUNS / name / run)
    for last in [line for line in lines if "update_s" in line]:
        updates = [line for line in lines if line["step"] == last["step"]]
        names = ("rollout_s", "update_s", "peak_memory_gb")
        names += ("response_length", "truncated", "reward", "entropy")
        values = {name: f"{last.get(name, float('nan')):.4g}" for name in names}
        kl = " ".join(f"{line.get('kl', -1):.2g}" for line in updates)
        first = f"{updates[0].get('log_ratio_newest', -1):.2g}"
        grads = " ".join(f"{line.get('grad_norm', -1):.3g}" for line in updates)
        bounds = " ".join(
            f"{line.get('low') or 0:.2f}-{line.get('high') or 0:.2f}" for line in updates[-2:]
        )
        if last["step"] != 1 or name == "1.5b-checkpointing":  # the first step is slow
            print(
                f"{name} {run} step {last['step']}: {values} first {first} kl {kl} norms {grads}"
                f" {bounds}"
            )


def half(shape: str = "0.5b", limit: float = 120) -> None:
    """0.5B: grpo and bapo, all weights, checkpointing, LoRA; a kill and a resume."""
    random_model(shape, 128)
    short = ["--max_new_tokens", "256", "--steps", "3", "--rho0", "0.6", "--learning_rate", "1e-5"]
    methods = ["--methods", "grpo@8", "bapo@8"]
    call(command(shape, "all", *methods, *short), limit)
    report("all", "grpo@8-seed0")
    report("all", "bapo@8-seed0")
    call(command(shape, "lora", *methods[:1], "bapo@8", "--lora_rank", "32", *short), limit)
    report("lora", "bapo@8-seed0")
    checkpointing = ["--gradient_checkpointing", *short]
    call(
        command(shape, "checkpointing", *methods[:1], "bapo@8", *checkpointing),
        limit,
        (RUNS / "checkpointing/bapo@8-seed0", 2, 8),
    )
    report("checkpointing", "bapo@8-seed0")
    killed = command(shape, "killed", *methods[:1], "bapo@8", "--checkpoint_every", "1", *short)
    call(killed, limit, (RUNS / "killed/bapo@8-seed0", 3, 2))
    call([*killed, "--resume"], limit)
    report("killed", "bapo@8-seed0")
    whole, parts = lines_of(RUNS / "all/bapo@8-seed0"), lines_of(RUNS / "killed/bapo@8-seed0")
    timed = {"rollout_s", "update_s", "peak_memory_gb"}
    print("resume:", len(whole), len(parts), "lines")
    shown = 0
    for a, b in zip(whole, parts):
        differ = {
            key: (a[key], b.get(key)) for key in a if a[key] != b.get(key) and key not in timed
        }
        if differ and shown < 3:
            print(f"step {a['step']} update {a['update']}: differ {differ}")
            shown += 1
    subprocess.run(
        ["bash", "-c", f"du -sh {RUNS}/*/*/checkpoint-*; rm -rf {RUNS}/*/*/checkpoint-*"]
    )


def one_and_a_half() -> None:
    """1.5B as in own_model.md: responses of 300 tokens on average, two steps each."""
    random_model("1.5b", 300)
    for name, others in (("1.5b", []), ("1.5b-checkpointing", ["--gradient_checkpointing"])):
        run = RUNS / name / "bapo@8-seed0"
        if others and time.perf_counter() - STARTED > 400:
            say("no time left for checkpointing")
            break
        steps = 1 if others else 2
        call(
            command("1.5b", name, "--methods", "bapo@8", "--steps", "3", "--rho0", "0.6", *others),
            200,
            (run, steps, 8),
        )
        report(name, "bapo@8-seed0")


def words() -> None:
    """The first run of own_model.md, in both precisions."""
    own_model = Path("docs/own_model.md").read_text()
    script = own_model.split("```python\n")[1].split("```")[0]
    (RUNS / "words.py").write_text(script)
    subprocess.run([sys.executable, "words.py"], cwd=RUNS, check=True)
    line = next(line for line in own_model.splitlines() if "words.py:reward" in line)
    for precision in ("bfloat16", "float32"):
        arguments = line.replace("HuggingFaceTB/SmolLM2-135M-Instruct", f"{RUNS}/smollm2")
        arguments = arguments.replace("words.jsonl", f"{RUNS}/words.jsonl").replace(
            "words.py:", f"{RUNS}/words.py:"
        )
        arguments = arguments.replace("runs/words", f"{RUNS}/words-{precision}").split()
        call([sys.executable, *arguments[1:], "--precision", precision], 120)
        report(f"words-{precision}", "bapo@4-seed0")
        table = RUNS / f"words-{precision}" / "table.md"
        print(table.read_text() if table.exists() else "no table")


def search() -> None:
    """The search's cost beside that of a loss and its gradient."""
    import bapo

    for shape in ((128, 28), (128, 1024)):
        torch.manual_seed(0)
        advantages = torch.randn(shape[0], device="cuda")
        log_ratio = torch.randn(shape, device="cuda") / 10
        weights = torch.ones(shape, device="cuda") / log_ratio.numel()
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            masses = bapo.contribution_masses(log_ratio, advantages, weights, bapo.PAPER_MAIN)
            bapo.search_clip_bounds(masses, bapo.PAPER_MAIN)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        say(f"search {shape}: median {statistics.median(times) * 1e3:.3f} ms")


def main() -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        say(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__},"
            f" Python {sys.version.split()[0]}"
        )
    parts = {
        "half": half,
        "one-and-a-half": one_and_a_half,
        "words": words,
        "search": search,
        "tiny": lambda: half("tiny"),
    }
    for part in sys.argv[1:]:
        try:
            parts[part]()
        except Exception as error:
            say(f"{part}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
