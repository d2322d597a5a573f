"""Attention backends: CPU_ATTN's override and CUSTOM on CUDA, on one op for every phase."""
