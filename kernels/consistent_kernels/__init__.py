"""Kernels, contracts and protocol shared by the vLLM engine and the trainer."""

__version__ = "0.1.0"
