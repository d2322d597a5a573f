"""The CUDA program of short rows: compiled for GPUs that are not here; run where one is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from topk_cases import borders, hazard_scores
from topk_on_cpu import PACKAGE, build_for_cpu, run_on_cpu

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.nvrtc import compile_cuda
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.sparse_topk.cuda import Shape, row_shape, sparse_topk_select
from consistent_kernels.sparse_topk.spec import (
    MANY_ROWS,
    SHORT_PLACES,
    SHORT_ROWS,
    SHORT_THREADS,
    SHORT_VECTORS,
)
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the CUDA program needs a CUDA device"
)
SHAPES = [(1, 1024), (2, 512), (4, 256)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("vectors", "threads", "resident"), [shape for _, *shapes in SHORT_ROWS for shape in shapes]
)
def test_sparse_topk_short_compiles_by_nvrtc(
    arch: int, vectors: int, threads: int, resident: int
) -> None:
    defines = {
        "THREAD_VECTORS": vectors,
        "BLOCK_THREADS": threads,
        "RESIDENT_BLOCKS": resident,
        "BORDER_BYTES": 8,
    }
    assert compile_cuda(PACKAGE, "short.cu", f"sm_{arch}", defines).startswith(b"\x7fELF")


def test_sparse_topk_short_shapes_hold_short_rows() -> None:
    for columns, *shapes in SHORT_ROWS:
        for more, (vectors, threads, resident) in enumerate(shapes):
            assert vectors in SHORT_VECTORS
            assert threads in SHORT_THREADS
            assert 4 * vectors * threads >= columns
            expected = Shape(1, vectors, threads, resident, short=True)
            assert row_shape(MANY_ROWS + more, columns, SHORT_PLACES) == expected
    longest, *_ = SHORT_ROWS[-1]
    for columns, k in ((longest + 1, 2048), (longest, SHORT_PLACES + 1)):
        shape = row_shape(64, columns, k)
        assert shape is not None
        assert not shape.short


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """By threads of a block."""
    return {
        threads: build_for_cpu("short", tmp_path_factory.mktemp("short"), threads)
        for _, threads in SHAPES
    }


def scores_of(values: str, rows: int) -> torch.Tensor:
    """Rows of 4096 scores, each kind of which takes another way through the kernel."""
    generator = torch.Generator().manual_seed(rows)
    normal = torch.randn(rows, 4096, generator=generator)
    chance = torch.rand(rows, 4096, generator=generator)
    if values == "hazard":
        return hazard_scores(rows, 4096, seed=7)
    if values == "ties":  # more of them than are listed
        return torch.zeros(rows, 4096)
    if values == "relu":
        return (normal - 1.0).relu()
    if values == "steps":  # ties that are listed
        return (normal * 32).round() / 32
    if values == "one octave":  # a bin of more scores than are listed
        return 1.0 + chance / 64
    if values == "below the bins":
        return normal * 1e-30
    if values == "above the bins":
        return normal * 1e30
    if values == "infinite":
        return normal.masked_fill(chance < 0.6, INF)
    if values == "minus infinite":
        return normal.masked_fill(chance < 0.7, -INF).masked_fill(chance < 0.3, NAN)
    if values == "nan":
        return normal.masked_fill(chance < 0.8, NAN)
    return normal


KINDS = (
    "normal",
    "hazard",
    "ties",
    "relu",
    "steps",
    "one octave",
    "below the bins",
    "above the bins",
    "infinite",
    "minus infinite",
    "nan",
)
PAIRS = [(0, 4096), (585, 4091), (3, 2052), (0, 2049), (2, 2050), (9, 8)]


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize(("vectors", "threads"), SHAPES)
def test_sparse_topk_short_on_cpu_threads_equals_reference(
    on_cpu: dict[int, ctypes.CDLL], vectors: int, threads: int, values: str
) -> None:
    """The CUDA source itself, run by fibers in a shuffled order: integers, so the GPU's answer."""
    scores = scores_of(values, len(PAIRS))
    starts, ends = borders(*PAIRS)
    starts, ends = (starts.long(), ends.long()) if vectors == 2 else (starts, ends)
    got = {}
    for k in (2048, 1001):
        got[k] = run_on_cpu(on_cpu[threads], (1, vectors), scores, starts, ends, k)
    # The last row's end is before its start, which the reference refuses: no position.
    ends[-1] = starts[-1]
    for k, places in got.items():
        assert_bitwise_equal(places, sparse_topk(scores, starts, ends, k, impl="reference"))


