"""What engine and trainer exchange: mismatch reports, weight digests and receipts, reports."""

from consistent_kernels.protocol.mismatch import MismatchReport, TokenMismatch, compare_logprobs
from consistent_kernels.protocol.weights import (
    TensorDigest,
    WeightDigest,
    WeightReceipt,
    check_receipt,
    state_digest,
    tensor_digest,
)

__all__ = [
    "MismatchReport",
    "TensorDigest",
    "TokenMismatch",
    "WeightDigest",
    "WeightReceipt",
    "check_receipt",
    "compare_logprobs",
    "state_digest",
    "tensor_digest",
]
