"""Public grouped linear: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.grouped_linear.spec import IMPLEMENTATIONS
from consistent_kernels.linear.reference import linear_ref

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("grouped_linear(Tensor x, Tensor weight, str impl) -> Tensor")


def _grouped_linear(x: torch.Tensor, weight: torch.Tensor, impl: str) -> torch.Tensor:
    count("grouped_linear", impl)
    if impl == "reference":
        parts = [
            linear_ref(x[:, group], weight[group].float().contiguous(), None, x.dtype)
            for group in range(weight.shape[0])
        ]
        return torch.stack(parts, dim=1)
    require_cuda("grouped_linear", impl, x)
    if impl == "deep_gemm":
        from consistent_kernels.grouped_linear import deep_gemm

        return deep_gemm.grouped_linear_fwd(x, weight)
    from consistent_kernels.grouped_linear.triton import grouped_linear_fwd

    return grouped_linear_fwd(x, weight)


_LIBRARY.impl("grouped_linear", _grouped_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::grouped_linear", lib=_LIBRARY)
def _(x: torch.Tensor, weight: torch.Tensor, impl: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]))


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if x.dim() != 3 or x.dtype not in _DTYPES:
        raise invalid(
            op, "x", "[T, G, K] of bfloat16, float16 or float32", f"{tuple(x.shape)} of {x.dtype}"
        )
    groups, inner = x.shape[1:]
    if inner == 0 or groups == 0:
        expected = "[T, G, K] with at least one column and one group"
        raise invalid(op, "x", expected, tuple(x.shape))
    fits = weight.dim() == 3 and weight.shape[0] == groups and weight.shape[2] == inner
    if not fits or weight.dtype != x.dtype or not weight.is_contiguous():
        raise invalid(
            op,
            "weight",
            f"contiguous {x.dtype} of shape ({groups}, N, {inner})",
            f"{weight.dtype} of {tuple(weight.shape)}, contiguous={weight.is_contiguous()}",
        )
    if weight.device != x.device:
        raise invalid(op, "weight", f"on {x.device}", weight.device)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, *, impl: str) -> torch.Tensor:
    """y[t, g] = round(x[t, g] W[g]^T), fp32 accumulation over ascending K, one rounding.

    Source: the output projection `wo_a` of DeepSeek-V4, and the projections of MLA that are
    absorbed into queries and outputs, one a head.

    Args:
        x: [T, G, K], bf16, fp16 or fp32; the last dimension packed, others strided at will.
        weight: [G, N, K] contiguous, the dtype of x.
        impl: "reference" (any device), "triton" (CUDA) or "deep_gemm" (sm_90 and sm_100, bf16; its
            first call of a shape probes it, which a graph cannot capture).

    Returns:
        [T, G, N] contiguous, dtype of x.

    Numerics:
        A row's bits depend on that row, its group and the weight alone.

    Raises:
        InvalidInputError: shape, dtype, layout or device.
        UnsupportedError: unknown impl, or a dtype that it does not take.
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is not installed.
        NumericsError: "deep_gemm" where its probe finds rows that follow the batch.
    """
    _check("grouped_linear", x, weight, impl)
    return torch.ops.consistent_kernels.grouped_linear(x, weight, impl)


def grouped_linear_bwd(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `grouped_linear` by PyTorch's batched GEMM, fp32 accumulation.

    Args:
        grad_y: [T, G, N]; x: [T, G, K]; weight: [G, N, K].

    Returns:
        (grad_x [T, G, K] in the dtype of x, grad_weight [G, N, K] fp32).
    """
    _check("grouped_linear_bwd", x, weight, impl)
    expected = (x.shape[0], weight.shape[0], weight.shape[1])
    if tuple(grad_y.shape) != expected or not grad_y.is_floating_point():
        given = f"{grad_y.dtype} of shape {tuple(grad_y.shape)}"
        raise invalid("grouped_linear_bwd", "grad_y", f"floats of shape {expected}", given)
    require_device("grouped_linear_bwd", x.device, grad_y=grad_y)
    g, rows = grad_y.contiguous().transpose(0, 1), x.transpose(0, 1)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and grad_y.dtype == x.dtype:
        grad_x = torch.bmm(g, weight)
        grad_weight = torch.bmm(g.transpose(1, 2), rows, out_dtype=torch.float32)
    else:
        grad_x = torch.bmm(g.float(), weight.float()).to(x.dtype)
        grad_weight = torch.bmm(g.float().transpose(1, 2), rows.float())
    return grad_x.transpose(0, 1).contiguous(), grad_weight
