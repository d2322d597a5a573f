"""Public token log-probs: validate, take the named implementation, call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid
from consistent_kernels.linear import linear, linear_bwd, linear_packed, pack_weight
from consistent_kernels.token_logprobs.arguments import (
    as_columns,
    banned_mask,
    check_ids,
    check_impl,
    check_logits,
    check_values,
    temperature_rows,
    valid_width,
)
from consistent_kernels.token_logprobs.reference import (
    grad_logits_ref,
    token_logprobs_from_logits_ref,
)
from consistent_kernels.token_logprobs.spec import BACKWARD_ROWS, STREAM_ROWS

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "token_logprobs_from_logits(Tensor logits, Tensor ids, Tensor temperature, int valid_vocab, "
    "Tensor? banned, bool entropy, str impl) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "token_logprobs(Tensor hidden, Tensor weight, Tensor ids, Tensor temperature, "
    "int valid_vocab, Tensor? banned, bool entropy, str impl, str linear_impl) "
    "-> (Tensor, Tensor, Tensor)"
)

_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TokenLogprobs(NamedTuple):
    """Log-probs of given tokens.

    Attributes:
        logprob: z[id] - logsumexp, fp32, of the shape of `ids`.
        logsumexp: [T] fp32.
        entropy: [T] fp32, or None where it was not asked for.
    """

    logprob: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None


def _score(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    impl: str,
) -> _Result:
    columns = as_columns(ids)
    check_values("token_logprobs", columns, temperature, logits.shape[1])
    if impl == "reference":
        score = token_logprobs_from_logits_ref
    elif impl == "llvm":
        from consistent_kernels.token_logprobs.llvm import token_logprobs_llvm as score
    else:
        from consistent_kernels.token_logprobs.triton import token_logprobs_fwd as score
    logprob, lse, uncertainty = score(logits, columns, temperature, valid_vocab, banned, entropy)
    if uncertainty is None:
        uncertainty = lse.new_empty(0)
    return logprob.reshape(ids.shape), lse, uncertainty


def _token_logprobs_from_logits(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    impl: str,
) -> _Result:
    count("token_logprobs", impl)
    return _score(logits, ids, temperature, valid_vocab, banned, entropy, impl)


def _head(weight: torch.Tensor, impl: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return hidden states -> fp32 logits, with the weight packed once where `impl` packs it."""
    packed = pack_weight(weight, impl=impl) if impl == "llvm" else None
    if packed is None:
        return lambda hidden: linear(hidden, weight, impl=impl, out_dtype=torch.float32)
    return lambda hidden: linear_packed(hidden, packed, out_dtype=torch.float32)


def _token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    impl: str,
    linear_impl: str,
) -> _Result:
    count("token_logprobs", impl)
    parts = []
    head = _head(weight, linear_impl)
    for start in range(0, max(hidden.shape[0], 1), STREAM_ROWS[impl]):
        rows = slice(start, start + STREAM_ROWS[impl])
        logits = head(hidden[rows])
        parts.append(
            _score(logits, ids[rows], temperature[rows], valid_vocab, banned, entropy, impl)
        )
    logprob, lse, uncertainty = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprob, lse, uncertainty


_LIBRARY.impl(
    "token_logprobs_from_logits", _token_logprobs_from_logits, "CompositeExplicitAutograd"
)
_LIBRARY.impl("token_logprobs", _token_logprobs, "CompositeExplicitAutograd")


def _fake(ids: torch.Tensor, temperature: torch.Tensor, entropy: bool) -> _Result:
    return (
        ids.new_empty(ids.shape, dtype=torch.float32),
        temperature.new_empty(temperature.shape),
        temperature.new_empty(temperature.shape if entropy else (0,)),
    )


@torch.library.register_fake("consistent_kernels::token_logprobs_from_logits", lib=_LIBRARY)
def _(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    impl: str,
) -> _Result:
    return _fake(ids, temperature, entropy)


@torch.library.register_fake("consistent_kernels::token_logprobs", lib=_LIBRARY)
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    impl: str,
    linear_impl: str,
) -> _Result:
    return _fake(ids, temperature, entropy)


