#!/usr/bin/env bash
# Test verl_bapo.py against the real verl, on a CPU, in an environment of its own: integrations/test_verl.sh [folder]
# Without a folder the environment is temporary. verl is installed without its dependencies, most of which need a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
env=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$env"' EXIT
python3 -m venv "$env"
"$env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 pytest==9.2.0 ray==2.60.0 tensordict==0.10.0 transformers==5.10.4 \
    datasets==5.2.0 hydra-core==1.3.8 omegaconf==2.3.1 codetiming==1.4.0 pillow==13.0.0
"$env/bin/pip" install -q --no-deps verl==0.9.1
"$env/bin/python" -c 'import verl, torch; print("verl", verl.__version__, "torch", torch.__version__)'  # a skip is no pass
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -q tests/test_verl_bapo.py tests/test_objectives_engines.py
