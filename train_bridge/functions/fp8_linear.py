"""Autograd for the FP8 linear: straight-through, onto the master."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.fp8_linear import fp8_gemm, fp8_linear_bwd
from consistent_kernels.fp8_linear.spec import quantization_of
from consistent_kernels.quantization import quantize_rows
from train_bridge.functions.ambient import OpFunction


class Fp8LinearFunction(OpFunction):
    """y = fp8_linear(x, values, scale). Gradients: x in its dtype, weight in the master's dtype.

    `values, scale` are `quantize_weight(master)` of the same weight version; they carry no
    gradient. What is kept for the backward is the quantized x, about half of its bf16 form: the
    gradient of the weight reads what the forward multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
        scale_format: str,
        impl: str,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        quantized = quantize_rows(
            x,
            scale_format=scale_format,
            impl=quantization_of(impl),
            tma_aligned=impl == "deep_gemm",
        )
        ctx.save_for_backward(*quantized, values, scale)
        ctx.impl = impl
        ctx.x_dtype, ctx.master_dtype = x.dtype, master.dtype
        return fp8_gemm(
            *quantized,
            values,
            scale,
            scale_format=scale_format,
            impl=impl,
            out_dtype=x.dtype if out_dtype is None else out_dtype,
        )

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        grad_x, grad_weight = fp8_linear_bwd(
            grad_y,
            *ctx.saved_tensors,
            needs=needs,
            weight_dtype=ctx.master_dtype,
            impl=ctx.impl,
        )
        if grad_x is not None:
            grad_x = grad_x.to(ctx.x_dtype)
        return grad_x, grad_weight, None, None, None, None, None
