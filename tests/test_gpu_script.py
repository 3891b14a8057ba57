"""benchmarks/gpu.sh: all of it, on a CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = "tests default model resume lora scale".split()


def test_the_gpu_script_does_all_its_parts_and_goes_on_after_one_that_fails(tmp_path):
    """On a CPU, at sizes that mean nothing. Kills: a part that ends the others, results of another part, a limit that hangs."""
    command = ["bash", "benchmarks/gpu.sh", str(tmp_path)]
    environment = os.environ | {"PYTHON": sys.executable, "DEVICE": "cpu", "TINY": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert process.returncode == 0, found
    assert list(found) and {name: of_part["status"] for name, of_part in found.items()} == dict.fromkeys(PARTS, 0)
    assert all(of_part["device"].endswith("CPU") for of_part in found.values())
    assert re.search(r"\d+ passed", found["tests"]["last_line"])
    assert {"start0", "grpo@1-start0-seed0"} == found["default"]["results"][-1].keys()
    assert found["model"]["results"][0]["one_micro_batch"]["bapo/least"] > 0 and found["lora"]["results"][0]["lora_rank"] == 2
    assert found["resume"]["results"][-1] == {"updates": 12, "updates_of_killed": 12, "first_step_that_differs": None}
    assert {"start0", "grpo@1-start0-seed0"} == found["scale"]["results"][-1].keys()

    shutil.rmtree(tmp_path)
    process = subprocess.run([*command, "lora", "scale"], cwd=ROOT, env=environment | {"PYTHON": "false"}, capture_output=True)
    assert process.returncode == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["lora.log", "scale.log"]
