"""What a grouped linear computes, and the pinned schedule of each implementation."""

import dataclasses

from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.linear import spec as linear
from consistent_kernels.linear.schedule import TritonTile
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="grouped_linear",
    version=1,
    fields={
        "formula": "y[t, g] = round(sum_k x[t, g, k] * w[g, n, k])",
        "accumulate": "fp32",
        "rounding": "once, to the dtype of x",
    },
)

BASE_TILE = TritonTile(64, 64, 64, 4, 3)
"""The Triton program. Another tile runs only where a probe found the bits of this one."""


@dataclasses.dataclass(frozen=True)
class TmaTile(TritonTile):
    """A launch configuration of `triton_tma.py`; `resident` programs share a multiprocessor."""

    resident: int = 1


TilesByRows = tuple[tuple[int, TritonTile], ...]

TILES_BY_ROWS: TilesByRows = (
    (64, TritonTile(64, 64, 128, 4, 4)),
    (0, TritonTile(128, 128, 64, 8, 4)),
)
"""(rows up to which a tile is used, tile), for elements of two bytes; 0 stands for any number.

Few rows: each program keeps 48 KB of weights on their way. More: fewer programs read a weight.
"""

TILES_BY_INNER: tuple[tuple[int, TilesByRows], ...] = (
    (128, ((64, TritonTile(64, 128, 64, 4, 2)), (0, TmaTile(128, 256, 64, 8, 3)))),
    (512, ((64, TritonTile(64, 64, 64, 4, 4)), (0, TmaTile(128, 128, 128, 8, 3)))),
    (
        1 << 30,
        (
            (64, TmaTile(64, 64, 128, 4, 5)),
            (256, TmaTile(128, 128, 64, 8, 6)),
            (0, TmaTile(128, 256, 64, 8, 3)),
        ),
    ),
)
"""(K up to which they are used, tiles by rows), ascending; TILES_BY_ROWS serves the other layers.

Fastest on an H200 at V3.2's k_up and v_up and V4's out_a (benchmarks/results/schedules_h200.json).
"""


def tiles_of(columns: int, inner: int, has_tma: bool) -> TilesByRows:
    """Return the tiles by rows of a layer [G, N, K]: a property of the layer and the device.

    Args:
        columns, inner: N and K.
        has_tma: the device has TMA and 227 KB of shared memory a block (sm_90, sm_100).
    """
    for limit, tiles in TILES_BY_INNER:
        if inner <= limit and all(_serves(tile, columns, inner, has_tma) for _, tile in tiles):
            return tiles
    return TILES_BY_ROWS


def _serves(tile: TritonTile, columns: int, inner: int, has_tma: bool) -> bool:
    if not isinstance(tile, TmaTile):
        return True
    return has_tma and columns % tile.block_n == 0 and inner % tile.block_k == 0


_FILES = {
    "reference": ("api.py",),
    "triton": ("triton.py", "triton_tma.py"),
    "deep_gemm": ("deep_gemm.py", "deep_gemm_grouped.py", "triton.py", "triton_tma.py"),
}
_SHARED = {
    "reference": ("linear/reference.py", "linear/tiles.py"),
    "triton": ("alignment.py", "linear/probe.py"),
    "deep_gemm": ("alignment.py", "linear/probe.py"),
}

IMPLEMENTATIONS = tuple(_FILES)


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS.

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is not installed.
    """
    source = source_sha256("grouped_linear", "spec.py", *_FILES[impl], shared=_SHARED[impl])
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    if impl == "reference":
        return {"gemm": "the linear reference, group by group"}
    tile: dict[str, Scalar] = dataclasses.asdict(BASE_TILE)
    if impl == "triton":
        return {f"tile.{key}": value for key, value in tile.items()}
    # Layers of a size that TMA does not address run the Triton kernel.
    own = {f"triton.{key}": value for key, value in tile.items()}
    theirs = linear.program(impl).schedule
    return own | {name: theirs[name] for name in ("library_sha256", "headers_sha256", "compiler")}
