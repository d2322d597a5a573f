"""Around FlashAttention 3: the decode splits' kernel, interpreted and compiled for absent GPUs."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

SCRIPT = """
import torch
from consistent_kernels.attention.flash_attn_merge import decode_splits
from consistent_kernels.attention.parameters import AttentionParameters

params = AttentionParameters(3, 1, 64, 0.125, key_split=128)
pages = torch.empty(4, 16, 1, 64)
CASES = [  # keys, first query rows; a request without keys, one without a query, a single one
    ([300, 0, 129], [0, 1, 2, 3]),
    ([128, 5, 700], [0, 1, 1, 2]),
    ([640], [0, 1]),
]
for lens, cu_q in CASES:
    q = torch.randn(cu_q[-1], 6, 64).bfloat16()[:, :3]
    splits = -(-max(lens) // 128)
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    table = torch.randint(1, 99, (len(lens), 44), dtype=torch.int32)
    for paged in (False, True):
        got = decode_splits(
            q,
            torch.tensor(lens, dtype=torch.int32),
            None if paged else starts,
            table if paged else None,
            torch.tensor(cu_q, dtype=torch.int32),
            splits,
            params,
            pages,
        )
        assert got.rows.tolist() == list(range(len(lens) * splits + 1))
        for request, keys in enumerate(lens):
            for split in range(splits):
                at = request * splits + split
                inside = min(max(keys - 128 * split, 0), 128)
                asked = cu_q[request + 1] > cu_q[request] and inside > 0
                assert got.lens[at] == inside
                assert got.used_q[at] == int(asked)
                if not paged:
                    assert got.starts[at] == starts[request] + 128 * split
                if not asked:
                    continue
                assert torch.equal(got.q[at], q[cu_q[request]])
                if paged:
                    first, used = 8 * split, -(-inside // 16)
                    own = table[request, first : first + used]
                    assert torch.equal(got.table[at, :used], own)
print("every split found")
"""


def test_decode_splits_interpreted() -> None:
    """The sequences of a decode step, against their definition."""
    assert "every split found" in output_interpreted(SCRIPT, timeout=120)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("paged", [False, True])
def test_decode_splits_cross_compiles(arch: int, paged: bool) -> None:
    from consistent_kernels.attention.flash_attn_merge import _decode_splits_kernel as kernel

    constants = {"WIDTH": 4096, "BLOCK": 4096, "SPLIT": 4096, "PAGED": paged}
    constants |= {"IN_SPLIT": 256, "IN_BLOCK": 256}
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
    types |= {"q_ptr": "*bf16", "repeated_ptr": "*bf16"}
    cubin = cross_compile(kernel, arch=arch, signature=types, constexprs=constants)
    assert cubin.startswith(b"\x7fELF")
