"""The Triton program of the sparse top-k: compiled for GPUs that are not here, and interpreted.

On a GPU: long rows, a captured graph, and vLLM's kernel on scores without ties.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import output_interpreted
from topk_cases import borders, hazard_scores

from consistent_kernels.sparse_topk import sparse_topk, sparse_topk_tickets
from consistent_kernels.sparse_topk.spec import CHUNK, KEYS_PER_WARP
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("k", "columns"), [(2048, 4096), (2048, 131072), (512, 32768)])
def test_sparse_topk_cross_compiles(arch: int, k: int, columns: int) -> None:
    from consistent_kernels.sparse_topk.triton import TICKET_PAD, _shape, _sparse_topk_kernel

    width, parents, arity, levels = _shape(columns, k)
    pointers = ("bits_ptr", "starts_ptr", "ends_ptr", "out_ptr", "maxima_ptr", "nodes_ptr")
    cubin = cross_compile(
        _sparse_topk_kernel,
        arch=arch,
        signature=dict.fromkeys((*pointers, "tickets_ptr"), "*i32")
        | dict.fromkeys(("stride", "columns", "maxima_stride"), "i32"),
        constexprs={
            "K": k,
            "PARENTS": parents,
            "ARITY": arity,
            "LEVELS": levels,
            "WIDTH": width,
            "CHUNK": CHUNK,
            "TICKET_PAD": TICKET_PAD,
        },
        num_warps=width // KEYS_PER_WARP,
    )
    assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import torch
from topk_cases import borders, hazard_scores
from consistent_kernels.sparse_topk import sparse_topk, sparse_topk_tickets
from consistent_kernels.sparse_topk import triton as program
from consistent_kernels.testing import assert_bitwise_equal

def check(scores, bounds, k):
    tickets = sparse_topk_tickets(scores.shape[0], "cpu")
    got = sparse_topk(scores, *bounds, k, impl="triton", tickets=tickets)
    assert_bitwise_equal(got, sparse_topk(scores, *bounds, k, impl="reference"))
    assert not bool(tickets.any())

pairs = ((0, 2900), (0, 100), (5, 2060), (101, 2500), (2899, 2900), (0, 0))
for k in (7, 2048):
    check(hazard_scores(6, 2900, seed=1), borders(*pairs), k)
check(torch.zeros(2, 9000), borders((0, 9000), (3, 8999)), 2048)
for k in (512, 1500, 2048):
    check(hazard_scores(3, 40000, seed=2), borders((0, 40000), (17, 38000), (30000, 33000)), k)
for program.PROGRAMS, program.MANY_ROWS in ((528, 132), (4, 132), (4, 1)):
    # As many programs as pieces, two, or one for a row.
    check(hazard_scores(2, 140000, seed=3), borders((0, 140000), (1, 133000)), 2048)
print("same")
"""


def test_sparse_topk_interpreted_equals_reference() -> None:
    # Integers only, so the interpreter's answer is the GPU's but for the order of the programs.
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("rows", "columns"), [(5, 4096), (5, 32768), (5, 131072), (300, 32768)])
def test_sparse_topk_equals_reference_at_length(rows: int, columns: int) -> None:
    # 300 rows: one program walks a whole row; 5 rows: many programs share one.
    scores = hazard_scores(5, columns, seed=columns).repeat(rows // 5, 1).cuda()
    pairs = [(0, columns), (3, columns - 5), (0, 2048), (columns // 2, columns), (9, 8300)]
    pairs = [(a, min(b, columns)) for a, b in pairs] * (rows // 5)
    bounds = borders(*pairs, device="cuda")
    tickets = sparse_topk_tickets(rows, "cuda")
    for k in (512, 2048):
        few = scores[:5].cpu(), bounds[0][:5].cpu(), bounds[1][:5].cpu()
        expected = sparse_topk(*few, k, impl="reference").repeat(rows // 5, 1).cuda()
        for _ in range(20):
            got = sparse_topk(scores, *bounds, k, impl="triton", tickets=tickets)
            assert_bitwise_equal(got, expected)
    assert not bool(tickets.any())


@pytest.mark.gpu
@needs_cuda
def test_sparse_topk_graph_replay_equals_eager() -> None:
    scores = hazard_scores(64, 40000, seed=8, device="cuda")
    ends = torch.arange(64, dtype=torch.int32, device="cuda") * 600 + 100
    starts = torch.zeros_like(ends)
    tickets = sparse_topk_tickets(64, "cuda")
    call = lambda: sparse_topk(scores, starts, ends, 2048, impl="triton", tickets=tickets)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in (9, 10):
        scores.copy_(hazard_scores(64, 40000, seed=seed))
        ends.add_(7)
        graph.replay()
        assert_bitwise_equal(captured, call())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("columns", [4096, 32768])
def test_sparse_topk_selects_what_vllm_selects(columns: int) -> None:
    # Without ties the set is defined in stock too; only its order is not.
    pytest.importorskip("vllm._custom_ops", reason="vLLM's kernel is the other side")
    if not hasattr(torch.ops._C, "top_k_per_row_prefill"):
        pytest.skip("this build of vLLM has no CUDA kernels")
    generator = torch.Generator().manual_seed(1)
    scores = torch.randperm(columns, generator=generator).float()[None].repeat(3, 1).cuda()
    starts, ends = borders((0, columns), (0, columns - 9), (0, 2500), device="cuda")
    stock = torch.empty((3, 2048), dtype=torch.int32, device="cuda")
    torch.ops._C.top_k_per_row_prefill(
        scores, starts, ends, stock, 3, scores.stride(0), scores.stride(1), 2048
    )
    ours = sparse_topk(scores, starts, ends, 2048, impl="triton")
    assert_bitwise_equal(ours, stock.sort(dim=1, descending=True).values)
