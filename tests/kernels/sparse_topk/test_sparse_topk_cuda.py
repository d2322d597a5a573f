"""The CUDA program of the sparse top-k: compiled for GPUs that are not here; run where one is."""

from __future__ import annotations

import pytest
import torch
from topk_cases import borders, hazard_scores

from consistent_kernels.nvrtc import compile_cuda
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.sparse_topk.cuda import cluster_and_vectors
from consistent_kernels.sparse_topk.spec import BLOCK_THREADS, CLUSTERS, VECTORS
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the CUDA program needs a CUDA device"
)
PACKAGE = "consistent_kernels.sparse_topk"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("cluster", "vectors"), [(1, 1), (8, 2), (8, 0)])
def test_sparse_topk_compiles_by_nvrtc(arch: int, cluster: int, vectors: int) -> None:
    defines = {"ROW_BLOCKS": cluster, "THREAD_VECTORS": vectors}
    assert compile_cuda(PACKAGE, "select.cu", f"sm_{arch}", defines).startswith(b"\x7fELF")


def test_control_nvrtc_reports_what_does_not_compile() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)select\.cu for sm_90: .*ROW_BLOCKS"):
        compile_cuda(PACKAGE, "select.cu", "sm_90", {"THREAD_VECTORS": 1})


def test_sparse_topk_blocks_hold_every_row() -> None:
    for columns in (1, 4093, 4094, 32768, 131072, 163840, 1 << 20):
        for rows in (1, 64, 256):
            cluster, vectors = cluster_and_vectors(rows, columns)
            assert cluster in CLUSTERS
            if vectors:
                assert vectors in VECTORS
                # A row that starts three columns after an aligned one needs three more.
                assert cluster * vectors * 4 * BLOCK_THREADS >= columns + 3


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("vectors", [*VECTORS, 0])
def test_sparse_topk_does_not_follow_its_blocks(cluster: int, vectors: int) -> None:
    from consistent_kernels.sparse_topk.cuda import sparse_topk_select

    columns = cluster * max(vectors, 3) * 4 * BLOCK_THREADS - 3
    scores = hazard_scores(5, columns, seed=columns)
    scores[3] = 0.0  # ties alone: resolved by place
    scores[4] *= 1e8  # beyond the bins
    pairs = [(0, columns), (3, columns - 5), (0, 2048), (columns // 5, columns), (1, columns)]
    bounds = borders(*pairs)
    for k in (1, 512, 2048):
        expected = sparse_topk(scores, *bounds, k, impl="reference").cuda()
        on_device = (scores.cuda(), *(border.cuda() for border in bounds))
        for _ in range(5):
            got = sparse_topk_select(*on_device, k, (cluster, vectors))
            assert_bitwise_equal(got, expected)


@pytest.mark.gpu
@needs_cuda
def test_sparse_topk_by_nvrtc_graph_replay_equals_eager() -> None:
    scores = hazard_scores(64, 40000, seed=8, device="cuda")
    ends = torch.arange(64, dtype=torch.int32, device="cuda") * 600 + 100
    starts = torch.zeros_like(ends)
    call = lambda: sparse_topk(scores, starts, ends, 2048, impl="cuda")  # noqa: E731
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
