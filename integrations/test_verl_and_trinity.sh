#!/usr/bin/env bash
# Test verl_bapo.py and trinity_bapo.py against the real verl and Trinity-RFT, on a CPU:
#
#     integrations/test_verl_and_trinity.sh [folder of the environment]
#
# They get an environment of their own, since verl's requirements exclude this project's. Without a
# folder it is temporary. Both engines are installed without their dependencies, most of which need
# a GPU; what their losses import is listed here.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=${1:-$(mktemp -d)}
if [ $# -eq 0 ]; then
    trap 'rm -rf "$environment"' EXIT
fi

python3 -m venv "$environment"
"$environment/bin/pip" install -q \
    torch==2.13.0 \
    numpy==2.4.6 \
    pytest==9.2.0 \
    ray==2.60.0 \
    tensordict==0.10.0 \
    transformers==5.10.4 \
    datasets==5.2.0 \
    hydra-core==1.3.8 \
    omegaconf==2.3.1 \
    codetiming==1.4.0 \
    pillow==13.0.0
"$environment/bin/pip" install -q --no-deps verl==0.9.1 trinity-rft==0.6.0

# The tests skip where an engine is missing, and a skip is no pass: fail here if one is.
"$environment/bin/python" -c 'import verl, trinity.algorithm.policy_loss_fn'
OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q \
    tests/test_verl_bapo.py tests/test_trinity_bapo.py tests/test_neighbours.py
