"""Log-probabilities of given tokens, from hidden states or from logits, with equal bits."""

from consistent_kernels.token_logprobs.api import (
    TokenLogprobs,
    token_logprobs,
    token_logprobs_bwd,
    token_logprobs_from_logits,
    token_logprobs_from_logits_bwd,
)
from consistent_kernels.token_logprobs.ranking import (
    TopLogprobs,
    count_at_least,
    token_ranks,
    topk_ids,
    topk_logprobs,
)

__all__ = [
    "TokenLogprobs",
    "TopLogprobs",
    "count_at_least",
    "token_logprobs",
    "token_logprobs_bwd",
    "token_logprobs_from_logits",
    "token_logprobs_from_logits_bwd",
    "token_ranks",
    "topk_ids",
    "topk_logprobs",
]
