"""What decides the bits of an attention block: sizes, numbers and the program of each op."""

from __future__ import annotations

import dataclasses
import functools

from consistent_kernels.compressor import CompressorParameters
from consistent_kernels.errors import UnsupportedError, invalid
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.sparse_topk.spec import MAX_K

LATENT, ROPE, INDEX_DIM = 512, 64, 128
"""Widths of every published DeepSeek MLA; the cache layouts of `kv_cache_fp8` hold them."""

COMPRESS_RATIOS = (1, 4, 128)
READS = ("workspace", "fp8")


@dataclasses.dataclass(frozen=True)
class BlockPrograms:
    """The implementation of each op, chosen once.

    Attributes:
        linear: of `linear`.
        indexer: of `indexer_scores`.
        attention: of `sparse_attention`, or of `sparse_attention_fp8`.
        read: how attention reads the FP8 caches: "workspace" (gathered to bf16) or "fp8" (from the
            pages). Two programs; both sides take the same one.
        topk: of `sparse_topk`, whose programs share all bits.
        other: of everything else ("reference" or "triton").
        kv: of `kv_cache_fp8`, whose programs share all bits; None is the one of `other`.
        grouped: of `grouped_linear`; None is the one of `other`.
    """

    linear: str = "reference"
    indexer: str = "reference"
    attention: str = "reference"
    read: str = "workspace"
    topk: str = "reference"
    other: str = "reference"
    grouped: str | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        if self.read not in READS:
            raise UnsupportedError("BlockPrograms", f"read {self.read!r}", READS)

    @property
    def grouped_linear(self) -> str:
        """The implementation of `grouped_linear`."""
        return self.other if self.grouped is None else self.grouped

    @property
    def kv_cache(self) -> str:
        """The implementation of `kv_cache_fp8`."""
        return self.other if self.kv is None else self.kv


def _check_sizes(params: V32Parameters | V4Parameters, positive: tuple[str, ...]) -> None:
    op = type(params).__name__
    for name in positive:
        value = getattr(params, name)
        if not isinstance(value, int) or value < 1:
            raise invalid(op, name, "an integer, at least 1", value)
    if params.rope.rotary_dim != ROPE:
        raise invalid(op, "rope.rotary_dim", ROPE, params.rope.rotary_dim)
    if not isinstance(params.topk, int) or not 1 <= params.topk <= MAX_K:
        raise invalid(op, "topk", f"an integer from 1 to {MAX_K}", params.topk)


@dataclasses.dataclass(frozen=True)
class V32Parameters:
    """DeepSeek-V3.2 attention (DSA).

    Attributes:
        hidden, heads, q_rank: hidden size, query heads, rank of the query projection.
        nope_dim, value_dim: a head's columns without rotation, and of its value (128 each).
        index_heads, topk: of the indexer (64 heads, 2048 entries).
        rope: over 64 columns; the main rotation is of adjacent pairs, the indexer's of halves.
        norm_eps: of the RMS norms; index_norm_eps: of the indexer's layer norm.
        scale: of the scores; (nope_dim + 64)^-0.5 times yarn's mscale squared.
    """

    hidden: int
    heads: int
    q_rank: int
    nope_dim: int
    value_dim: int
    index_heads: int
    topk: int
    rope: RopeParameters
    norm_eps: float
    scale: float
    index_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        positive = ("hidden", "heads", "q_rank", "nope_dim", "value_dim", "index_heads")
        _check_sizes(self, positive)
        if self.rope.head_dim != ROPE:
            raise invalid("V32Parameters", "rope.head_dim", ROPE, self.rope.head_dim)
        _ = self.index_rope  # made once: torch.compile cannot trace the making

    @functools.cached_property
    def index_rope(self) -> RopeParameters:
        """The same tables over the first 64 of the indexer's 128 columns."""
        return dataclasses.replace(self.rope, head_dim=INDEX_DIM, rotary_dim=ROPE)


