#!/usr/bin/env bash
# Installs dist/*.whl into an empty environment and runs it there, away from the repository: what a user gets.
#   make check-wheel PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wheels=("$root"/dist/sonicmoe_hf-*.whl)
[ ${#wheels[@]} = 1 ] || { echo "dist/ has ${#wheels[@]} wheels: remove the old ones"; exit 1; }
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${PIP_FLAGS:-} -c "$root/constraints.txt" "${wheels[0]}[train,peft]"
cd "$folder"
unset PYTHONPATH
export PATH="$folder/venv/bin:$PATH" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
set -x
sonicmoe-hf --version
sonicmoe-hf doctor
sonicmoe-hf demo --steps 40 --output demo
sonicmoe-hf plan demo/model
planned=$(sonicmoe-hf plan demo/model --method qlora --tokens 128 --json | python -c '
import json, sys
print(next(way["command"] for way in json.load(sys.stdin)["ways"] if way["name"].startswith("QLoRA MXFP4, r=8")))')
eval "$planned --steps 2 --output planned"
sonicmoe-hf example
sonicmoe-hf example finetune > mine.py
sonicmoe-hf example qlora > qlora.py
python mine.py --help > help.txt
python qlora.py --steps 4 --batch-size 2 --sequence-length 64 --output qlora
sonicmoe-hf example accelerate_loop > loop.py
sonicmoe-hf run -- loop.py --steps 2 2> log.txt || { cat log.txt; exit 1; }
grep "mixture-of-experts layers patched" log.txt
