#!/usr/bin/env bash
# All that waits for a GPU, in six parts: bash benchmarks/gpu.sh OUT [PART ...]
#
#   tests     a device against the CPU, then all other tests
#   default   the default experiment
#   model     0.5B and 1.5B with random weights: tokens per second, peak memory, host waits, the search, the least
#   resume    a run that is killed and resumed, against one that is not
#   lora      7B with adapters
#   scale     Countdown with 27M parameters and responses of up to 208 tokens: three arms
#
# Each has a time limit of its own and leaves OUT/PART.log and OUT/PART.json: device, status (124: out of time), seconds, the
# last line, and results, the JSON objects that it printed. A part that fails does not stop the others; the script ends with 1.
# Environment: DEVICE (cuda), PYTHON (.venv/bin/python), TINY=1 for sizes that a CPU does in minutes.
set -uo pipefail
out=$(realpath -m "${1:?usage: bash benchmarks/gpu.sh OUT [PART ...]}")
shift
parts=" ${*:-tests default model resume lora scale} "
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-.venv/bin/python} DEVICE=${DEVICE:-cuda} TINY=${TINY:-} failed=0
[[ $DEVICE == cuda* ]] && name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1) || name="$(uname -m) CPU"
mkdir -p "$out"

keep='import json, pathlib, sys
path, device, status, seconds = sys.argv[1:]
lines = pathlib.Path(f"{path}.log").read_text(errors="replace").splitlines()
found = {"device": device, "status": int(status), "seconds": int(seconds), "last_line": (lines or [""])[-1]}
found["results"] = [json.loads(line) for line in lines if line.startswith("{\"")]
pathlib.Path(f"{path}.json").write_text(json.dumps(found, indent=1) + "\n")'

finals='import json, pathlib, sys
paths = sorted([*pathlib.Path(sys.argv[1]).glob("start*.json"), *pathlib.Path(sys.argv[1]).glob("*/final.json")])
print(json.dumps({path.parent.name if path.stem == "final" else path.stem: json.loads(path.read_text()) for path in paths}))'

compare='import json, pathlib, sys
a, b = ([*map(json.loads, next(pathlib.Path(sys.argv[1], way).glob("*/metrics.jsonl")).open())] for way in ("whole", "killed"))
first = next((x["step"] for x, y in zip(a, b) if x != y), None)
print(json.dumps({"updates": len(a), "updates_of_killed": len(b), "first_step_that_differs": first}))'

start='import sys
sys.path[:0] = ["."]
import support.warm_starts
import countdown
folder, attempts, steps, device, width, layers = sys.argv[1:]
sizes = dict(hidden_size=int(width), intermediate_size=3 * int(width), num_hidden_layers=int(layers), max_position_embeddings=256)
support.warm_starts.warm_start(folder, 0, int(attempts), int(steps), device, initializer_range=int(width) ** -0.5, **sizes)'

part() { # NAME MINUTES FUNCTION: the function's output and its end
  [[ $parts == *" $1 "* ]] || return 0
  local begun=$SECONDS status=0
  (set -e; "$3") > "$out/$1.log" 2>&1 &
  local job=$!
  (sleep $(($2 * 60)); kill -TERM -- "-$job") 2> /dev/null &
  local clock=$!
  wait "$job" || status=$?
  { kill -TERM -- "-$clock" && wait "$clock"; } 2> /dev/null
  ((status == 143)) && status=124
  "$PYTHON" -c "$keep" "$out/$1" "$name" "$status" $((SECONDS - begun))
  echo "$1: status $status after $((SECONDS - begun)) s"
  ((status == 0)) || failed=1
}
set -m # a process group for each part, so that its time limit ends all of it

train() { "$PYTHON" train.py --device "$DEVICE" ${TINY:+--jobs 1} "$@" || [[ $TINY ]]; } # it earns no reward, which is an error
model() { "$PYTHON" benchmarks/model.py --device "$DEVICE" "$@"; }
tests() {
  local status=0
  DEVICE=$DEVICE "$PYTHON" -m pytest -q tests/test_cuda.py || status=1
  [[ $TINY ]] || "$PYTHON" -m pytest -q || status=1
  return $status
}
default() {
  train --output_dir "$out/default/runs" ${TINY:+--methods grpo@1 --steps 1 --warm_start_steps 2 --max_new_tokens 9}
  "$PYTHON" -c "$finals" "$out/default/runs"
}
models() {
  if [[ $TINY ]]; then model --prompts 2 --tokens 9 --repeats 1; return; fi
  for size in 0.5b 1.5b; do model --size $size --prompts 16 --tokens 512; done
}
resume() {
  local words=(--methods bapo-gate@8 --steps 12 --checkpoint_every 3) enough=36
  [[ $TINY ]] && words+=(--warm_start_steps 2 --prompts_per_step 2 --max_new_tokens 9) enough=4
  train "${words[@]}" --output_dir "$out/resume/whole"
  "$PYTHON" train.py --device "$DEVICE" "${words[@]}" --output_dir "$out/resume/killed" & # not `train`: the kill is for python
  local victim=$! lines="$out/resume/killed/*/metrics.jsonl"
  until (($(cat $lines 2> /dev/null | wc -l) > enough)); do sleep 0.02; kill -0 $victim || break; done
  kill -KILL $victim || true
  wait $victim || true
  if compgen -G "$out/resume/killed/*/model" > /dev/null; then echo "nothing was killed"; return 1; fi
  train "${words[@]}" --output_dir "$out/resume/killed" --resume
  "$PYTHON" -c "$compare" "$out/resume"
}
lora() {
  if [[ $TINY ]]; then model --lora_rank 2 --gradient_checkpointing --prompts 2 --tokens 9 --repeats 1; return; fi
  model --size 7b --lora_rank 32 --gradient_checkpointing --prompts 16 --tokens 512 --repeats 3
}
scale() {
  local attempts=16 steps=6000 sizes=(512 8) arms=(grpo@1 grpo@8 bapo-gate@8)
  local words=(--max_new_tokens 208 --steps 60 --learning_rate 1e-4)
  [[ $TINY ]] && steps=2 sizes=(64 1) arms=(grpo@1) words=(--max_new_tokens 9 --steps 1 --prompts_per_step 2)
  "$PYTHON" -c "$start" "$out/scale/warm-starts/attempts$attempts-steps$steps-seed0" $attempts $steps "$DEVICE" "${sizes[@]}"
  words+=(--attempts $attempts --warm_start_steps $steps --methods "${arms[@]}")
  train "${words[@]}" --output_dir "$out/scale/runs"
  "$PYTHON" -c "$finals" "$out/scale/runs"
}

part tests 30 tests
part default 20 default
part model 20 models
part resume 15 resume
part lora 15 lora
part scale 45 scale
exit $failed
