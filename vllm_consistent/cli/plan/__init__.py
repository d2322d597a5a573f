"""`vllm-consistent plan`: does a recipe fit, and what does a step move."""
