"""The `vllm-consistent` command."""
