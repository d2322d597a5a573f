"""The same bits from vectors of 512 and of 256 bits, and from a CPU without bf16 instructions.

Kernels are compiled for Haswell (AVX2 and FMA, no AVX-512) and run here beside this CPU's own.
"""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.attention import AttentionParameters, plan_attention
from consistent_kernels.attention import llvm as attention
from consistent_kernels.linear import llvm as linear
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.silu_and_mul import llvm as silu_and_mul
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

OLD = "haswell"


def panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    """As `linear.pack`, with panels of another width."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % width))
    pairs = padded.contiguous().view(torch.int32)
    return pairs.view(-1, width, pairs.shape[1]).transpose(1, 2).contiguous()


def multiplied(
    kernel: int, x: torch.Tensor, weight: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    packed = panels(weight, width)
    count, pairs, _ = packed.shape
    out = torch.empty((x.shape[0], count * width), dtype=dtype)
    bias = torch.zeros(count * width, dtype=torch.float32)
    strides = 4 * x.stride(0), out.element_size() * out.stride(0)
    words = (x.data_ptr(), strides[0], x.shape[0], packed.data_ptr(), count, pairs)
    ahead = packed.data_ptr(), 0
    run_one(kernel, (*words, bias.data_ptr(), out.data_ptr(), strides[1], *ahead), count)
    return out[:, : weight.shape[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_by_fma_does_not_follow_the_vectors(dtype: torch.dtype) -> None:
    x = hazard_activations((21, 576), seed=1).float()
    weight = hazard_activations((200, 576), seed=2)
    is_fp32 = dtype == torch.float32
    narrow = multiplied(linear.Gemm("fma", 256, is_fp32).compile(OLD), x, weight, 24, dtype)
    again = multiplied(linear.Gemm("fma", 256, is_fp32).compile(), x, weight, 24, dtype)
    wide = multiplied(linear.Gemm("fma", 512, is_fp32).compile(OLD), x, weight, 48, dtype)
    assert_bitwise_equal(narrow, again)
    assert_bitwise_equal(narrow, wide)
    exact = x.double() @ weight.double().t()
    bound = (x.double().abs() @ weight.double().abs().t()) * 577 * 2**-24
    rounding = exact.abs() * (0 if is_fp32 else 2**-8)
    assert bool(((narrow.double() - exact).abs() <= bound * 1.01 + rounding).all())


def test_control_descending_columns_differ() -> None:
    x = hazard_activations((21, 576), seed=1).float()
    weight = hazard_activations((200, 576), seed=2)
    kernel = linear.Gemm("fma", 256, True).compile(OLD)
    ascending = multiplied(kernel, x, weight, 24, torch.float32)
    flipped = x.flip(1).contiguous(), weight.flip(1).contiguous()
    assert not bitwise_equal(multiplied(kernel, *flipped, 24, torch.float32), ascending)


def test_silu_does_not_follow_the_vectors() -> None:
    gate, up = hazard_activations((9, 500), seed=3), hazard_activations((9, 500), seed=4)
    out = torch.empty_like(gate)
    _, words, units = silu_and_mul.command(gate, up, out)
    run_one(silu_and_mul.SiluAndMul(2, 256).compile(OLD), words, units)
    assert_bitwise_equal(out, silu_and_mul.silu_and_mul_llvm(gate, up))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_does_not_follow_the_vectors(head_dim: int) -> None:
    params = AttentionParameters(6, 2, head_dim, 0.125, key_split=64)
    borders = torch.tensor([0, 1, 18, 90, 300])
    q = hazard_activations((300, 6, head_dim), seed=5)
    k, v = (hazard_activations((300, 2, head_dim), seed=seed) for seed in (6, 7))
    plan = plan_attention(borders, params=params, num_tokens=300, impl="llvm", cu_seqlens_k=borders)
    out = torch.empty_like(q)
    _, words, units = attention.command(q, k, v, plan, out, None)
    run_one(attention.Attention(head_dim, params.group, 256).compile(OLD), words, units)
    assert_bitwise_equal(out, attention.attention_llvm(q, k, v, plan)[0])
