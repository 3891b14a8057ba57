#!/bin/bash
# Make everything that results/ shows of the toy task, from nothing: some ten hours on two cores. Started
# again, it continues where it ended. With names of blocks, such as "language_model 10 11", it makes only these:
#   results/scripts/reproduce.sh "fresh 138 139" "fresh 140 141"
# All runs of a seed belong on one machine, because another processor gives other numbers.
set -euo pipefail
cd "$(dirname "$0")/../.."

mean_bounds=0.73-2.04  # of rho0 0.42 on seeds 121 to 125

commit=$(git rev-parse --short HEAD)  # that the runs begin with

# make NAME OPTION...: train into runs/NAME
make() {
  local name=$1
  shift
  local resume=()
  if [ -e "runs/$name/config.json" ]; then resume=(--resume); fi
  python train.py --output_dir "runs/$name" "${resume[@]}" "$@"
}

# keep NAME: pack runs/NAME into results/NAME
keep() {
  python -m results.scripts.pack "runs/$1" "results/$1" "$commit"
}

# sweep NAME OPTION...: both
sweep() {
  make "$@"
  keep "$1"
}

# fresh SEED...: families A to F of the protocol
fresh() {
  local rate
  for rate in 2e-4 1e-4; do
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" \
      --methods grpo@1 grpo@8 bapo@8 0.9-3.0@8
  done
  sweep rate-5e-5 --seeds "$@" --learning_rate 5e-5 --methods grpo@8 bapo@8
  sweep three-attempts --seeds "$@" --learning_rate 2e-4 --attempts 3 --max_new_tokens 40 \
    --methods grpo@8 bapo-main@8
}

# scope SEED...: families G to K
scope() {
  local options=(--seeds "$@" --learning_rate 2e-4)
  make scope "${options[@]}" --methods grpo@8 bapo@8 bapo-main@8 0.9-1.2@8
  python -m results.scripts.variants scope --output_dir runs/scope "${options[@]}"
  keep scope
}

# language_model SEED...: families L and M, some five hours per seed and core. The folder of the
# model and the prompts is made by results/scripts/smollm2.py.
language_model() {
  local folder=runs/smollm2-135m name resume=()
  if [ -e runs/smollm2/config.json ]; then resume=(--resume); fi
  python -m results.scripts.variants measured-with-larger-step --seeds "$@" "${resume[@]}" \
    --model "$folder" --data "$folder/two_words.jsonl" --reward results/scripts/smollm2.py:reward \
    --methods grpo@1 grpo@8 bapo-main@8 0.6-1.2@8 0.9-3.0@8 --learning_rate 4e-6 \
    --prompts_per_step 4 --steps 16 --temperature 0.6 --max_new_tokens 48 --held_out 64 \
    --evaluate_every 8 --jobs 2 --output_dir runs/smollm2
  for name in smollm2 smollm2-larger-step; do keep "$name"; done
}

# measured: the runs of train.py's default command, which log more here
measured() {
  local resume=()
  if [ -e runs/measured/config.json ]; then resume=(--resume); fi
  python -m results.scripts.variants measured --seeds 0 "${resume[@]}" --output_dir runs/measured
  keep measured
}

# older: Figs. 7 and 12
older() {
  sweep bounds --seeds 101 102 103 104 105 --learning_rate 2e-4 \
    --methods 0.5-1.2@8 0.5-2.0@8 grpo@8 0.8-2.0@8 0.9-1.2@8 0.9-2.0@8
  sweep partial --seeds 101 102 103 104 105 --partial_budget 14 --learning_rate 2e-4 \
    --methods grpo@4 bapo-app-a-gradient@4
}

# choose SEED...: the mean bounds of rho0 0.42, which `adapt` takes
choose() {
  sweep target-0.42 --seeds "$@" --learning_rate 3e-4 --rho0 0.42 --methods bapo@8
}

# measure SEED...: 1e-4 and 3e-4
measure() {
  local rate
  for rate in 1e-4 3e-4; do
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" \
      --methods grpo@1 grpo@8 bapo@8 bapo-app-a@8 0.9-3.0@8
  done
}

# adapt SEED SEED: the search, its mean bounds, and the bounds of the other seed
adapt() {
  local options=(--seeds "$@" --learning_rate 3e-4 --rho0 0.42)
  make target-0.42 "${options[@]}" --methods bapo@8 "${mean_bounds}@8"
  python -m results.scripts.variants yoked --output_dir runs/target-0.42 "${options[@]}"
  keep target-0.42
}

# staleness SEED...: other numbers of updates on a batch
staleness() {
  sweep rate-3e-4 --seeds "$@" --learning_rate 3e-4 \
    --methods grpo@2 bapo@2 grpo@4 bapo@4 grpo@16 bapo@16
}

if [ $# -gt 0 ]; then
  for block in "$@"; do $block; done
  exit
fi
for seed in 138 140 142 144 146 148; do fresh $seed $((seed + 1)); done
for seed in 150 152 154 156 158 160; do scope $seed $((seed + 1)); done
measured
older
choose 121 122 123 124 125
for seed in 126 128 130 132 134 136; do measure $seed $((seed + 1)); done
for seed in 126 128 130 132 134 136; do adapt $seed $((seed + 1)); done
for seed in 126 128 130 132; do staleness $seed $((seed + 1)); done

python -m results.scripts.figures
python -m results.scripts.tables > results/tables.md
