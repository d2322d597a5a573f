"""The CUDA program of the sparse top-k: compiled for GPUs that are not here; run where one is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from topk_cases import borders, hazard_scores
from topk_on_cpu import build_for_cpu, run_on_cpu

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.nvrtc import compile_cuda
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.sparse_topk.cuda import Shape, row_shape, sparse_topk_select
from consistent_kernels.sparse_topk.spec import BLOCK_THREADS, BLOCKS, MANY_ROWS, VECTORS
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the CUDA program needs a CUDA device"
)
PACKAGE = "consistent_kernels.sparse_topk"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shape", [Shape(1, 1), Shape(8, 2, 512, 2), Shape(8, 0)])
def test_sparse_topk_compiles_by_nvrtc(arch: int, shape: Shape) -> None:
    names = ("ROW_BLOCKS", "THREAD_VECTORS", "BLOCK_THREADS", "RESIDENT_BLOCKS")
    defines = dict(zip(names, shape[:4], strict=True))
    assert compile_cuda(PACKAGE, "select.cu", f"sm_{arch}", defines).startswith(b"\x7fELF")


def test_control_nvrtc_reports_what_does_not_compile() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)select\.cu for sm_90: .*ROW_BLOCKS"):
        compile_cuda(PACKAGE, "select.cu", "sm_90", {"THREAD_VECTORS": 1})


def test_sparse_topk_blocks_hold_every_row() -> None:
    for columns in (1, 4093, 4097, 32768, 131072, 163840, 1 << 20):
        for rows in (1, 16, 33, 64, 256):
            shape = row_shape(rows, columns, 2048)
            if shape is None:
                assert columns > 32768
                continue
            assert shape.blocks in BLOCKS
            assert shape.threads in BLOCK_THREADS
            if shape.vectors == 0:  # read anew in each pass, so of any length
                assert shape.blocks == 2
                assert columns > 32768
            else:
                assert shape.vectors in VECTORS
                assert shape.blocks * shape.vectors * 4 * shape.threads >= columns
            assert shape.blocks == 1 or rows * shape.blocks <= MANY_ROWS


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """By threads of a block."""
    return {
        threads: build_for_cpu("select", tmp_path_factory.mktemp("select"), threads)
        for threads in BLOCK_THREADS
    }


RANDOM, TIES, RELU, HUGE = "random", "ties", "relu", "huge"


@pytest.mark.parametrize(
    ("shape", "columns", "k", "values"),
    [
        (Shape(1, 1, 1024), 2900, 7, RANDOM),
        (Shape(1, 1, 1024), 2900, 2048, RANDOM),
        (Shape(1, 4, 1024), 16000, 512, RELU),
        (Shape(1, 4, 512), 7000, 2048, TIES),
        (Shape(1, 0, 1024), 9000, 2048, HUGE),
        (Shape(2, 2, 1024), 16381, 1500, RANDOM),
        (Shape(8, 1, 512), 16384, 2048, RANDOM),
        (Shape(8, 1, 512), 10001, 2048, TIES),
        (Shape(8, 0, 512), 20000, 2048, RELU),
    ],
)
def test_sparse_topk_on_cpu_threads_equals_reference(
    on_cpu: dict[int, ctypes.CDLL], shape: Shape, columns: int, k: int, values: str
) -> None:
    """The CUDA source itself, run by fibers in a shuffled order: integers, so the GPU's answer."""
    pairs = [(columns // 7, columns - 5)]
    if shape.blocks == 1:
        pairs += [(0, columns), (3, min(k + 3, columns))]
    pairs += [(9, 8)]
    scores = hazard_scores(len(pairs), columns, seed=columns + k)
    if values == TIES:
        scores = torch.zeros_like(scores)
    elif values == RELU:
        scores = (scores - 1.5).relu()
    elif values == HUGE:
        scores *= 1e9
    starts, ends = borders(*pairs)
    starts, ends = (starts.long(), ends.long()) if shape.vectors == 0 else (starts, ends)
    got = run_on_cpu(on_cpu[shape.threads], shape[:2], scores, starts, ends, k)
    # The last row's end is before its start, which the reference refuses: no position.
    ends[-1] = starts[-1]
    assert_bitwise_equal(got, sparse_topk(scores, starts, ends, k, impl="reference"))


def test_control_a_wrong_rank_on_cpu_threads_differs(tmp_path: Path) -> None:
    faulty = build_for_cpu("select", tmp_path, 1024, "larger == need - 1", "larger == need - 2")
    scores, bounds = torch.zeros(1, 200), borders((0, 200))
    expected = sparse_topk(scores, *bounds, 100, impl="reference")
    assert not bitwise_equal(run_on_cpu(faulty, (1, 1), scores, *bounds, 100), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1),
        Shape(1, 8),
        Shape(2, 4),
        Shape(4, 2),
        Shape(8, 1),
        Shape(8, 4),
        Shape(1, 0),
        Shape(8, 0),
        Shape(1, 2, 512, 2),
        Shape(2, 8, 512),
        Shape(8, 2, 512, 2),
    ],
)
def test_sparse_topk_does_not_follow_its_blocks(shape: Shape) -> None:
    columns = shape.blocks * (shape.vectors or 3) * 4 * shape.threads
    scores = hazard_scores(5, columns, seed=columns + 1)
    scores[3] = 0.0  # ties alone: resolved by place
    scores[4] *= 1e8  # beyond the bins
    pairs = [(0, columns), (3, columns - 5), (0, 2048), (columns // 5, columns), (1, columns)]
    bounds = borders(*pairs)
    for k in (1, 512, 2048):
        expected = sparse_topk(scores, *bounds, k, impl="reference").cuda()
        on_device = (scores.cuda(), *(border.cuda() for border in bounds))
        for _ in range(5):
            got = sparse_topk_select(*on_device, k, shape=shape)
            assert_bitwise_equal(got, expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 300), (5, 4096), (5, 131072), (70, 40000), (300, 30000), (300, 40000)]
)
def test_sparse_topk_by_nvrtc_does_not_follow_the_batch(rows: int, columns: int) -> None:
    # One to eight blocks a row, and the rows that Triton's kernel takes.
    scores = hazard_scores(5, columns, seed=columns).repeat(-(-rows // 5), 1)[:rows].cuda()
    pairs = [(0, columns), (3, columns - 5), (0, 2048), (columns // 2, columns), (9, 8300)]
    pairs = [(a, max(a, min(b, columns))) for a, b in pairs] * rows
    starts, ends = borders(*pairs[:rows], device="cuda")
    few = min(rows, 5)
    expected = sparse_topk(
        scores[:few].cpu(), starts[:few].cpu(), ends[:few].cpu(), 2048, impl="reference"
    ).cuda()
    got = sparse_topk(scores, starts, ends, 2048, impl="cuda")
    for first in range(0, rows - few + 1, 5):
        assert_bitwise_equal(got[first : first + few], expected)


def test_sparse_topk_rejects_a_shape_that_holds_no_row() -> None:
    scores, bounds = torch.zeros(1, 5000), borders((0, 5000))
    with pytest.raises(InvalidInputError, match="shape must be of at least 5000 scores, got 4096"):
        sparse_topk_select(scores, *bounds, 100, shape=Shape(1, 1))


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
