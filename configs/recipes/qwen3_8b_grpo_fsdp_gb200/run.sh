#!/usr/bin/env bash
# Qwen3-8B on GB200 nodes of 4 GPUs. Run it on every node at once, for example
#   srun --nodes=4 --ntasks-per-node=1 bash run.sh [KEY=VALUE ...]   (verl's keys)
# Needs on every node: HEAD (host name or address of the first node), NNODES and NODE_RANK (Slurm's
# own serve), MODEL, TRAIN and VAL on a file system that all nodes see; see README.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=$(basename "$here")
nnodes=${NNODES:-${SLURM_NNODES:?set NNODES}}
rank=${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK}}
port=${RAY_PORT:-6379}
gpus=${GPUS_PER_NODE:-4}
: "${HEAD:?set HEAD to the first node}"
: "${TRAIN:?set TRAIN to the training parquet}" "${VAL:?set VAL to the validation parquet}"

if [ "$rank" -ne 0 ]; then
  # Retries until the head is there; ends when the head does.
  until ray start --address "$HEAD:$port" --num-gpus "$gpus"; do sleep 5; done
  while ray health-check --address "$HEAD:$port" >/dev/null 2>&1; do sleep 30; done
  ray stop
  exit 0
fi

ray start --head --port "$port" --num-gpus "$gpus"
trap 'ray stop' EXIT

# All nodes first: Ray would otherwise place the run on those that came early.
python - "$((nnodes * gpus))" <<'PY'
import sys, time
import ray

ray.init(address="auto", log_to_driver=False)
wanted, deadline = int(sys.argv[1]), time.monotonic() + 600
while ray.cluster_resources().get("GPU", 0) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{ray.cluster_resources().get('GPU', 0):.0f} of {wanted} GPUs joined in 600 s")
    time.sleep(2)
PY

# A shell's exports stay on this node: what every process needs goes through runtime_env.
environment=()
for variable in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA HF_HOME; do
  if [ -n "${!variable:-}" ]; then
    environment+=("+ray_kwargs.ray_init.runtime_env.env_vars.$variable='${!variable}'")
  fi
done

python -m train_bridge.verl.main_ppo \
  --config-dir "$here" --config-name "$name" \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  trainer.nnodes="$nnodes" trainer.n_gpus_per_node="$gpus" \
  "${environment[@]}" \
  "$@"
