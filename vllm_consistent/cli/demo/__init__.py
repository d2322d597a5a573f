"""`vllm-consistent demo`: a small, true on-policy GRPO run whose log-probs are compared bit for bit."""
