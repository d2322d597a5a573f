"""Training side: an HF or Megatron model whose forward runs the engine's kernels."""
