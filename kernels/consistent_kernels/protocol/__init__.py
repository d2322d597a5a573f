"""What engine and trainer exchange: mismatch reports, weight digests and receipts, reports."""

from consistent_kernels.protocol.mismatch import MismatchReport, TokenMismatch, compare_logprobs

__all__ = ["MismatchReport", "TokenMismatch", "compare_logprobs"]
