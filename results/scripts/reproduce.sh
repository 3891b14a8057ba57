#!/bin/bash
# Make the runs of results/ that train.py can make, from nothing: some ten hours of the toy and, with the
# blocks language_model and language_model_on_gpu, some eighty of SmolLM2 on two cores. Started again, it
# continues where it ended. With names of blocks it makes only these:
#   results/scripts/reproduce.sh "rates 138 139" "rates 140 141"
# All runs of a seed belong on one machine, because another processor gives other numbers.
#
# Commit c813408 has the losses of single comparisons and the options that train.py no longer has. Its own
# reproduce.sh makes there what this one cannot:
#   scope SEED SEED     results/scope with bapo-main-per16@8, bapo-main-per4@8 and bapo-gradient@8
#   adapt SEED SEED     results/target-0.42 with yoked@8
#   fresh SEED SEED     results/three-attempts (and the rates again)
# Copy the folders from its runs/ to this runs/, and pack them here with
#   python -m results.scripts.pack runs/scope results/scope c813408
#
# Commit 4514b01 has results/scripts/mechanism.py, which takes train.py's options, logs classes of tokens, and
# has reverse@8. Its commands, with the options two_words below for SmolLM2, one seed a folder:
#   python -m results.scripts.mechanism --methods grpo@8 --seeds 174 175 --output_dir runs/mechanism/toy
#   python -m results.scripts.mechanism "${two_words[@]}" --methods grpo@8 --seeds 40 --held_out 64 \
#     --steps 16 --learning_rate 4e-6 --output_dir runs/mechanism/smollm2-40
#   python -m results.scripts.mechanism "${two_words[@]}" --seeds 52 --held_out 64 --steps 16 --rho0 0.42 \
#     --learning_rate 4.8e-5 --output_dir runs/large-steps-52 \
#     --methods grpo@1 grpo@8 bapo@8 reverse@8 0.6-1.2@8 0.9-1.2@8 0.9-3.0@8
# Packed here with
#   python -m results.scripts.pack runs/mechanism/toy results/mechanism/toy 4514b01
#   python -m results.scripts.pack runs/mechanism/smollm2-40 results/mechanism/smollm2 4514b01
#   python -m results.scripts.pack runs/large-steps-52 results/large-steps 4514b01
#
# Tables that are no longer printed (dropped groups, rho from batch to batch, the sums of a run's changes of
# entropy, rho by update): git show b21c926:results/tables.md; where searches with another rho0 would have
# ended: git show aacacce:results/tables.md
set -euo pipefail
cd "$(dirname "$0")/../.."

commit=$(git rev-parse --short HEAD)  # that the runs begin with

# sweep NAME OPTION...: train into runs/NAME and pack that into results/NAME
sweep() {
  local name=$1
  shift
  sweep_as "$name" "$name" "" "$@"
}

# sweep_as NAME FOLDER OLD=NEW OPTION...: pack runs/NAME into results/FOLDER, with another name of a method
sweep_as() {
  local name=$1 folder=$2 names=$3
  shift 3
  local resume=()
  if [ -e "runs/$name/config.json" ]; then resume=(--resume); fi
  python train.py --output_dir "runs/$name" "${resume[@]}" "$@"
  python -m results.scripts.pack "runs/$name" "results/$folder" "$commit" $names
}

# rates SEED...: families A to E of the protocol
rates() {
  local rate
  for rate in 2e-4 1e-4; do
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" \
      --methods grpo@1 grpo@8 bapo@8 0.9-3.0@8
  done
  sweep rate-5e-5 --seeds "$@" --learning_rate 5e-5 --methods grpo@8 bapo@8
}

# scope SEED...: families G, H and K, without searches for parts of an update
scope() {
  local options=(--seeds "$@" --learning_rate 2e-4)
  sweep scope "${options[@]}" --methods grpo@8 bapo@8 0.9-1.2@8
  sweep_as scope-main scope bapo@8=bapo-main@8 "${options[@]}" --rho0 0.4 --methods bapo@8
}

# fixed SEED...: families P and Q
fixed() {
  sweep fixed --seeds "$@" --learning_rate 2e-4 --methods grpo@8 bapo@8 0.6-1.2@8 0.9-3.0@8
}

# The language model's folder, with its prompts, is made by results/scripts/smollm2.py.
two_words=(--model runs/smollm2-135m --data runs/smollm2-135m/two_words.jsonl
  --reward results/scripts/smollm2.py:reward --prompts_per_step 4 --temperature 0.6
  --max_new_tokens 48 --held_out 64 --evaluate_every 8)

# language_model SEED...: families L and M, some five hours per seed and core
language_model() {
  local options=("${two_words[@]}" --seeds "$@" --steps 16 --jobs 2)
  sweep_as smollm2 smollm2 bapo@8=bapo-main@8 "${options[@]}" --learning_rate 4e-6 \
    --methods grpo@1 grpo@8 bapo@8 0.6-1.2@8 0.9-3.0@8
  sweep smollm2-larger-step "${options[@]}" --learning_rate 6e-6 --methods grpo@8
}

# language_model_on_gpu SEED...: families N and O
language_model_on_gpu() {
  sweep_as smollm2-gpu smollm2-gpu bapo@8=bapo-main@8 "${two_words[@]}" --seeds "$@" --steps 32 \
    --learning_rate 4e-6 --precision bfloat16 --jobs 10 --methods grpo@8 bapo@8 0.6-1.2@8
}

# older: Figs. 7 and 12
older() {
  sweep bounds --seeds 101 102 103 104 105 --learning_rate 2e-4 \
    --methods 0.5-1.2@8 0.5-2.0@8 grpo@8 0.8-2.0@8 0.9-1.2@8 0.9-2.0@8
  sweep partial --seeds 101 102 103 104 105 --partial_budget 14 --learning_rate 2e-4 \
    --methods grpo@4 bapo-app-a-gradient@4
}

# measure SEED...: 1e-4 and 3e-4
measure() {
  local rate
  for rate in 1e-4 3e-4; do
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" \
      --methods grpo@1 grpo@8 bapo@8 bapo-app-a@8 0.9-3.0@8
  done
}

# adapt SEED...: rho0 0.42, and its mean bounds on seeds 121 to 125
adapt() {
  sweep target-0.42 --seeds "$@" --learning_rate 3e-4 --rho0 0.42 --methods bapo@8 0.73-2.04@8
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
for seed in 138 140 142 144 146 148; do rates $seed $((seed + 1)); done
for seed in 150 152 154 156 158 160; do scope $seed $((seed + 1)); done
for seed in 162 164 166 168 170 172; do fixed $seed $((seed + 1)); done
older
for seed in 126 128 130 132 134 136; do measure $seed $((seed + 1)); done
for seed in 126 128 130 132 134 136; do adapt $seed $((seed + 1)); done
for seed in 126 128 130 132; do staleness $seed $((seed + 1)); done

python -m results.scripts.figures
python -m results.scripts.tables > results/tables.md
