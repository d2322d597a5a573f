"""No op's bits follow the settings of the process: default dtype, precision of fp32 GEMMs, oneDNN.

Training frameworks set bfloat16 as default while they build a model, and vLLM leaves it there when
loading one fails (set_default_torch_dtype in vllm/utils/torch_utils.py restores nothing then).
Trainers ask for fast fp32 GEMMs; an engine in another process does not.
"""

from __future__ import annotations

import pytest
import torch
from fresh_process import output_of_process

from consistent_kernels import llvm
from consistent_kernels.linear.onednn import native_bf16

# In a process of its own: probes and tables are computed once, under whichever dtype comes first.
_SOURCE = """
import expert_cases
from attention_cases import CASES, borders
from consistent_kernels.attention import attention_varlen
from consistent_kernels.experts import experts
from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.quantization import quantize_rows, quantize_weight
from consistent_kernels.rms_norm import add_rms_norm
from consistent_kernels.rotary import RopeParameters, rotary
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import hazard_activations, norm_weight
from consistent_kernels.token_logprobs import token_logprobs

def rows(*shape, seed):
    return hazard_activations(shape, seed=seed)

ref = {"impl": "reference"}
x, residual, up = (rows(70, 192, seed=seed) for seed in (1, 2, 3))
norm, master, head = norm_weight(192, seed=4), rows(128, 192, seed=5), rows(1100, 192, seed=6)
params, lengths = CASES["gqa128-split128"], (1, 17, 300)
total = sum(lengths)
q = rows(total, params.num_heads, params.head_dim, seed=7)
k, v = (rows(total, params.num_kv_heads, params.head_dim, seed=seed) for seed in (8, 9))
shape = expert_cases.SHAPES["ragged"]
w13, w2 = expert_cases.prepared(shape, "reference", "cpu")
few = expert_cases.tokens(shape, 33, "cpu", seed=10)
ids, weights = expert_cases.routing(shape, 33, "cpu", seed=11)
wide, fp8_master = rows(9, 256, seed=12), rows(256, 256, seed=13).float()
chosen = torch.arange(70) * 15
deep, deep_master = rows(70, 1536, seed=14), rows(192, 1536, seed=15)

{setting}

print_bits(*add_rms_norm(x, residual, norm, 1e-6, **ref))
print_bits(silu_and_mul(x, up, **ref))
print_bits(linear(x, prepare_weight(master, dtype=x.dtype, **ref), **ref))
for impl in {impls}:
    for out_dtype in (None, torch.float32):
        options = {"impl": impl, "out_dtype": out_dtype}
        weight = prepare_weight(deep_master, dtype=deep.dtype, **options)
        print_bits(linear(deep, weight, **options))
rope = RopeParameters(128, 128, 1e6, 512, "yarn", 4.0, original_max_position=128)
print_bits(*rotary(torch.arange(total), q, k, rope=rope, **ref))
cu = borders(lengths)
out, lse = attention_varlen(q, k, v, cu, cu, params=params, **ref)
print_bits(out, lse)
fp32_head = prepare_weight(head, dtype=x.dtype, out_dtype=torch.float32, **ref)
scores = token_logprobs(x, fp32_head, chosen, temperature=0.7, **ref)
print_bits(*scores)
print_bits(experts(few, w13, w2, ids, weights, **ref))
ref |= {"scale_format": "ue8m0"}
print_bits(*quantize_rows(wide, **ref))
print_bits(fp8_linear(wide, *quantize_weight(fp8_master, **ref), **ref))
"""


SETTINGS = {
    "default dtype": "torch.set_default_dtype(torch.bfloat16)",
    "fast fp32": "native_bf16(); torch.set_float32_matmul_precision('medium')",
    "no oneDNN": "native_bf16(); torch.backends.mkldnn.enabled = False",
}


IMPLS = ["reference"]
IMPLS += ["onednn"] if native_bf16() else []
IMPLS += ["llvm"] if llvm.is_available() else []


def printed_bits(setting: str) -> str:
    source = _SOURCE.replace("{impls}", repr(IMPLS)).replace("{setting}", setting)
    return output_of_process(source, threads=1)


@pytest.fixture(scope="module")
def expected() -> str:
    printed = printed_bits("")
    assert printed.count("\n") == 15 + 2 * len(IMPLS)
    return printed


@pytest.mark.parametrize("setting", SETTINGS)
def test_ops_do_not_follow_the_settings_of_the_process(expected: str, setting: str) -> None:
    assert printed_bits(SETTINGS[setting]) == expected


@pytest.mark.skipif(native_bf16() is None, reason="this CPU multiplies fp32 in fp32 always")
def test_control_fast_fp32_changes_stock_gemms() -> None:
    x, weight = torch.randn(64, 512), torch.randn(256, 512)
    expected = torch.nn.functional.linear(x, weight)
    torch.set_float32_matmul_precision("medium")
    try:
        assert not torch.equal(torch.nn.functional.linear(x, weight), expected)
    finally:
        torch.set_float32_matmul_precision("highest")
