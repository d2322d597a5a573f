"""Public sparse attention: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.sparse_attention.backward import sparse_attention_bwd_ref
from consistent_kernels.sparse_attention.reference import sparse_attention_ref
from consistent_kernels.sparse_attention.spec import IMPLEMENTATIONS

_DTYPES = {
    "reference": (torch.bfloat16, torch.float16, torch.float32),
    "triton": (torch.bfloat16, torch.float16),
    "flash_mla": (torch.bfloat16,),
}
BACKWARDS = ("own", "cudnn")

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "sparse_attention(Tensor q, Tensor kv, Tensor indices, Tensor? sinks, float scale, int d_v, "
    "str impl) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "sparse_attention_out(Tensor q, Tensor kv, Tensor indices, Tensor? sinks, float scale, "
    "Tensor(a!) out, str impl) -> Tensor"
)


def check_indices(indices: torch.Tensor, entries: int, *, op: str = "sparse_attention") -> None:
    """Refuse an index below -1 or beyond the last entry. Reads the indices on the host.

    Args:
        indices: [T, K] int32; entries: rows of kv.

    Raises:
        InvalidInputError: names the first query and column that hold such an index.
    """
    if indices.is_floating_point():
        raise invalid(op, "indices", "integers", indices.dtype)
    hint = "Positions inside a request need that request's first row added"
    what = f"-1 or a row of kv below {entries}"
    check_range(op, "indices", indices, -1, entries, what, hint)


def _check(
    op: str,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    d_v: int,
    impl: str,
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if q.dim() != 3 or q.dtype not in _DTYPES[impl]:
        names = ", ".join(str(dtype) for dtype in _DTYPES[impl])
        raise invalid(
            op, "q", f"[T, H, D] of {names} for impl {impl!r}", f"{tuple(q.shape)} of {q.dtype}"
        )
    tokens, heads, width = q.shape
    if heads == 0:
        raise invalid(op, "q", "[T, H, D] with at least one head", tuple(q.shape))
    if kv.dim() != 2 or kv.shape[1] != width or kv.dtype != q.dtype:
        raise invalid(op, "kv", f"{q.dtype} [S, {width}]", f"{kv.dtype} {tuple(kv.shape)}")
    if not 0 < d_v <= width:
        raise invalid(op, "d_v", f"between 1 and {width}", d_v)
    if indices.dim() != 2 or indices.shape[0] != tokens or indices.dtype != torch.int32:
        raise invalid(
            op, "indices", f"int32 [{tokens}, K]", f"{indices.dtype} {tuple(indices.shape)}"
        )
    if sinks is not None and (sinks.dtype != torch.float32 or tuple(sinks.shape) != (heads,)):
        raise invalid(op, "sinks", f"float32 [{heads}]", f"{sinks.dtype} {tuple(sinks.shape)}")
    for name, value in (("kv", kv), ("indices", indices), ("sinks", sinks)):
        if value is not None and value.device != q.device:
            raise invalid(op, name, f"on {q.device}", value.device)


def _sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count("sparse_attention", impl)
    if impl == "reference":
        check_indices(indices, kv.shape[0])
        return sparse_attention_ref(q, kv, indices, sinks, scale, d_v)
    if impl == "triton":
        from consistent_kernels.sparse_attention.triton import sparse_attention_fwd
    else:
        from consistent_kernels.sparse_attention.flash_mla import sparse_attention_fwd
    return sparse_attention_fwd(q, kv, indices, sinks, scale, d_v)


def _sparse_attention_out(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    impl: str,
) -> torch.Tensor:
    if impl == "flash_mla":
        count("sparse_attention", impl)
        from consistent_kernels.sparse_attention.flash_mla import sparse_attention_fwd

        return sparse_attention_fwd(q, kv, indices, sinks, scale, out.shape[2], out)[1]
    values, lse = _sparse_attention(q, kv, indices, sinks, scale, out.shape[2], impl)
    out.copy_(values)
    return lse


_LIBRARY.impl("sparse_attention", _sparse_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("sparse_attention_out", _sparse_attention_out, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::sparse_attention", lib=_LIBRARY)
def _(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, d_v)), q.new_empty((tokens, heads), dtype=torch.float32)


@torch.library.register_fake("consistent_kernels::sparse_attention_out", lib=_LIBRARY)
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the rows of kv that its indices name, one kv head for all heads.

    out = sum_j P_j v_j with P = softmax over the named entries j and the sink of scale q . k_j;
    k_j = kv[j], v_j = kv[j, :d_v]. Entries are taken in the given order, in tiles of 64 columns.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), absorbed MLA with D = 576 and d_v = 512; DeepSeek-V4,
    D = d_v = 512 with sinks. FlashMLA's sparse prefill kernel computes the same function; see
    `spec.py` for the rounding points.

    Args:
        q: [T, H, D], bf16 ("reference" and "triton" also fp16, "reference" fp32).
        kv: [S, D], the dtype of q: a workspace of gathered entries, or packed keys. Rows that no
            index names are never read.
        indices: [T, K] int32, rows of kv; -1 names nothing and may stand anywhere.
        scale: of the scores; d_v: leading columns of kv that are the value.
        sinks: [H] fp32, the score of a value of zero, or None.
        out: [T, H, d_v] in the dtype of q, contiguous, to write into (a piece of a step's output;
            no gradient), or None.
        impl: "reference" (any device; refuses indices out of range), "triton" (CUDA) or "flash_mla"
            (SM90, SM100; D 512 or 576, d_v 512, at most 128 heads). The last two take an index out
            of range for -1, unread: call `check_indices` where it may occur.

    Returns:
        (out [T, H, d_v] in the dtype of q, the given tensor or a new one; lse [T, H] fp32: natural,
        without the sink; a query that names nothing has out 0 and lse +inf, as FlashMLA and cuDNN
        have it).

    Numerics:
        A query's bits depend on that query, its sinks and the entries it names, in their order: not
        on the other queries, on where the entries lie in kv, nor on a tail of -1.

    Raises:
        InvalidInputError: shape, dtype, device, or (reference) an index out of range.
        UnsupportedError: unknown impl, or a shape that it does not serve.
    """
    _check("sparse_attention", q, kv, indices, sinks, d_v, impl)
    if out is not None:
        shape = (*q.shape[:2], d_v)
        if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
            given = f"{out.dtype} {tuple(out.shape)}, contiguous={out.is_contiguous()}"
            raise invalid("sparse_attention", "out", f"contiguous {q.dtype} {shape}", given)
        require_device("sparse_attention", q.device, out=out)
        return out, torch.ops.consistent_kernels.sparse_attention_out(
            q, kv, indices, sinks, scale, out, impl
        )
    return torch.ops.consistent_kernels.sparse_attention(q, kv, indices, sinks, scale, d_v, impl)