def _check_hidden(op: str, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise invalid(
            op,
            "hidden, weight",
            "of shapes (T, H), (V, H)",
            f"{tuple(hidden.shape)}, {tuple(weight.shape)}",
        )


def _named(result: _Result, entropy: bool) -> TokenLogprobs:
    logprob, lse, uncertainty = result
    return TokenLogprobs(logprob, lse, uncertainty if entropy else None)


def token_logprobs_from_logits(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    entropy: bool = True,
    impl: str,
    partials: torch.Tensor | None = None,
) -> TokenLogprobs:
    """logprob = z[id] - logsumexp(z), z = logit / temperature; fp32.

    logsumexp: over tiles of 1024 ids counted from 0, per tile (max, sum of exp(z - max)) by a
    pairwise tree, tiles merged in ascending order. The last tile is padded with -inf.

    Args:
        logits: [T, V] fp32.
        ids: [T] or [T, k] int32 or int64, in [0, V).
        temperature: one number, or [T] float; 0 (greedy) means 1. Divides in fp32.
        valid_vocab: ids from here on are -inf (padding rows of lm_head); V by default.
        banned: ids [n] or a bool mask [V] that are -inf too.
        entropy: whether to compute the entropy; no other bit depends on this.
        impl: "reference" (any device), "llvm" (x86 CPUs) or "triton" (CUDA).
        partials: what `tile_partials` of the implementation ("llvm" or "triton") gave for these
            logits and temperatures, so that it is not computed again; without masks and entropy.

    Returns:
        TokenLogprobs(logprob of the shape of ids, logsumexp [T], entropy [T] or None).

    Numerics:
        A row's bits depend on that row alone, and not on how many ids are asked for. Equal to
        `token_logprobs` of the hidden states that gave the logits. NaN or +inf among the valid
        logits gives NaN; a masked id has log-prob -inf; a row with no id left gives NaN.

    Raises:
        InvalidInputError: shape, dtype, temperature or (on CPU) an id outside [0, V).
        UnsupportedError: unknown impl.
    """
    op = "token_logprobs_from_logits"
    check_impl(op, impl)
    check_logits(op, logits)
    check_ids(op, ids, logits.shape[0])
    by = temperature_rows(op, temperature, logits.shape[0], logits.device)
    valid = valid_width(op, valid_vocab, logits.shape[1])
    mask = banned_mask(op, banned, logits.shape[1], logits.device)
    if partials is not None:
        return _from_partials(op, logits, ids, by, partials, (impl, valid, mask, entropy))
    result = torch.ops.consistent_kernels.token_logprobs_from_logits(
        logits, ids, by, valid, mask, entropy, impl
    )
    return _named(result, entropy)


def _from_partials(
    op: str,
    logits: torch.Tensor,
    ids: torch.Tensor,
    by: torch.Tensor,
    partials: torch.Tensor,
    options: tuple[str, int, torch.Tensor | None, bool],
) -> TokenLogprobs:
    impl, vocab = options[0], logits.shape[1]
    if impl == "triton":
        from consistent_kernels.token_logprobs.triton import partials_shape
        from consistent_kernels.token_logprobs.triton import token_logprobs_fwd as score
    else:
        from consistent_kernels.token_logprobs.llvm import partials_shape
        from consistent_kernels.token_logprobs.llvm import token_logprobs_llvm as score
    shape = partials_shape(*logits.shape)
    if impl == "reference" or options[1:] != (vocab, None, False) or partials.shape != shape:
        raise invalid(
            op,
            "partials",
            f"of shape {shape} for impl 'llvm' or 'triton' without masks and entropy",
            f"of shape {tuple(partials.shape)} for {options}",
        )
    count("token_logprobs", impl)
    columns = as_columns(ids)
    check_values("token_logprobs", columns, by, vocab)
    logprob, lse, _ = score(logits, columns, by, vocab, None, False, partials)
    return TokenLogprobs(logprob.reshape(ids.shape), lse, None)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    entropy: bool = True,
    impl: str,
    linear_impl: str | None = None,
) -> TokenLogprobs:
    """lm_head and log-prob in one: streams over tiles of rows, so [T, V] never exists.

    Args:
        hidden: [T, H], model dtype.
        weight: [V, H], from `linear.prepare_weight(..., impl=linear_impl)`.
        ids, temperature, valid_vocab, banned, entropy, impl: as `token_logprobs_from_logits`.
        linear_impl: implementation of `linear`; `impl` by default.

    Returns:
        TokenLogprobs, the bits of
        `token_logprobs_from_logits(linear(hidden, weight, out_dtype=float32), ids, ...)`.

    Raises:
        InvalidInputError, UnsupportedError: as `token_logprobs_from_logits` and `linear`.
    """
    op = "token_logprobs"
    check_impl(op, impl)
    _check_hidden(op, hidden, weight)
    check_ids(op, ids, hidden.shape[0])
    by = temperature_rows(op, temperature, hidden.shape[0], hidden.device)
    valid = valid_width(op, valid_vocab, weight.shape[0])
    mask = banned_mask(op, banned, weight.shape[0], hidden.device)
    result = torch.ops.consistent_kernels.token_logprobs(
        hidden, weight, ids, by, valid, mask, entropy, impl, linear_impl or impl
    )
    return _named(result, entropy)


