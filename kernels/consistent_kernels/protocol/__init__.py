"""What engine and trainer exchange: mismatch reports, weight digests and receipts, reports."""

from consistent_kernels.protocol.handover import HANDOVER_NAME, Handover, split_handover
from consistent_kernels.protocol.mismatch import MismatchReport, TokenMismatch, compare_logprobs
from consistent_kernels.protocol.report import (
    ConsistencyReport,
    check_reports,
    environment_facts,
)
from consistent_kernels.protocol.temperature import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    check_temperature,
)
from consistent_kernels.protocol.weights import (
    TensorDigest,
    WeightDigest,
    WeightReceipt,
    check_receipt,
    state_digest,
    tensor_digest,
)

__all__ = [
    "HANDOVER_NAME",
    "HIGHEST_TEMPERATURE",
    "LOWEST_TEMPERATURE",
    "ConsistencyReport",
    "Handover",
    "MismatchReport",
    "TensorDigest",
    "TokenMismatch",
    "WeightDigest",
    "WeightReceipt",
    "check_receipt",
    "check_reports",
    "check_temperature",
    "compare_logprobs",
    "environment_facts",
    "split_handover",
    "state_digest",
    "tensor_digest",
]
