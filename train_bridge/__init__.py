"""Training side: an HF or Megatron model whose forward runs the engine's kernels."""

from consistent_kernels.protocol import MismatchReport, compare_logprobs
from train_bridge.determinism import deterministic_gradients
from train_bridge.hf import bridge_model, unbridge_model
from train_bridge.hf_interfaces import register_hf_interfaces
from train_bridge.logprobs import TokenScores, token_logprobs
from train_bridge.masters import load_masters
from train_bridge.reporting import consistency_report
from train_bridge.weights import push_weights, weight_version

__all__ = [
    "MismatchReport",
    "TokenScores",
    "bridge_model",
    "compare_logprobs",
    "consistency_report",
    "deterministic_gradients",
    "load_masters",
    "push_weights",
    "register_hf_interfaces",
    "token_logprobs",
    "unbridge_model",
    "weight_version",
]