def token_logprobs_from_logits_bwd(
    grad: TokenLogprobs,
    logits: torch.Tensor,
    ids: torch.Tensor,
    saved: TokenLogprobs,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    impl: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gradient of `token_logprobs_from_logits`: PyTorch, or one Triton pass for one id a row.

    dlogit = (sum_k g_k (onehot_k - p) + g_L p - g_H p (log p + H)) / temperature. Masked ids are
    constants: they receive 0.

    Args:
        grad: gradients of (logprob, logsumexp, entropy), each may be None.
        logits, ids, temperature, valid_vocab, banned: of the forward.
        saved: the forward's result; entropy only where it has a gradient.
        dtype: of the result; computed in fp32, rounded once.

    Returns:
        [T, V] in `dtype`.
    """
    op = "token_logprobs_from_logits_bwd"
    check_impl(op, impl)
    check_logits(op, logits)
    check_ids(op, ids, logits.shape[0])
    if grad.entropy is not None and saved.entropy is None:
        raise invalid(op, "saved.entropy", "the forward's, since it has a gradient", None)
    rows = logits.shape[0]
    columns = as_columns(ids)
    options = (
        temperature_rows(op, temperature, rows, logits.device),
        valid_width(op, valid_vocab, logits.shape[1]),
        banned_mask(op, banned, logits.shape[1], logits.device),
        (saved.logsumexp, saved.entropy),
    )
    if impl == "triton" and columns.shape[1] == 1:
        from consistent_kernels.token_logprobs.triton_bwd import grad_logits_bwd

        logprob = None if grad.logprob is None else grad.logprob.reshape(rows)
        grads = (logprob, grad.logsumexp, grad.entropy)
        return grad_logits_bwd(logits, columns[:, 0], *options, grads, dtype)
    logprob = None if grad.logprob is None else grad.logprob.reshape(columns.shape)
    grads = (logprob, grad.logsumexp, grad.entropy)
    return grad_logits_ref(logits, columns, *options, grads).to(dtype)


def token_logprobs_bwd(
    grad: TokenLogprobs,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    saved: TokenLogprobs,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
    impl: str,
    linear_impl: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `token_logprobs`: logits are computed again, one tile of rows at a time.

    Args:
        grad: gradients of (logprob, logsumexp, entropy), each may be None.
        hidden, weight, ids, temperature, valid_vocab, banned, impl, linear_impl: of the forward.
        saved: the forward's result; entropy only where it has a gradient.
        needs: which of (hidden, weight) want a gradient.

    Returns:
        (grad_hidden [T, H] in the dtype of hidden, grad_weight [V, H] fp32), None where not needed.
        grad_weight is the sum over row tiles in ascending order. Where the weight is bf16 or fp16
        (CUDA), the gradient of the logits is rounded to it before both products.
    """
    _check_hidden("token_logprobs_bwd", hidden, weight)
    by = temperature_rows("token_logprobs_bwd", temperature, hidden.shape[0], hidden.device)
    mask = banned_mask("token_logprobs_bwd", banned, weight.shape[0], hidden.device)
    forward, backward = linear_impl or impl, (needs[0], needs[1], False)
    grads_hidden = []
    grad_weight = None
    on_cpu = impl in ("reference", "llvm")
    dtype = torch.float32 if on_cpu else weight.dtype
    head = _head(weight, forward)
    if on_cpu:
        weight = weight.float()
    for start in range(0, max(hidden.shape[0], 1), BACKWARD_ROWS[impl]):
        rows = slice(start, start + BACKWARD_ROWS[impl])
        logits = head(hidden[rows])
        grad_logits = token_logprobs_from_logits_bwd(
            _rows_of(grad, rows),
            logits,
            ids[rows],
            _rows_of(saved, rows),
            temperature=by[rows],
            valid_vocab=valid_vocab,
            banned=mask,
            impl=impl,
            dtype=dtype,
        )
        del logits
        grad_hidden, grad_weight, _ = linear_bwd(
            grad_logits, hidden[rows], weight, needs=backward, impl=forward, add_to=grad_weight
        )
        grads_hidden.append(grad_hidden)
    return torch.cat(grads_hidden) if needs[0] else None, grad_weight


def _rows_of(result: TokenLogprobs, rows: slice) -> TokenLogprobs:
    return TokenLogprobs(*(None if part is None else part[rows] for part in result))
