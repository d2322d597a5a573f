"""What attention refuses: heads, dtypes, indices, pages, plans of another batch."""

from __future__ import annotations

import torch

from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.attention.spec import IMPLEMENTATIONS, PAGE_MULTIPLES
from consistent_kernels.errors import invalid, require_implementation

_DTYPES = {
    "reference": (torch.bfloat16, torch.float16, torch.float32),
    "llvm": (torch.bfloat16,),
    "triton": (torch.bfloat16, torch.float16),
    "flash_attn": (torch.bfloat16, torch.float16),
}


def check_impl(op: str, impl: str) -> None:
    """Raise unless `impl` is an implementation of attention."""
    require_implementation(op, impl, IMPLEMENTATIONS)


def check_index(op: str, name: str, tensor: torch.Tensor, dim: int, size: int | None) -> None:
    """Raise unless `tensor` holds int32 or int64 in `dim` dimensions, `size` along the first."""
    if tensor.dim() != dim or tensor.dtype not in (torch.int32, torch.int64):
        raise invalid(
            op, name, f"int32 or int64 with {dim} dimension(s)", f"{tensor.dtype} {tensor.dim()}-D"
        )
    if size is not None and tensor.shape[0] != size:
        raise invalid(op, name, f"of length {size}", tensor.shape[0])


def check_heads(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: AttentionParameters,
    impl: str,
    key_dims: int,
) -> None:
    """Raise unless q, k and v have the heads, dtypes and device that `impl` serves.

    Args:
        key_dims: 3 for packed keys [Tk, Hk, D], 4 for pages [blocks, block_size, Hk, D].
    """
    check_impl(op, impl)
    if q.dtype not in _DTYPES[impl]:
        names = ", ".join(str(dtype) for dtype in _DTYPES[impl])
        raise invalid(op, "q", f"one of {names} for impl {impl!r}", q.dtype)
    query = (params.num_heads, params.head_dim)
    if q.dim() != 3 or tuple(q.shape[1:]) != query:
        raise invalid(op, "q", f"of shape [T, {query[0]}, {query[1]}]", tuple(q.shape))
    key = (params.num_kv_heads, params.head_dim)
    shape = "[Tk" if key_dims == 3 else "[blocks, block_size"
    for name, x in (("k", k), ("v", v)):
        if x.dim() != key_dims or tuple(x.shape[-2:]) != key:
            raise invalid(op, name, f"of shape {shape}, {key[0]}, {key[1]}]", tuple(x.shape))
        # The CPU program may keep pages in fp32, which hold the same values.
        wide = impl == "reference" and x.dtype == torch.float32
        if x.dtype != q.dtype and not wide:
            raise invalid(op, name, q.dtype, x.dtype)
        if x.device != q.device:
            raise invalid(op, name, f"on {q.device}", x.device)
    if k.shape != v.shape or k.dtype != v.dtype:
        raise invalid(op, "v", f"{k.dtype} {tuple(k.shape)}", f"{v.dtype} {tuple(v.shape)}")


def check_cache(op: str, name: str, cache: torch.Tensor, impl: str) -> None:
    """Raise unless pages are rows without gaps, of a size that `impl` serves."""
    _, size, heads, width = cache.shape
    if size % PAGE_MULTIPLES[impl]:
        raise invalid(op, f"{name} block size", f"a multiple of {PAGE_MULTIPLES[impl]}", size)
    row = heads * width
    if cache.stride()[1:] != (row, width, 1) or cache.stride(0) % row:
        raise invalid(
            op, name, f"laid out as rows of {row} elements inside each block", cache.stride()
        )


def check_plan(op: str, plan: AttentionPlan, params: AttentionParameters, q: torch.Tensor) -> None:
    """Raise unless `plan` was made for this batch and these layers."""
    if plan.params != params:
        raise invalid(op, "plan", f"made for {params}", plan.params)
    if plan.num_tokens != q.shape[0]:
        raise invalid(op, "plan", f"made for {q.shape[0]} tokens", plan.num_tokens)
