#!/usr/bin/env bash
# Qwen3-8B on one node of 8 GPUs. Usage: run.sh [KEY=VALUE ...]   (verl's keys)
# Needs: MODEL (a folder, or Qwen/Qwen3-8B), TRAIN and VAL (parquet files); see README.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=$(basename "$here")
: "${TRAIN:?set TRAIN to the training parquet}" "${VAL:?set VAL to the validation parquet}"

# Read by cuBLAS once, at its start; Ray hands it to every process of this node.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}

exec python -m train_bridge.verl.main_ppo \
  --config-dir "$here" --config-name "$name" \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  "$@"
