"""Manifold-constrained hyper-connections (mHC): the pre, post and head maps of DeepSeek-V4."""

from consistent_kernels.hyper_connections.api import (
    hc_head,
    hc_head_bwd,
    hc_post,
    hc_post_bwd,
    hc_pre,
    hc_pre_bwd,
)

__all__ = ["hc_head", "hc_head_bwd", "hc_post", "hc_post_bwd", "hc_pre", "hc_pre_bwd"]
