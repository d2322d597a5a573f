"""The pinned schedule of linear's programs; `spec.py` makes them part of the contract."""

import dataclasses

TILE_ROWS, TILE_COLUMNS = 16, 64
"""CPU: shape of one fp32 GEMM; a library picks its kernel by shape, so the shape is fixed."""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """One launch configuration of the Triton program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


BASE_TILE = TritonTile(64, 128, 64, 4, 4)
"""The Triton program. Another tile runs only where a probe found the bits of this one."""

TILES_BY_ROWS = (
    (16, TritonTile(16, 64, 128, 4, 5)),
    (64, TritonTile(64, 64, 128, 4, 4)),
    (256, BASE_TILE),
    (2048, TritonTile(128, 128, 64, 8, 4)),
    (0, TritonTile(128, 256, 64, 8, 4)),
)
"""(rows up to which a tile is used, tile), ascending; 0 stands for any number of rows.

Fastest of 14 tiles on an H200 at N=6144 and 151936, K=4096.
"""

GROUP_ROWS = 8
"""Row blocks that share a pass over the weights; a launch order, which moves no bits."""
