"""Around FlashAttention 3: sequences of the splits and their merges, interpreted and compiled."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.attention import flash_attn_merge, flash_attn_splits
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

SCRIPT = """
import torch
from consistent_kernels.attention.flash_attn_splits import decode_splits
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


PREFILL_SCRIPT = """
import torch
from consistent_kernels.attention.flash_attn_splits import prefill_splits
from consistent_kernels.attention.parameters import AttentionParameters

params = AttentionParameters(3, 1, 64, 0.125, key_split=128)
pages = torch.empty(4, 16, 1, 64)
CASES = [  # keys, queries: whole prompts, chunks, decode, no query, no keys (a padded row)
    ([300, 129, 128, 700], [300, 7, 1, 500]),
    ([257, 0, 640, 5], [0, 1, 130, 5]),
    ([256], [256]),
]
for lens, queries in CASES:
    count, splits = len(lens), max(2, -(-max(lens) // 128))
    cu_q = torch.tensor([0, *queries]).cumsum(0).int()
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    table = torch.randint(1, 99, (count, 44), dtype=torch.int32)
    for paged in (False, True):
        got = prefill_splits(
            torch.tensor(lens, dtype=torch.int32),
            None if paged else starts,
            table if paged else None,
            cu_q,
            splits,
            params,
            pages,
        )
        assert (got.table is None, got.starts is None) == (not paged, paged)
        for request in range(count):
            asked = queries[request] if lens[request] else 0
            positions = range(lens[request] - asked, lens[request])
            for split in range(splits):
                first, end = 128 * split, 128 * split + 128
                at = request * splits + split
                inside = [p for p in positions if first <= p < end]
                behind = [p for p in positions if p >= end]
                assert got.used_q[at] == len(inside)
                assert got.lens[at] == (inside[-1] + 1 - first if inside else 0)
                row = int(cu_q[request]) - positions.start
                if inside:
                    assert got.rows[at] == row + inside[0]
                    if paged:
                        used = -(-int(got.lens[at]) // 16)
                        own = table[request, 8 * split : 8 * split + used]
                        assert torch.equal(got.table[at, :used], own)
                    else:
                        assert got.starts[at] == starts[request] + first
                if split == splits - 1:
                    assert not behind
                    continue
                assert got.behind_used_q[split, request] == len(behind)
                assert got.behind_lens[split, request] == (128 if behind else 0)
                if behind:
                    assert got.behind_rows[split, request] == row + behind[0]
                    if not paged:
                        assert got.behind_starts[split, request] == starts[request] + first
print("every query found")
"""

MERGE_SCRIPT = """
import torch
from consistent_kernels.attention.flash_attn_merge import merge_decode, merge_prefill
from consistent_kernels.attention.parameters import AttentionParameters

for heads, width in ((9, 64), (3, 80)):
    params = AttentionParameters(heads, 1, width, 0.125, key_split=128)
    lens, queries = [300, 5, 0, 513, 260], [3, 5, 2, 1, 9]
    cu_q = torch.tensor([0, *queries]).cumsum(0).int()
    tokens, splits, nan = int(cu_q[-1]) + 2, 5, float("nan")
    keys = torch.tensor(lens, dtype=torch.int32)
    q = torch.empty(tokens, heads, width, dtype=torch.bfloat16)
    own = torch.full(q.shape, nan, dtype=q.dtype), torch.full((heads, tokens), nan)
    partial, lse = torch.full((splits - 1, *q.shape), nan, dtype=q.dtype), None
    lse = torch.full((splits - 1, heads, tokens), nan)
    expected = torch.zeros(q.shape, dtype=q.dtype), torch.full((heads, tokens), -float("inf"))
    one = torch.tensor([0, 1], dtype=torch.int32)
    for request, count in enumerate(queries):
        for back in range(count if lens[request] else 0):
            row = int(cu_q[request + 1]) - 1 - back
            last = (lens[request] - 1 - back) // 128
            parts = torch.randn(splits, heads, width).bfloat16()
            parts_lse = torch.randn(heads, splits) * 9
            for split in range(last):
                partial[split, row], lse[split, :, row] = parts[split], parts_lse[:, split]
            own[0][row], own[1][:, row] = parts[last], parts_lse[:, last]
            seen = torch.tensor([lens[request] - back], dtype=torch.int32)
            found = merge_decode(q[:1], parts, parts_lse, seen, one, splits, params, None)
            expected[0][row], expected[1][:, row] = found[0][0], found[1][:, 0]
    got = merge_prefill(q, own, partial, lse, keys, cu_q, params, None)
    inside = int(cu_q[-1])  # rows behind the sequences are left as they are
    assert torch.equal(got[0][:inside].view(torch.int16), expected[0][:inside].view(torch.int16))
    assert torch.equal(got[1][:, :inside], expected[1][:, :inside])
print("merges agree")
"""


def test_prefill_splits_interpreted() -> None:
    """The sequences of a prefill, against their definition."""
    assert "every query found" in output_interpreted(PREFILL_SCRIPT, timeout=120)


def test_merges_of_prefill_and_decode_agree_interpreted() -> None:
    """Bit for bit, in the interpreter's arithmetic; splits that a row does not see hold NaN."""
    assert "merges agree" in output_interpreted(MERGE_SCRIPT, timeout=120)


def test_decode_splits_interpreted() -> None:
    """The sequences of a decode step, against their definition."""
    assert "every split found" in output_interpreted(SCRIPT, timeout=120)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_splits_cross_compile(arch: int, paged: bool, phase: str) -> None:
    kernel = getattr(flash_attn_splits, f"_{phase}_splits_kernel")
    constants = {"SPLIT": 4096, "PAGED": paged, "IN_SPLIT": 256, "IN_BLOCK": 256}
    if phase == "decode":
        constants |= {"WIDTH": 4096, "BLOCK": 4096}
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names}
    if phase == "decode":
        types |= {"q_ptr": "*bf16", "repeated_ptr": "*bf16"}
    cubin = cross_compile(kernel, arch=arch, signature=types, constexprs=constants)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (9, 64), (16, 256)])
def test_prefill_merge_cross_compiles(arch: int, heads: int, width: int) -> None:
    kernel = flash_attn_merge._merge_prefill_kernel
    constants = {"HEADS": heads, "HEAD_DIM": width, "BLOCK_D": width, "SPLIT": 4096, "BLOCK_H": 8}
    pointers = {"out": "bf16", "own": "bf16", "part": "bf16", "lens": "i32", "cu_q": "i32"}
    types = {
        name: f"*{pointers.get(name.removesuffix('_ptr'), 'fp32')}"
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    cubin = cross_compile(kernel, arch=arch, signature=types, constexprs=constants)
    assert cubin.startswith(b"\x7fELF")
