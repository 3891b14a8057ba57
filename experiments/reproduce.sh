#!/bin/bash
# Everything that results/ shows, from nothing: on two cores some ten hours, most of them for the
# runs. Started again, it goes on where it ended; with names of blocks it makes these alone:
#   experiments/reproduce.sh "choose 121 122" "choose 123 124"
# All runs of a seed belong on one machine: another processor gives other numbers.
set -euo pipefail
cd "$(dirname "$0")/.."

# What seeds 121 to 125 chose, written before any run of measure was looked at. METHOD=RATE: "The
# chosen rates" of results/tables.md. LOW-HIGH: the mean bounds of rho0 0.42 in its "The target".
chosen_rates=(grpo@1=8e-4 grpo@8=1e-4 bapo@8=5e-5 bapo-app-a@8=5e-5 0.9-3.0@8=5e-5)
mean_bounds=0.73-2.04

commit=$(git rev-parse --short HEAD)  # that the runs begin with

# make NAME OPTION...: the runs of a sweep, into runs/NAME
make() {
  local name=$1
  shift
  local resume=()
  if [ -e "runs/$name/config.json" ]; then resume=(--resume); fi
  python train.py --output_dir "runs/$name" "${resume[@]}" "$@"
}

# keep NAME: what is kept of the runs in runs/NAME, into results/NAME
keep() {
  python experiments/pack.py "runs/$1" "results/$1" "$commit"
}

# sweep NAME OPTION...: both
sweep() {
  make "$@"
  keep "$1"
}

# The older sweeps, at one rate
older() {
  local rate=(--learning_rate 2e-4)
  sweep default --seeds 101 102 103 104 105 106 107 108 "${rate[@]}" \
    --methods grpo@1 grpo@8 bapo-main@8 bapo-app-a@8 bapo-app-a-gradient@8 0.9-2.0@8
  sweep binding --seeds 111 112 113 114 115 116 --attempts 4 --max_new_tokens 53 "${rate[@]}" \
    --methods grpo@8 bapo-main@8 0.9-3.0@8
  sweep bounds --seeds 101 102 103 104 105 "${rate[@]}" \
    --methods 0.5-1.2@8 0.5-2.0@8 0.8-2.0@8 0.9-1.2@8
  sweep partial --seeds 101 102 103 104 105 --partial_budget 14 "${rate[@]}" \
    --methods grpo@4 bapo-app-a-gradient@4
}

# choose SEED...: target and rates, on choosing seeds
choose() {
  local rho0 rate methods
  for rho0 in 0.40 0.42 0.46; do
    sweep "target-$rho0" --seeds "$@" --learning_rate 3e-4 --rho0 "$rho0" --methods bapo@8
  done
  for rate in 3e-4 1e-4 2e-4 5e-5 4e-4 2.5e-5; do
    methods=(grpo@8 bapo@8 bapo-app-a@8 0.9-3.0@8)
    case $rate in 1e-4 | 2e-4 | 3e-4 | 4e-4) methods+=(grpo@1) ;; esac
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" --methods "${methods[@]}"
  done
  sweep rate-8e-4 --seeds "$@" --learning_rate 8e-4 --methods grpo@1
}

# measure SEED...: both named rates and the chosen ones, on measuring seeds
measure() {
  local rate choice
  for rate in 1e-4 3e-4; do
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" \
      --methods grpo@1 grpo@8 bapo@8 bapo-app-a@8 0.9-3.0@8
  done
  for choice in "${chosen_rates[@]}"; do
    rate=${choice#*=}
    sweep "rate-$rate" --seeds "$@" --learning_rate "$rate" --methods "${choice%=*}"
  done
}

# adapt SEED...: the search, its mean bounds, and the bounds of another seed
adapt() {
  local options=(--seeds "$@" --learning_rate 3e-4 --rho0 0.42)
  make target-0.42 "${options[@]}" --methods bapo@8 "${mean_bounds}@8"
  python experiments/yoked.py --output_dir runs/target-0.42 "${options[@]}"
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
older
choose 121 122
choose 123 124
choose 125
measure 126 127
measure 128 129
measure 130 131
measure 132 133
measure 134 135
measure 136 137
for seed in 126 128 130 132 134 136; do adapt $seed $((seed + 1)); done
for seed in 126 128 130 132; do staleness $seed $((seed + 1)); done

python experiments/literal.py
python experiments/figures.py
python experiments/tables.py > results/tables.md