def test_control_the_other_ties_on_cpu_threads_differ(tmp_path: Path) -> None:
    faulty = build_for_cpu("short", tmp_path, 256, "ranks[v] >= equal - need", "ranks[v] < need")
    scores, bounds = torch.zeros(1, 200), borders((0, 200))
    expected = sparse_topk(scores, *bounds, 100, impl="reference")
    assert not bitwise_equal(run_on_cpu(faulty, (1, 4), scores, *bounds, 100), expected)


def test_sparse_topk_short_bins_follow_the_order(on_cpu: dict[int, ctypes.CDLL]) -> None:
    """No float lies below the first one of its bin or at or above the next bin's."""
    check = on_cpu[512].first_wrong_bin
    check.argtypes = [ctypes.c_uint32, ctypes.c_longlong, ctypes.c_uint32]
    check.restype = ctypes.c_longlong
    assert check(0, 1 << 20, 4093) == -1  # all over
    for edge in (0, 0x33800000, 0x38800000, 0x47800000, 0x7F800000):  # zero, 2^-24, 2^-14, 2^16
        for sign in (0, 1 << 31):
            assert check((sign + edge - 5000) & 0xFFFFFFFF, 10000, 1) == -1


def test_control_a_bin_one_float_off_is_found(tmp_path: Path) -> None:
    faulty = build_for_cpu(
        "short", tmp_path, 256, "half_as_float_bits(below)) - 1u", "half_as_float_bits(below))"
    )
    check = faulty.first_wrong_bin
    check.argtypes = [ctypes.c_uint32, ctypes.c_longlong, ctypes.c_uint32]
    check.restype = ctypes.c_longlong
    assert check((1 << 31) + 0x38800000 - 5000, 10000, 1) != -1


def test_sparse_topk_rejects_more_places_than_a_short_row_holds() -> None:
    scores, bounds = torch.zeros(1, 100), borders((0, 100))
    with pytest.raises(InvalidInputError, match="k must be at most 4096 for a short row's shape"):
        sparse_topk_select(scores, *bounds, 4097, shape=Shape(1, 2, 512, 1, short=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize(
    ("vectors", "threads", "resident"),
    [(1, 1024, 1), (1, 1024, 2), (2, 512, 1), (2, 512, 2), (4, 256, 2), (2, 1024, 1), (4, 512, 2)],
)
def test_sparse_topk_short_equals_reference(
    vectors: int, threads: int, resident: int, values: str
) -> None:
    shape = Shape(1, vectors, threads, resident, short=True)
    scores = scores_of(values, len(PAIRS))
    bounds = borders(*PAIRS[:-1], (9, 9))
    on_device = (scores.cuda(), *(border.cuda() for border in bounds))
    wide = (on_device[0], *(border.long() for border in on_device[1:]))
    for k in (2048, 1001, 7):
        expected = sparse_topk(scores, *bounds, k, impl="reference").cuda()
        for _ in range(3):
            assert_bitwise_equal(sparse_topk_select(*on_device, k, shape=shape), expected)
        assert_bitwise_equal(sparse_topk_select(*wide, k, shape=shape), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rows", [1, 64, 256, 700])
def test_sparse_topk_short_does_not_follow_the_batch(rows: int) -> None:
    scores = hazard_scores(5, 4096, seed=rows).repeat(-(-rows // 5), 1)[:rows].cuda()
    bounds = borders(*([(0, 4096), (3, 4091), (0, 2048), (1000, 4096), (9, 3300)] * rows)[:rows])
    few = min(rows, 5)
    expected = sparse_topk(
        scores[:few].cpu(), *(border[:few] for border in bounds), 2048, impl="reference"
    ).cuda()
    shape = Shape(1, *SHORT_ROWS[0][2], short=True)
    got = sparse_topk_select(scores, *(border.cuda() for border in bounds), 2048, shape=shape)
    for first in range(0, rows - few + 1, 5):
        assert_bitwise_equal(got[first : first + few], expected)
