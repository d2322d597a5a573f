"""Public attention: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.attention.arguments import (
    check_cache,
    check_heads,
    check_impl,
    check_index,
    check_plan,
)
from consistent_kernels.attention.cpu import CPU_IMPLEMENTATIONS, attend, page_rows
from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.plan import AttentionPlan, KeyLayout, add_batch, build_plan
from consistent_kernels.attention.reference import attention_bwd_ref, write_kv_ref
from consistent_kernels.counters import count
from consistent_kernels.errors import invalid

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "float scale, int? sliding_window, int key_split, int max_seq_len, str impl) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_lens, Tensor cu_seqlens_q, float scale, int? sliding_window, int key_split, "
    "int max_query_len, int max_seq_len, str impl) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "str impl) -> ()"
)


def _parameters(
    q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None, key_split: int
) -> AttentionParameters:
    return AttentionParameters(q.shape[1], k.shape[-2], q.shape[2], scale, window, key_split)


def plan_attention(
    cu_seqlens_q: torch.Tensor,
    *,
    params: AttentionParameters,
    num_tokens: int,
    impl: str,
    cu_seqlens_k: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
) -> AttentionPlan:
    """Compute once per batch what no layer's q, k or v enters; pass it to every layer.

    Give `cu_seqlens_k` for `attention_varlen`, or `seq_lens`, `block_table` and `k_cache` (any
    layer's, for its layout) for `attention_paged`. Reads the lengths on the host. `triton` needs no
    plan to serve; in training it spares the backward that read in every layer.

    Args:
        cu_seqlens_q: [B + 1] int32 or int64.
        params: of the layers.
        num_tokens: rows of q, padding included.
        impl: as in `attention_varlen`.
    """
    check_impl("plan_attention", impl)
    check_index("plan_attention", "cu_seqlens_q", cu_seqlens_q, 1, None)
    batch = cu_seqlens_q.shape[0] - 1
    host_q = cu_seqlens_q.to("cpu", torch.int64)
    if cu_seqlens_k is not None:
        check_index("plan_attention", "cu_seqlens_k", cu_seqlens_k, 1, batch + 1)
        host_k = cu_seqlens_k.to("cpu", torch.int64)
        layout = KeyLayout(host_k[1:] - host_k[:-1], first_key=host_k[:-1])
    elif seq_lens is None or block_table is None or k_cache is None:
        raise invalid(
            "plan_attention",
            "keys",
            "cu_seqlens_k, or seq_lens, block_table and k_cache",
            "only some of these",
        )
    else:
        check_index("plan_attention", "seq_lens", seq_lens, 1, batch)
        check_index("plan_attention", "block_table", block_table, 2, batch)
        check_cache("plan_attention", "k_cache", k_cache, impl)
        layout = KeyLayout(
            seq_lens.to("cpu", torch.int64),
            block_table=block_table.to("cpu", torch.int64),
            block_size=k_cache.shape[1],
            block_rows=page_rows(k_cache)[1],
        )
    plan = build_plan(host_q, layout, params, num_tokens, with_tiles=impl == "reference")
    return add_batch(plan, host_q, layout) if impl == "llvm" else plan


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    key_split: int,
    max_seq_len: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count("attention_varlen", impl)
    params = _parameters(q, k, scale, sliding_window, key_split)
    if impl in CPU_IMPLEMENTATIONS:
        plan = plan_attention(
            cu_seqlens_q,
            params=params,
            num_tokens=q.shape[0],
            impl=impl,
            cu_seqlens_k=cu_seqlens_k,
        )
        return attend(q, k, v, plan, impl)
    if impl == "flash_attn":
        from consistent_kernels.attention.flash_attn import attention_varlen_fwd
    else:
        from consistent_kernels.attention.triton import attention_varlen_fwd
    return attention_varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, params, max_seq_len)


def _paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    key_split: int,
    max_query_len: int,
    max_seq_len: int,
    impl: str,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    count("attention_paged", impl)
    params = _parameters(q, k_cache, scale, sliding_window, key_split)
    if impl in CPU_IMPLEMENTATIONS:
        plan = plan_attention(
            cu_seqlens_q,
            params=params,
            num_tokens=q.shape[0],
            impl=impl,
            seq_lens=seq_lens,
            block_table=block_table,
            k_cache=k_cache,
        )
        result = attend(q, page_rows(k_cache)[0], page_rows(v_cache)[0], plan, impl)
    else:
        keys = (k_cache, v_cache, block_table, seq_lens)
        if impl == "flash_attn":
            from consistent_kernels.attention import flash_attn

            return flash_attn.attention_paged_fwd(
                q, *keys, cu_seqlens_q, params, max_query_len, max_seq_len, out
            )
        from consistent_kernels.attention.triton import attention_paged_fwd

        result = attention_paged_fwd(q, *keys, cu_seqlens_q, params, max_seq_len)
    if out is not None:
        out.copy_(result[0])
    return result


def _write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    impl: str,
) -> None:
    count("write_kv", impl)
    if impl in CPU_IMPLEMENTATIONS:
        k_rows, step = page_rows(k_cache)
        rows = slot_mapping.to(torch.int64)
        if step != k_cache.shape[1]:
            block = torch.div(rows, k_cache.shape[1], rounding_mode="floor")
            rows = rows + block * (step - k_cache.shape[1])
        write_kv_ref(k, v, k_rows, page_rows(v_cache)[0], rows)
        return
    from consistent_kernels.attention.triton import write_kv_fwd

    write_kv_fwd(k, v, k_cache, v_cache, slot_mapping)


_LIBRARY.impl("attention_varlen", _varlen, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_paged", _paged, "CompositeExplicitAutograd")
_LIBRARY.impl("write_kv", _write_kv, "CompositeExplicitAutograd")


def _outputs_like(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("consistent_kernels::attention_varlen", lib=_LIBRARY)
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs_like(q)


@torch.library.register_fake("consistent_kernels::attention_paged", lib=_LIBRARY)
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs_like(q)


@torch.library.register_fake("consistent_kernels::write_kv", lib=_LIBRARY)
def _(k: torch.Tensor, *_: object) -> None:
    return None


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    params: AttentionParameters,
    impl: str,
    plan: AttentionPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over packed sequences; the queries are the last rows of each.

    out = round(sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)), s_j = fp32(q . k_j) * scale, with
    exp(.) rounded to the value dtype in the numerator only. Tiles of 64 keys in ascending order,
    splits of `params.key_split` keys from position 0 merged in ascending order; see `spec.SPEC`.

    Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867; tiles and splits as in
    FlashAttention-2 and Flash-Decoding, with borders that only a key's position decides.

    Args:
        q: [T, Hq, D] bf16, fp16 or (reference only) fp32.
        k, v: [Tk, Hk, D] in the dtype of q.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 or int64 row borders.
        params: heads, scale, window, split.
        impl: "reference" (CPU), "llvm" (x86 CPUs, bf16), "triton" (CUDA) or "flash_attn" (sm_90,
            no sliding window; needs vLLM's CUDA wheel).
        plan: from `plan_attention`; must come from the same borders. Not under torch.compile.

    Returns:
        (out [T, Hq, D] in the dtype of q, lse [T, Hq] fp32). A row beyond the sequences, or of one
        without keys, is 0 with lse -inf ("flash_attn" leaves rows beyond the sequences undefined).

    Numerics:
        A row's bits depend on its query, the keys and values it sees, and its position: batch-,
        phase-, chunk-, page- and padding-invariant; equal to `attention_paged`.

    Raises:
        InvalidInputError: shape, dtype, device, layout, more queries than keys.
        UnsupportedError: unknown impl.
    """
    op = "attention_varlen"
    check_heads(op, q, k, v, params, impl, key_dims=3)
    check_index(op, "cu_seqlens_q", cu_seqlens_q, 1, None)
    check_index(op, "cu_seqlens_k", cu_seqlens_k, 1, cu_seqlens_q.shape[0])
    if plan is not None:
        check_plan(op, plan, params, q)
    if plan is not None and impl in CPU_IMPLEMENTATIONS:
        count(op, impl)
        with torch.no_grad():
            return attend(q, k, v, plan, impl)
    return torch.ops.consistent_kernels.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, params.scale, params.sliding_window,
        params.key_split, k.shape[0] if plan is None else plan.max_seq_len, impl,
    )  # fmt: skip


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    params: AttentionParameters,
    impl: str,
    max_query_len: int,
    max_seq_len: int,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of new queries over keys in pages; bit-equal to `attention_varlen`.

    Args:
        q: [T, Hq, D], the queries of all requests; rows beyond cu_seqlens_q[-1] are padding.
        k_cache, v_cache: [blocks, block_size, Hk, D], block_size a multiple of 16, or of 8
            on a CPU; slots that no query sees may hold anything. The reference also takes fp32
            pages.
        block_table: [B, max blocks] int32; entries beyond a request's keys may hold anything.
        seq_lens: [B] keys of each request, this step's included; 0 for a padded row.
        cu_seqlens_q: [B + 1] row borders.
        params, impl: as in `attention_varlen`.
        max_query_len, max_seq_len: upper bounds known on the host; they shape the launch, no bits.
        plan: from `plan_attention`, for this step.
        out: [T, Hq, D] contiguous to write the result into. Not under torch.compile.

    Returns, Numerics, Raises: as `attention_varlen`; "flash_attn" takes pages of 16, 32 or 64 keys.
    """
    op = "attention_paged"
    check_heads(op, q, k_cache, v_cache, params, impl, key_dims=4)
    check_cache(op, "k_cache", k_cache, impl)
    if v_cache.stride() != k_cache.stride():
        raise invalid(op, "v_cache", f"of strides {k_cache.stride()}", v_cache.stride())
    check_index(op, "cu_seqlens_q", cu_seqlens_q, 1, None)
    batch = cu_seqlens_q.shape[0] - 1
    check_index(op, "seq_lens", seq_lens, 1, batch)
    check_index(op, "block_table", block_table, 2, batch)
    if out is not None and (
        out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()
    ):
        raise invalid(op, "out", f"contiguous {q.dtype} {tuple(q.shape)}", tuple(out.shape))
    if plan is not None and impl in CPU_IMPLEMENTATIONS:
        check_plan(op, plan, params, q)
        k_rows, step = page_rows(k_cache)
        if plan.block_rows != step:
            raise invalid(op, "plan", f"made for pages {step} rows apart", plan.block_rows)
        count(op, impl)
        with torch.no_grad():
            result = attend(q, k_rows, page_rows(v_cache)[0], plan, impl)
        if out is not None:
            out.copy_(result[0])
        return result
    if out is not None:
        with torch.no_grad():
            return _paged(
                q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, params.scale,
                params.sliding_window, params.key_split, max_query_len, max_seq_len, impl, out,
            )  # fmt: skip
    return torch.ops.consistent_kernels.attention_paged(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q,
        params.scale, params.sliding_window, params.key_split, max_query_len, max_seq_len, impl,
    )  # fmt: skip


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    impl: str,
) -> None:
    """Copy this step's keys and values into their slots; slot -1 is skipped.

    Args:
        k, v: [T, Hk, D]; k_cache, v_cache: [blocks, block_size, Hk, D].
        slot_mapping: [T] int32 or int64, block * block_size + offset.
        impl: "reference" or "llvm" (the same copy), "triton" or "flash_attn" (the same kernel).

    Raises:
        InvalidInputError: shape, dtype, layout.
        UnsupportedError: unknown impl.
    """
    op = "write_kv"
    check_impl(op, impl)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 3 or cache.dim() != 4 or x.shape[1:] != cache.shape[2:]:
            raise invalid(op, name, f"of shape [T, *{tuple(cache.shape[2:])}]", tuple(x.shape))
        wide = impl == "reference" and cache.dtype == torch.float32
        if x.dtype != cache.dtype and not wide:
            raise invalid(op, name, cache.dtype, x.dtype)
    if k.shape != v.shape or k_cache.stride() != v_cache.stride():
        raise invalid(op, "v", f"shaped and paged like k, {tuple(k.shape)}", tuple(v.shape))
    check_cache(op, "k_cache", k_cache, impl)
    check_index(op, "slot_mapping", slot_mapping, 1, k.shape[0])
    torch.ops.consistent_kernels.write_kv(k, v, k_cache, v_cache, slot_mapping, impl)


def attention_varlen_bwd(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    params: AttentionParameters,
    impl: str,
    plan: AttentionPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention_varlen`: PyTorch in fp32 on CPU, FlashAttention 2's on CUDA.

    On CUDA they repeat bit for bit only under `torch.use_deterministic_algorithms(True)`.

    Args:
        grad_out, q, out: [T, Hq, D]; k, v: [Tk, Hk, D]; lse: [T, Hq] fp32, as the forward gave it.
        plan: spares reading the borders on the host.

    Returns:
        (grad_q, grad_k, grad_v), shaped and typed like q, k, v.
    """
    op = "attention_varlen_bwd"
    check_heads(op, q, k, v, params, impl, key_dims=3)
    if grad_out.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:2]:
        got = f"{tuple(grad_out.shape)}, {tuple(out.shape)}, {tuple(lse.shape)}"
        raise invalid(op, "grad_out, out, lse", f"shaped like q {tuple(q.shape)}", got)
    if plan is None:
        plan = plan_attention(
            cu_seqlens_q,
            params=params,
            num_tokens=q.shape[0],
            impl="triton",  # no tiles: the backward needs the borders only
            cu_seqlens_k=cu_seqlens_k,
        )
    else:
        check_plan(op, plan, params, q)
    count(op, impl)
    with torch.no_grad():
        if q.device.type == "cuda":
            from consistent_kernels.attention.flash_bwd import attention_varlen_bwd_flash

            cu = (cu_seqlens_q, cu_seqlens_k)
            return attention_varlen_bwd_flash(
                grad_out, q, k, v, out, lse, *cu, params, plan.max_seq_len
            )
        return attention_bwd_ref(grad_out, q, k, v, out, lse, plan.sequences, params)
