#!/bin/bash
# Everything that results/ shows, from nothing: on two cores about three hours, most of them for the
# runs. Started again, it goes on where it ended.
set -euo pipefail
cd "$(dirname "$0")/.."

# sweep NAME OPTION...: the runs of a sweep, into runs/NAME, and what is kept of them, into results/NAME
sweep() {
  local name=$1
  shift
  local resume=()
  if [ -e "runs/$name/config.json" ]; then resume=(--resume); fi
  python train.py --output_dir "runs/$name" "${resume[@]}" "$@"
  python experiments/pack.py "runs/$name" "results/$name" "$(git rev-parse --short HEAD)"
}

sweep default --seeds 101 102 103 104 105 106 107 108 \
  --methods grpo@1 grpo@8 bapo-main@8 bapo-octothinker@8 bapo@8 0.9-2.0@8
sweep binding --seeds 111 112 113 114 115 116 --attempts 4 --max_new_tokens 53 \
  --methods grpo@8 bapo-main@8 0.9-3.0@8
sweep bounds --seeds 101 102 103 104 105 --methods 0.5-1.2@8 0.5-2.0@8 0.8-2.0@8 0.9-1.2@8
sweep partial --seeds 101 102 103 104 105 --partial_budget 14 --methods grpo@4 bapo@4

python experiments/literal.py
python experiments/anatomy.py
python experiments/figures.py
python experiments/tables.py > results/tables.md

# results/rate-reuse/runs.csv says where its runs come from. The same settings with today's train.py:
#   python train.py --learning_rate 1e-4 --methods grpo@1 grpo@8 --output_dir runs/rate-1e-4
#   python train.py --learning_rate 2e-4 --methods grpo@1 grpo@8 1.02-3.0@8 --output_dir runs/rate-2e-4
#   python train.py --learning_rate 3e-4 --methods grpo@1 grpo@8 --output_dir runs/rate-3e-4
#   python train.py --learning_rate 4e-4 --steps 240 --methods grpo@1 grpo@8 --output_dir runs/rate-4e-4
#   python train.py --learning_rate 4e-4 --steps 60 --attempts 4 --max_new_tokens 53 \
#     --methods grpo@1 grpo@8 1.02-3.0@8 --output_dir runs/rate-4e-4-four   # and 5e-5, 1e-4, 2e-4
