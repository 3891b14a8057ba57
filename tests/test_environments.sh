#!/usr/bin/env bash
# Test the project in another environment than requirements.txt:
#
#     bash tests/test_environments.sh NAME [FOLDER [TEST_FILE ...]]
#
#   old         the oldest versions that requirements.txt names: torch 2.6, transformers 5.0
#   bare        torch 2.11 and transformers 5.17, without datasets, math-verify and peft
#   new         the newest versions of everything that install: torch 2.14.1, transformers 5.24.0
#   torch-2.2.0, torch-2.4.0   bapo.py alone; likewise with any other version of torch
#
# The environment is made in FOLDER; one that is there is used as it is. Without FOLDER it is
# temporary. Without TEST_FILE the files run that use torch, transformers or peft most. Results:
# docs/environments.md.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?usage: bash tests/test_environments.sh old|bare|new|torch-VERSION [FOLDER [TEST_FILE ...]]}
always=(tqdm filelock pytest matplotlib scipy pandas)
optional=(datasets math-verify)
tests=(
    tests/test_bapo.py
    tests/test_countdown.py
    tests/test_data.py
    tests/test_eval_aime.py
    tests/test_loading.py
    tests/test_minimal.py
    tests/test_neighbours.py
    tests/test_reward.py
    tests/test_rollout.py
    tests/test_resume.py
    tests/test_train.py
)
case $name in
    old) packages=(torch==2.6.0 transformers==5.0.0 peft==0.21.2 "${always[@]}" "${optional[@]}") ;;
    bare) packages=(torch==2.11.0 transformers==5.17.0 "${always[@]}") ;;
    new) packages=(torch transformers peft "${always[@]}" "${optional[@]}") ;;
    torch-*)
        packages=("torch==${name#torch-}" "numpy<2" pytest)
        tests=(tests/test_bapo.py)
        ;;
    *) echo "there is no environment $name: see the top of $0" >&2 && exit 2 ;;
esac

environment=${2:-$(mktemp -d)}
if (($# < 2)); then
    trap 'rm -rf "$environment"' EXIT
fi
if (($# > 2)); then
    tests=("${@:3}")
fi
if [[ ! -x $environment/bin/python ]]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install -q "${packages[@]}"
fi
"$environment/bin/pip" list 2> /dev/null | grep -E '^(torch|transformers|peft|numpy|datasets) '
# Where tests are skipped the environment lacks a package; the last lines say which.
OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q -rs -p no:cacheprovider "${tests[@]}"
