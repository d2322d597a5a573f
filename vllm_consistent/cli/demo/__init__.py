"""`vllm-consistent demo`: a small true on-policy GRPO run, compared bit for bit."""
