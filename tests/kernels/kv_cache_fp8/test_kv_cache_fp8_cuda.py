"""The CUDA program of V4's gather: compiled here, run by CPU threads here and by a GPU there."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch
from kv_cases import hazard_rows, poisoned_cache

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.kv_cache_fp8 import V4, cuda, gather_kv_fp8, write_kv_fp8
from consistent_kernels.kv_cache_fp8.cuda import Shape, gather_v4_fwd
from consistent_kernels.nvrtc import compile_cuda
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the CUDA program needs a CUDA device"
)
PACKAGE = "consistent_kernels.kv_cache_fp8"
SUPPORT = Path(__file__).parents[2] / "support"
SHAPES = (Shape(), Shape(4, 8, read=1, kept=1), Shape(2, 16, descending=False, read=2))


def _defines(shape: Shape, block_size: int, paged: bool, wide: bool) -> dict[str, int]:
    size = 8 if wide else 4
    return {
        "BLOCK_SIZE": block_size, "PAGED": int(paged), "REQUEST_BYTES": size, "TABLE_BYTES": size,
        "WARPS": shape.warps, "BATCH": shape.batch, "DESCENDING": int(shape.descending),
        "READ": shape.read, "WRITE": int(shape.kept > 0),
    }  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("paged", [True, False])
def test_gather_v4_compiles_by_nvrtc(arch: int, shape: Shape, paged: bool) -> None:
    defines = _defines(shape, 64, paged, not paged)
    assert compile_cuda(PACKAGE, "gather.cu", f"sm_{arch}", defines).startswith(b"\x7fELF")


def _inputs(queries: int, k: int, wide: bool) -> tuple[torch.Tensor, ...]:
    """(cache, positions, requests, block table): poison around it, hazards and every NaN in it."""
    kv = hazard_rows(40, V4, seed=2)
    kv[5, 3], kv[6, 0], kv[7, 100] = float("nan"), float("inf"), -float("nan")
    generator = torch.Generator().manual_seed(queries)
    cache = poisoned_cache(5, 16, V4)
    slots = torch.randperm(80, generator=generator)
    write_kv_fp8(kv.repeat(2, 1), cache, slots, layout=V4, impl="reference")
    scales = cache.view(5, -1)[:, 16 * 576 :]
    scales[0, 3], scales[1, 9], scales[2, 17] = 255, 0, 1
    table = torch.tensor([[4, 0, 3], [1, 2, 0]], dtype=torch.int64 if wide else torch.int32)
    positions = torch.randint(-1, 48, (queries, k), generator=generator).int()
    requests = torch.arange(queries, dtype=table.dtype) % 2
    return cache, positions, requests, table


def _on_cpu(folder: Path, shape: Shape, paged: bool, wide: bool, *change: str) -> ctypes.CDLL:
    source = (resources.files(PACKAGE) / "gather.cu").read_text()
    if change:
        assert change[0] in source
        source = source.replace(*change)
    before, rest = source.split("// <device>")
    (folder / "types.h").write_text(before)
    (folder / "body.h").write_text(rest.split("// </device>")[1])
    macros = [f"-D{name}={value}" for name, value in _defines(shape, 16, paged, wide).items()]
    command = [
        "g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", *macros,
        f'-DSOURCE_TYPES="{folder}/types.h"', f'-DSOURCE_BODY="{folder}/body.h"',
        str(SUPPORT / "gather_on_cpu.cpp"), "-o", str(folder / "gather.so"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(folder / "gather.so"))


def _run_on_cpu(
    library: ctypes.CDLL,
    shape: Shape,
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, k = positions.shape
    out = torch.full((queries, k, V4.width), 7.0, dtype=torch.bfloat16)
    indices = torch.full((queries, k + 2), -7, dtype=torch.int32)
    blocks = -(-positions.numel() // (shape.warps * shape.batch))
    tensors = (cache, positions, requests, places, out, indices[:, 1:])
    strides = (places.stride(0), cache.stride(0), indices.stride(0))
    library.gather_on_cpu(
        *(ctypes.c_void_p(x.data_ptr()) for x in tensors),
        *(ctypes.c_longlong(x) for x in strides),
        positions.numel(), k, 100, blocks,
    )  # fmt: skip
    return out, indices


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("queries", "k", "paged"), [(3, 7, True), (5, 64, True), (2, 9, False)])
def test_gather_v4_on_cpu_threads_equals_reference(
    tmp_path: Path, shape: Shape, queries: int, k: int, paged: bool
) -> None:
    """The CUDA source itself; its conversions are the CPU's, which round as the GPU's do."""
    cache, positions, requests, table = _inputs(queries, k, wide=not paged)
    places = table if paged else torch.tensor([3, 30])
    library = _on_cpu(tmp_path, shape, paged, not paged)
    got, indices = _run_on_cpu(library, shape, cache, positions, requests, places)
    expected_indices = torch.full_like(indices, -7)
    named = {"block_table": table} if paged else {"starts": places}
    expected = gather_kv_fp8(
        cache, positions, requests, layout=V4, impl="reference", first_row=100,
        indices=expected_indices[:, 1:-1], **named,
    )  # fmt: skip
    assert_bitwise_equal(got, expected)
    assert_bitwise_equal(indices, expected_indices)


def test_control_gather_v4_on_cpu_threads_sees_a_wrong_nan(tmp_path: Path) -> None:
    cache, positions, requests, table = _inputs(5, 64, wide=False)
    change = ("0x7fc0u", "0x7fffu")
    library = _on_cpu(tmp_path, SHAPES[0], True, False, *change)
    got, _ = _run_on_cpu(library, SHAPES[0], cache, positions, requests, table)
    places = {"layout": V4, "impl": "reference", "block_table": table}
    expected = gather_kv_fp8(cache, positions, requests, **places)
    differs = got.view(torch.int16) != expected.view(torch.int16)
    assert differs.any()
    assert expected[differs].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_v4_hands_over_positions_of_four_bytes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op takes both kinds of integers, the kernel one: eight bytes would be read as two."""
    cache, positions, requests, table = _inputs(3, 7, wide=False)
    seen = []

    def launch(*_: object, args: list[tuple[int, type]], **__: object) -> None:
        address, count = args[1][0], positions.numel()
        seen.append(list((ctypes.c_int32 * count).from_address(address)))

    monkeypatch.setattr(cuda, "launch_cuda", launch)
    out = torch.empty(3, 7, V4.width, dtype=torch.bfloat16)
    cuda.gather_v4_fwd(cache, positions.to(dtype), requests, table, None, out, None, 0)
    assert seen == [positions.flatten().tolist()]
    crooked = torch.empty(out.numel() + 1, dtype=torch.bfloat16)[1:].view(out.shape)
    with pytest.raises(InvalidInputError, match="out must be aligned to 16 bytes, got address"):
        cuda.gather_v4_fwd(cache, positions, requests, table, None, crooked, None, 0)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("queries", "k", "paged"), [(3, 7, True), (300, 64, True), (2, 9, False)])
def test_gather_v4_by_nvrtc_equals_reference(
    shape: Shape, queries: int, k: int, paged: bool
) -> None:
    cache, positions, requests, table = _inputs(queries, k, wide=not paged)
    named = {"block_table": table} if paged else {"starts": torch.tensor([3, 30])}
    found = []
    for device in ("cpu", "cuda"):
        indices = torch.full((queries, k + 2), -7, dtype=torch.int32, device=device)
        given = [x.to(device) for x in (cache, positions, requests)]
        where = {name: value.to(device) for name, value in named.items()}
        out = torch.full((queries, k, V4.width), 7.0, dtype=torch.bfloat16, device=device)
        if device == "cpu":
            gather_kv_fp8(
                *given, layout=V4, impl="reference", out=out, indices=indices[:, 1:-1],
                first_row=100, **where,
            )  # fmt: skip
        else:
            both = where.get("block_table"), where.get("starts")
            gather_v4_fwd(*given, *both, out, indices[:, 1:-1], 100, shape)
        found.append((out.cpu(), indices.cpu()))
    for ours, expected in zip(found[1], found[0], strict=True):
        assert_bitwise_equal(ours, expected)
