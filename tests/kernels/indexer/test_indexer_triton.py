"""The Triton program of the index scores: compiled for GPUs that are not here, and interpreted."""

from __future__ import annotations

import pytest
import torch
from indexer_cases import make_batch
from interpreted import output_interpreted

from consistent_kernels.indexer import indexer_scores_paged
from consistent_kernels.indexer.spec import HEAD_DIM, KEY_TILE, NUM_WARPS
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("heads", [16, 64])
def test_indexer_scores_cross_compile(arch: int, heads: int) -> None:
    from consistent_kernels.indexer.triton import _indexer_scores_kernel

    cubin = cross_compile(
        _indexer_scores_kernel,
        arch=arch,
        signature={"q_ptr": "*u8", "k_ptr": "*u8"}
        | dict.fromkeys(("weights_ptr", "k_scale_ptr", "out_ptr"), "*fp32")
        | dict.fromkeys(("table_ptr", "requests_ptr", "starts_ptr", "ends_ptr"), "*i32")
        | dict.fromkeys(("out_stride", "columns", "table_stride"), "i32")
        | dict.fromkeys(("page_size", "page_bytes", "page_scales", "tiles"), "i32"),
        constexprs={
            "HEADS": heads,
            "HEAD_DIM": HEAD_DIM,
            "LEVELS": heads.bit_length() - 1,
            "KEY_TILE": KEY_TILE,
        },
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")


def test_indexer_tiles_follow_the_grid() -> None:
    from consistent_kernels.indexer.triton import tiles_per_program

    assert tiles_per_program(1, 4096) == 1
    assert tiles_per_program(1, 65536) == 1
    assert tiles_per_program(1, 131072) == 2
    assert tiles_per_program(64, 4096) == 4
    assert tiles_per_program(1, 1) == 1


INTERPRETED = """
import interpreted_fp8
import torch
from indexer_cases import exact_scores, make_batch
import consistent_kernels.indexer.triton as kernels
from consistent_kernels.testing import assert_bitwise_equal

interpreted_fp8.install()
batch = make_batch((150, 1, 600), 16, "triton")
rows = [0, 149, 150, 151, 400, 750]
packed, paged = batch.packed(rows), batch.paged(rows)
for at, row in enumerate(rows):
    own = batch.seen(packed[at], row, packed=True)
    assert_bitwise_equal(batch.seen(paged[at], row, packed=False), own)
    expected, magnitude = exact_scores(batch, row)
    # NumPy adds in fp32: 128 products and 16 heads.
    assert bool(((own.double() - expected).abs() <= magnitude * 144 * 2**-24).all())
# The grid decides how many tiles a program walks; no bit follows it.
for least in (0, 10**9):
    kernels.MIN_PROGRAMS = least
    assert kernels.tiles_per_program(len(rows), 600) == (4 if least == 0 else 1)
    for other, first, is_packed in (
        (batch.packed(rows), packed, True), (batch.paged(rows), paged, False)
    ):
        for at, row in enumerate(rows):
            own = batch.seen(first[at], row, packed=is_packed)
            assert_bitwise_equal(batch.seen(other[at], row, packed=is_packed), own)
print("same")
"""


def test_indexer_scores_interpreted_match_reference() -> None:
    # Addresses, masks, pages and tiles; not the bits of a GPU's product.
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.gpu
@needs_cuda
def test_indexer_scores_run_one_binary_in_every_phase() -> None:
    from consistent_kernels.indexer.triton import _indexer_scores_kernel

    cache = _indexer_scores_kernel.device_caches[torch.cuda.current_device()][0]
    before = set(cache)
    batch = make_batch((70, 1, 133), 32, "triton", device="cuda")
    batch.packed()
    batch.packed([7])
    batch.paged()
    batch.paged([203])
    make_batch((40,), 32, "triton", device="cuda", block_size=16).paged(slice(3, 9))
    assert len(set(cache) - before) == 1


@pytest.mark.gpu
@needs_cuda
def test_indexer_scores_graph_replay_equals_eager() -> None:
    batch = make_batch((300, 200), 32, "triton", device="cuda")
    rows = [299, 5, 499, 0]
    batch.paged(rows)
    torch.cuda.synchronize()
    requests, lens = batch.requests[rows], (batch.ends - batch.starts)[rows]
    q, weights = batch.q[rows], batch.weights[rows]

    def step() -> torch.Tensor:
        return indexer_scores_paged(
            q, weights, batch.cache, batch.block_table, requests, lens, columns=320, impl="triton"
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for first in (10, 200):
        # Other queries, and a padded row without keys, in the graph's buffers.
        now = [first, first + 1, 499, first + 7]
        q.view(torch.uint8).copy_(batch.q[now].view(torch.uint8))
        weights.copy_(batch.weights[now])
        requests.copy_(batch.requests[now])
        lens.copy_((batch.ends - batch.starts)[now])
        lens[2] = 0
        graph.replay()
        eager = step()
        for at, row in enumerate(now):
            if at != 2:
                assert_bitwise_equal(
                    batch.seen(captured[at], row, packed=False),
                    batch.seen(eager[at], row, packed=False),
                )
