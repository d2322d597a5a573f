"""Rollout speed on a GPU: our engine and stock vLLM resident side by side; see `run.py`."""
