"""One comparison of rollout and trainer log-probs, as metrics and as the first difference."""
