"""Public sparse top-k: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.sparse_topk.reference import sparse_topk_ref
from consistent_kernels.sparse_topk.spec import IMPLEMENTATIONS, MAX_K

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("sparse_topk(Tensor scores, Tensor starts, Tensor ends, int k, str impl) -> Tensor")
# An op of its own: Inductor cannot lower one whose only written argument is optional and absent.
_LIBRARY.define(
    "sparse_topk_with_tickets(Tensor scores, Tensor starts, Tensor ends, int k, "
    "Tensor(a!) tickets, str impl) -> Tensor"
)


def _sparse_topk(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    tickets: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    count("sparse_topk", impl)
    if impl == "reference":
        wrong = (starts < 0) | (ends < starts) | (ends > scores.shape[1])
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            given = f"{int(starts[row])}, {int(ends[row])} in row {row}"
            expected = f"0 <= start <= end <= {scores.shape[1]}"
            raise invalid("sparse_topk", "starts, ends", expected, given)
        return sparse_topk_ref(scores, starts, ends, k)
    require_cuda("sparse_topk", impl, scores)
    if impl == "cuda":
        from consistent_kernels.sparse_topk.cuda import sparse_topk_select

        return sparse_topk_select(scores, starts, ends, k, tickets)
    from consistent_kernels.sparse_topk.triton import sparse_topk_fwd

    return sparse_topk_fwd(scores, starts, ends, k, tickets)


def _without_tickets(
    scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int, impl: str
) -> torch.Tensor:
    return _sparse_topk(scores, starts, ends, k, None, impl)


_LIBRARY.impl("sparse_topk", _without_tickets, "CompositeExplicitAutograd")
_LIBRARY.impl("sparse_topk_with_tickets", _sparse_topk, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::sparse_topk", lib=_LIBRARY)
@torch.library.register_fake("consistent_kernels::sparse_topk_with_tickets", lib=_LIBRARY)
def _(
    scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int, *_: object
) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


def sparse_topk_tickets(max_rows: int, device: torch.device | str) -> torch.Tensor:
    """Return the counters that let `sparse_topk` of "triton" run as a single launch.

    Zero before and after every call; calls that may overlap (two streams) need one each. Without
    them a call makes its own, which costs one more small launch.
    """
    from consistent_kernels.sparse_topk.triton import TICKET_PAD

    return torch.zeros((max_rows, TICKET_PAD), dtype=torch.int32, device=device)


def sparse_topk(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *,
    impl: str,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of the k best-scored keys of every row, in descending position, -1 last.

    Best by one total order: the score (-0.0 = +0.0; NaN below -inf), then the larger position. A
    row with at most k positions gets all of them. Nothing is differentiable here.

    Source: DSA, DeepSeek-V3.2 report, arXiv 2512.02556; the 64-bit key makes ties and order
    defined, which vLLM's top_k_per_row_{prefill,decode} leave to thread order.

    Args:
        scores: [R, N] fp32, unit column stride. Columns outside a row's range may hold anything.
        starts, ends: [R] int32 or int64, 0 <= start <= end <= N: the columns of the row's own
            request that it may see. Positions count from `start`, so no batch offset enters.
        k: 1 to 2048.
        impl: "reference" (any device), "triton" (CUDA) or "cuda" (SM90 and later, by NVRTC).
        tickets: from `sparse_topk_tickets`, at least R rows; for "triton", and for the rows that
            "cuda" leaves to it.

    Returns:
        [R, k] int32 positions inside the request.

    Numerics:
        Integer arithmetic on the bits of the scores: one answer, whatever the schedule.

    Raises:
        InvalidInputError: shape, dtype, layout or device; with "reference" also a range outside
            the scores ("triton" cuts it to them, for a check would cost a synchronization).
        UnsupportedError: unknown impl.
    """
    op = "sparse_topk"
    require_implementation(op, impl, IMPLEMENTATIONS)
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise invalid(op, "scores", "2-D float32", f"{scores.dim()}-D {scores.dtype}")
    if scores.stride(1) != 1 and scores.shape[1] > 1:
        raise invalid(op, "scores", "of unit column stride", scores.stride())
    if not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise invalid(op, "k", f"an integer from 1 to {MAX_K}", k)
    rows = scores.shape[0]
    for name, border in (("starts", starts), ("ends", ends)):
        if border.shape != (rows,) or border.dtype not in (torch.int32, torch.int64):
            given = f"{border.dtype} of shape {tuple(border.shape)}"
            raise invalid(op, name, f"int32 or int64 of shape ({rows},)", given)
        if border.device != scores.device:
            raise invalid(op, name, f"on {scores.device}", border.device)
    if tickets is not None and (
        tickets.dim() != 2
        or tickets.shape[0] < rows
        or tickets.dtype != torch.int32
        or tickets.device != scores.device
    ):
        given = f"{tickets.dtype} of shape {tuple(tickets.shape)} on {tickets.device}"
        expected = f"int32 with at least {rows} rows on {scores.device}"
        raise invalid(op, "tickets", expected, given, "Use sparse_topk_tickets")
    if tickets is None:
        return torch.ops.consistent_kernels.sparse_topk(scores, starts, ends, k, impl)
    return torch.ops.consistent_kernels.sparse_topk_with_tickets(
        scores, starts, ends, k, tickets, impl
    )
