"""vLLM layers whose arithmetic is ours, registered out-of-tree under the stock names."""
