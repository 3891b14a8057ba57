#!/usr/bin/env bash
# All that waits for a GPU:
#
#     bash benchmarks/gpu.sh OUT [PART ...]
#
#   tests     the tests of a device against the CPU
#   model     0.5B and 1.5B with random weights: tokens per second, peak memory, host waits
#   lora      7B with adapters, likewise
#   resume    a run that is killed and resumed, against one that is not
#   default   the default experiment, arm by arm
#   scale     Countdown with 27M parameters and responses of up to 208 tokens, arm by arm
#   suite     all other tests, file by file
#
# A part consists of pieces of a few minutes. Each leaves OUT/PART/PIECE.json as soon as it ends:
# device, versions, status (0; 124: out of time), seconds, the log's last line, and "results", the
# JSON objects that it printed; and OUT/PART/PIECE.log. A piece that fails stops no other. The same
# command again goes on where the last one stopped, in the middle of a run of train.py if need be.
# To repeat a piece, delete its files in OUT and in WORK/done.
#
# The script ends by itself after MINUTES. Exit status: 0, 1 if a piece has failed, 75 if there is
# more to do: run it again.
#
# Environment:
#   MINUTES  for this call (9; as a fraction, if you like)
#   DEVICE   (cuda)
#   PYTHON   (.venv/bin/python, or python3 where there is none)
#   WORK     runs, models and checkpoints, some gigabytes; not in OUT (runs/gpu)
#   TINY     1: sizes that mean nothing, for a few minutes on a CPU
set -uo pipefail
out=$(realpath -m "${1:?usage: bash benchmarks/gpu.sh OUT [PART ...]}")
shift
all_parts=(tests model lora resume default scale suite)
parts=("${all_parts[@]}")
if (($#)); then parts=("$@"); fi
for part in "${parts[@]}"; do
  if [[ " ${all_parts[*]} " != *" $part "* ]]; then
    echo "gpu.sh: there is no part $part; the parts are ${all_parts[*]}" >&2
    exit 2
  fi
done

cd "$(dirname "$0")/.." || exit 1
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
DEVICE=${DEVICE:-cuda}
TINY=${TINY:-}
work=$(realpath -m "${WORK:-runs/gpu}")
seconds_of_call=$("$PYTHON" -c "print(round(60 * ${MINUTES:-9}))") || exit 1
failed=0

pieces() { "$PYTHON" benchmarks/gpu_pieces.py "$@"; }

# OUT may be a new folder for every call, and WORK may be lost between two: both know what is done.
for part in "${all_parts[@]}"; do
  mkdir -p "$out/$part" "$work/done/$part" || exit 1
  cp -ru "$out/$part/." "$work/done/$part/"
  cp -ru "$work/done/$part/." "$out/$part/"
done
pieces environment "$DEVICE" > "$work/environment.json" || exit 1
SECONDS=0 # bash counts from here

# ---------------------------------------------------------------- one piece
piece() { # PART/NAME LIMIT COMMAND...: do a piece, of at most LIMIT seconds, unless it is done
  local name=$1 limit=$2
  shift 2
  if [[ -e $out/$name.json ]]; then
    grep -q '"status": 0,' "$out/$name.json" || failed=1
    return
  fi
  local left=$((seconds_of_call - SECONDS)) begun=$SECONDS status=0
  if ((left < 10)); then stop_for_now; fi
  deadline=$((SECONDS + (limit < left ? limit : left)))
  ("$@") > "$out/$name.log" 2>&1 || status=$?
  if ((status == 137 && SECONDS >= deadline)); then status=124; fi # it did not end when asked to
  if ((status == 124 && left <= limit)); then stop_for_now; fi # not its own limit: it may go on
  pieces keep "$out/$name" "$work/environment.json" "$status" $((SECONDS - begun))
  cp "$out/$name.log" "$out/$name.json" "$work/done/${name%/*}/"
  echo "$name: status $status after $((SECONDS - begun)) s"
  if ((status != 0)); then failed=1; fi
}

stop_for_now() {
  echo "time is up: run the same command again, it goes on from here"
  exit 75
}

# A process within a piece. In the foreground: what ends this script from outside ends it too.
limited() {
  local left=$((deadline - SECONDS))
  timeout --foreground -k 10 $((left > 1 ? left : 1)) "$@"
}

# ---------------------------------------------------------------- what pieces do
model() { limited "$PYTHON" benchmarks/model.py --device "$DEVICE" "$@"; }

run_pytest() { DEVICE=$DEVICE limited "$PYTHON" -m pytest -q -p no:cacheprovider "$@"; }

train() { # FOLDER ARM OPTION...: one arm, or what is missing of it; prints its results
  local folder=$1 arm=$2 status=0
  shift 2
  limited "$PYTHON" train.py --device "$DEVICE" --jobs 1 --output_dir "$folder" --resume \
    --methods "$arm" "$@" || status=$?
  # Tiny runs earn no reward, so that nothing is trained, which is status 1.
  if [[ $TINY ]] && ((status == 1)); then status=0; fi
  if ((status == 124 || status == 137)); then return $status; fi
  pieces finals "$folder" || return 1
  return $status
}

scaled_start() { # FOLDER ATTEMPTS STEPS WIDTH LAYERS
  limited "$PYTHON" benchmarks/gpu_pieces.py start "$@" "$DEVICE"
}

scaled_arm() { # START FOLDER ARM OPTION...
  if [[ ! -d $1 ]]; then echo "there is no start: see scale/start.log" && return 1; fi
  shift
  train "$@"
}

killed() { # FOLDER LINES OPTION...: kill a run once its log of metrics has more than LINES lines
  local folder=$1 lines=$2
  shift 2
  if compgen -G "$folder/*/metrics.jsonl" > /dev/null; then return 0; fi # killed in an earlier call
  "$PYTHON" train.py --device "$DEVICE" --jobs 1 --output_dir "$folder" "$@" &
  local victim=$!
  until (($(cat "$folder"/*/metrics.jsonl 2> /dev/null | wc -l) > lines)); do
    sleep 0.02
    kill -0 $victim || return 1
    if ((SECONDS >= deadline)); then kill -KILL $victim && return 124; fi
  done
  kill -KILL $victim
  wait $victim
  if compgen -G "$folder/*/model" > /dev/null; then echo "it was killed too late" && return 1; fi
  echo "{\"lines_when_killed\": $(cat "$folder"/*/metrics.jsonl | wc -l)}"
}

kill_and_resume() { # FOLDER LINES ARM OPTION...
  local folder=$1 lines=$2 arm=$3
  shift 3
  killed "$folder/killed" "$lines" --methods "$arm" "$@" || return 1
  train "$folder/killed" "$arm" "$@" || return $?
  pieces compare "$folder/whole" "$folder/killed"
}

# ---------------------------------------------------------------- the parts
part_tests() {
  piece tests/test_cuda 500 run_pytest tests/test_cuda.py
}

# Sizes, by the table of docs/own_model.md, with the 8192 tokens of a micro-batch; the least that
# any trainer must do also keeps the float32 logits of its tokens, half of which are responses':
#   0.5B: 7.9 GB weights and AdamW + 1.0 copies + 8192 * 1.6 MB + 4096 * 152k * 4 B =  25 GB
#   1.5B: 24.7 GB                  + 3.1        + 8192 * 3.3 MB + 2.5 GB           =  57 GB
# and for what is at work at one time (a bucket's logits, a chunk's softmax) less than 10 GB more.
# Drawing, 128 responses of up to 640 tokens with prompts: 82k tokens * 57 kB = 4.7 GB at 1.5B.
part_model() {
  if [[ $TINY ]]; then
    piece model/countdown 300 model --prompts 2 --tokens 9 --repeats 1
    return
  fi
  local size
  for size in 0.5b 1.5b; do
    piece "model/$size" 400 model --size $size --prompts 16 --tokens 512 --repeats 3
  done
}

# 7B: 30.5 GB while the float32 weights are there, then 17.4 GB + adapters 1.3 + layers computed
# again 3.3 + logits 2.5; drawing 82k tokens * 115 kB = 9.4 GB.
part_lora() {
  if [[ $TINY ]]; then
    piece lora/countdown 300 model --lora_rank 2 --gradient_checkpointing --prompts 2 --tokens 9 \
      --repeats 1
    return
  fi
  piece lora/7b 500 model --size 7b --lora_rank 32 --gradient_checkpointing --prompts 16 \
    --tokens 512 --repeats 3
}

part_resume() {
  local options=(--steps 12 --checkpoint_every 3) lines=36
  if [[ $TINY ]]; then
    options+=(--warm_start_steps 2 --prompts_per_step 2 --max_new_tokens 9)
    lines=4
  fi
  piece resume/whole 900 train "$work/resume/whole" bapo-gate@8 "${options[@]}"
  piece resume/killed 900 kill_and_resume "$work/resume" $lines bapo-gate@8 "${options[@]}"
}

part_default() {
  local arms=(grpo@1 grpo@8 bapo@8 bapo-gate@8) options=() arm
  if [[ $TINY ]]; then
    arms=(grpo@1)
    options=(--steps 1 --warm_start_steps 2 --max_new_tokens 9)
  fi
  for arm in "${arms[@]}"; do
    piece "default/$arm" 1800 train "$work/default/runs" "$arm" "${options[@]}"
  done
}

part_scale() {
  local arms=(grpo@1 grpo@8 bapo-gate@8) attempts=16 steps=6000 width=512 layers=8 arm
  local options=(--max_new_tokens 208 --steps 60 --learning_rate 1e-4)
  if [[ $TINY ]]; then
    arms=(grpo@1)
    steps=2 width=64 layers=1
    options=(--max_new_tokens 9 --steps 1 --prompts_per_step 2)
  fi
  local start="$work/scale/warm-starts/attempts$attempts-steps$steps-seed0"
  piece scale/start 1800 scaled_start "$start" $attempts $steps $width $layers
  for arm in "${arms[@]}"; do
    piece "scale/$arm" 1800 scaled_arm "$start" "$work/scale/runs" "$arm" \
      --attempts $attempts --warm_start_steps $steps "${options[@]}"
  done
}

part_suite() {
  local files=(tests/test_*.py) file name
  if [[ $TINY ]]; then files=(tests/test_files.py); fi
  for file in "${files[@]}"; do
    name=$(basename "$file" .py)
    if [[ $name == test_cuda ]]; then continue; fi
    piece "suite/$name" 500 run_pytest "$file"
  done
}

for part in "${parts[@]}"; do
  "part_$part"
done
exit $failed
