#!/usr/bin/env bash
# SmolLM2-135M-Instruct on one GPU. Usage: run.sh OUT [--steps N] [KEY=VALUE ...]   (verl's keys)
# Makes the data, converts the bundled checkpoint once, and runs this folder's recipe; see README.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
out=${1:?give a folder for data, logs and metrics}
shift

exec python "$root/benchmarks/verl_smollm2/run.py" --only consistent --out "$out" "$@"
