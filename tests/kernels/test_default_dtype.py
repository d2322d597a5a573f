"""No op's bits follow torch's default dtype.

Training frameworks set it to bfloat16 while they build a model, and vLLM leaves it there when
loading one fails (set_default_torch_dtype in vllm/utils/torch_utils.py restores nothing then).
"""

from __future__ import annotations

from fresh_process import output_of_process

# In a process of its own: probes and tables are computed once, under whichever dtype comes first.
_SOURCE = """
import expert_cases
from attention_cases import CASES, borders
from consistent_kernels.attention import attention_varlen, attention_varlen_bwd
from consistent_kernels.experts import experts
from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.linear import linear, prepare_weight
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

torch.set_default_dtype(torch.{dtype})

print_bits(*add_rms_norm(x, residual, norm, 1e-6, **ref))
print_bits(silu_and_mul(x, up, **ref))
print_bits(linear(x, prepare_weight(master, dtype=x.dtype, **ref), **ref))
rope = RopeParameters(128, 128, 1e6, 512, "yarn", 4.0, original_max_position=128)
print_bits(*rotary(torch.arange(total), q, k, rope=rope, **ref))
cu = borders(lengths)
out, lse = attention_varlen(q, k, v, cu, cu, params=params, **ref)
print_bits(out, lse)
print_bits(*attention_varlen_bwd(q, q, k, v, out, lse, cu, cu, params=params, **ref))
fp32_head = prepare_weight(head, dtype=x.dtype, out_dtype=torch.float32, **ref)
scores = token_logprobs(x, fp32_head, chosen, temperature=0.7, **ref)
print_bits(*scores)
print_bits(experts(few, w13, w2, ids, weights, **ref))
ref |= {"scale_format": "ue8m0"}
print_bits(*quantize_rows(wide, **ref))
print_bits(fp8_linear(wide, *quantize_weight(fp8_master, **ref), **ref))
"""


def test_ops_do_not_follow_the_default_dtype() -> None:
    expected, found = (
        output_of_process(_SOURCE.replace("{dtype}", dtype), threads=1)
        for dtype in ("float32", "bfloat16")
    )
    assert expected.count("\n") == 18
    assert found == expected