@dataclasses.dataclass(frozen=True)
class V4Parameters:
    """DeepSeek-V4 attention: a sliding window and, by `ratio`, compressed entries.

    Attributes:
        hidden, heads, q_rank: as in V3.2.
        groups, out_rank: groups of heads of the output projection, and its rank a group.
        ratio: 1 (window alone), 4 (CSA: selected by an indexer) or 128 (HCA: all entries).
        window: sliding window, the query's own position among it (128).
        index_heads, topk: of the indexer, ratio 4 alone.
        rope: its 64 columns; theta follows the kind of layer.
        norm_eps: of all RMS norms.
    """

    hidden: int
    heads: int
    q_rank: int
    groups: int
    out_rank: int
    ratio: int
    window: int
    index_heads: int
    topk: int
    rope: RopeParameters
    norm_eps: float

    def __post_init__(self) -> None:
        if self.ratio not in COMPRESS_RATIOS:
            raise UnsupportedError("V4Parameters", f"ratio {self.ratio}", COMPRESS_RATIOS)
        positive = ("hidden", "heads", "q_rank", "groups", "out_rank", "window", "index_heads")
        _check_sizes(self, positive)
        if self.heads % self.groups:
            raise invalid("V4Parameters", "groups", f"a divisor of {self.heads}", self.groups)
        # Made once: torch.compile cannot trace the making.
        _ = self.head_rope, self.index_rope, self.compressor, self.index_compressor

    @property
    def scale(self) -> float:
        """Of the scores: no yarn factor in V4."""
        return LATENT**-0.5

    @functools.cached_property
    def head_rope(self) -> RopeParameters:
        """The tables over the last 64 of 512 columns."""
        return dataclasses.replace(self.rope, head_dim=LATENT, rotary_dim=ROPE)

    @functools.cached_property
    def index_rope(self) -> RopeParameters:
        """The tables over the last 64 of the indexer's 128 columns."""
        return dataclasses.replace(self.rope, head_dim=INDEX_DIM, rotary_dim=ROPE)

    @functools.cached_property
    def compressor(self) -> CompressorParameters:
        """Of the attention's own entries."""
        return CompressorParameters(self.ratio, self.ratio == 4, LATENT, self.norm_eps)

    @functools.cached_property
    def index_compressor(self) -> CompressorParameters:
        """Of the indexer's keys."""
        return CompressorParameters(self.ratio, self.ratio == 4, INDEX_DIM, self.norm_eps)

    def most_entries(self, max_seq_len: int) -> int:
        """Return how many compressed entries a query names at most (ratio 4 or 128)."""
        return self.topk if self.has_indexer else max(1, max_seq_len // self.ratio)

    @property
    def has_indexer(self) -> bool:
        """Whether entries are selected (ratio 4)."""
        return self.ratio == 4


Shapes = dict[str, tuple[int, ...]]


def v32_weight_shapes(params: V32Parameters) -> Shapes:
    """Return {name: shape} of the masters; `k_up` and `v_up` are the two halves of kv_b a head.

    `index_norm` and its bias are used in fp32, as vLLM holds them.
    """
    p = params
    return {
        "q_a": (p.q_rank, p.hidden),
        "q_norm": (p.q_rank,),
        "q_b": (p.heads * (p.nope_dim + ROPE), p.q_rank),
        "kv_a": (LATENT + ROPE, p.hidden),
        "kv_norm": (LATENT,),
        "k_up": (p.heads, LATENT, p.nope_dim),
        "v_up": (p.heads, p.value_dim, LATENT),
        "out": (p.hidden, p.heads * p.value_dim),
        "index_q": (p.index_heads * INDEX_DIM, p.q_rank),
        "index_k": (INDEX_DIM, p.hidden),
        "index_weights": (p.index_heads, p.hidden),
        "index_norm": (INDEX_DIM,),
        "index_norm_bias": (INDEX_DIM,),
    }


def v4_weight_shapes(params: V4Parameters) -> Shapes:
    """Return {name: shape} of the masters; names that end in `sinks` or `bias` are fp32."""
    p = params
    shapes: Shapes = {
        "q_a": (p.q_rank, p.hidden),
        "q_norm": (p.q_rank,),
        "q_b": (p.heads * LATENT, p.q_rank),
        "kv": (LATENT, p.hidden),
        "kv_norm": (LATENT,),
        "sinks": (p.heads,),
        "out_a": (p.groups, p.out_rank, p.heads * LATENT // p.groups),
        "out_b": (p.hidden, p.groups * p.out_rank),
    }
    if p.ratio > 1:
        width = p.compressor.state_width
        shapes |= {
            "compress": (2 * width, p.hidden),
            "compress_bias": (p.ratio, width),
            "compress_norm": (LATENT,),
        }
    if p.has_indexer:
        width = p.index_compressor.state_width
        shapes |= {
            "index_q": (p.index_heads * INDEX_DIM, p.q_rank),
            "index_weights": (p.index_heads, p.hidden),
            "index_compress": (2 * width, p.hidden),
            "index_compress_bias": (p.ratio, width),
            "index_compress_norm": (INDEX_DIM,),
        }
    return shapes