def require_backward(backward: str) -> None:
    """Raise unless this name of a backward is known and what it is made of loads here.

    For constructors and forwards: a trainer learns it before its first rollout, not after it.

    Raises:
        UnsupportedError: unknown name.
        MissingBinaryError: "cudnn" without nvidia-cudnn-frontend[cutedsl]; says what to install.
    """
    require_implementation("sparse_attention_bwd backward", backward, BACKWARDS)
    if backward == "cudnn":
        from consistent_kernels.sparse_attention.cudnn import require_cudnn

        require_cudnn()


def sparse_attention_bwd(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    impl: str,
    backward: str = "own",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `sparse_attention`.

    Args:
        grad_out, out: [T, H, d_v]; lse: [T, H] fp32, both from the forward; the rest as there.
        impl: of the forward. On CUDA with "triton" or "flash_mla" our own backward is a Triton
            program.
        backward: "own": the gradient of an entry is added over the queries that name it in
            ascending order, without atomics. "cudnn": cuDNN frontend's DSA backward, where it is
            installed; it fixes no order on SM90.

    Returns:
        (grad_q in the dtype of q, grad_kv in the dtype of kv, grad_sinks [H] fp32 or None).

    Raises:
        InvalidInputError: shape, dtype or device; with "reference" an index out of range.
        UnsupportedError, MissingBinaryError: as `require_backward`; "cudnn" also for a device or a
            width that it does not serve.
    """
    op = "sparse_attention_bwd"
    if out.dim() != 3:
        raise invalid(op, "out", "[T, H, d_v]", tuple(out.shape))
    _check(op, q, kv, indices, sinks, out.shape[-1], impl)
    require_backward(backward)
    shape = (*q.shape[:2], out.shape[-1])
    for name, value in (("out", out), ("grad_out", grad_out)):
        if value.shape != shape or value.dtype != q.dtype:
            raise invalid(op, name, f"{q.dtype} {shape}", f"{value.dtype} {tuple(value.shape)}")
    if lse.dtype != torch.float32 or lse.shape != q.shape[:2]:
        raise invalid(op, "lse", f"float32 {tuple(q.shape[:2])}", f"{lse.dtype} {tuple(lse.shape)}")
    require_device(op, q.device, grad_out=grad_out, out=out, lse=lse)
    # Autograd hands over any layout, and the order of a library's sums follows it.
    arguments = (grad_out.contiguous(), q, kv, indices, out, lse, sinks, scale)
    if backward == "cudnn":
        from consistent_kernels.sparse_attention.cudnn import sparse_attention_bwd_cudnn

        return sparse_attention_bwd_cudnn(*arguments)
    if impl == "reference":
        check_indices(indices, kv.shape[0], op=op)
        return sparse_attention_bwd_ref(*arguments)
    require_cuda(op, impl, q)
    from consistent_kernels.sparse_attention.triton_bwd import sparse_attention_bwd_triton

    return sparse_attention_bwd_triton(*arguments)
