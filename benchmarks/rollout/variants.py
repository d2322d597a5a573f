"""The engines that are compared: each is an environment."""

from __future__ import annotations

import dataclasses

from consistent_kernels.errors import require_implementation

STOCK = "stock"
OURS = "consistent"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One engine.

    Attributes:
        name: as in the rows and in `--variant`.
        environment: set for its process, and for its trainer's.
        consistent: whether the plugin serves it; then a differing log-prob refuses its speed, and
            the bridged trainer scores its samples too.
    """

    name: str
    environment: dict[str, str]
    consistent: bool


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(STOCK, {"VLLM_CONSISTENT": "0"}, False),
        Variant(OURS, {"VLLM_CONSISTENT": "1"}, True),
        Variant("triton", {"VLLM_CONSISTENT": "1", "VLLM_CONSISTENT_PROGRAM": "triton"}, True),
        Variant("batch_invariant", {"VLLM_CONSISTENT": "0", "VLLM_BATCH_INVARIANT": "1"}, False),
    )
}


def variants(names: list[str], *, with_stock: bool) -> list[Variant]:
    """Return the named variants, behind stock where it is measured against.

    Raises:
        UnsupportedError: an unknown name; stock, which is always there.
    """
    choices = [name for name in VARIANTS if name != STOCK]
    for name in names:
        require_implementation("benchmarks.rollout", name, choices)
    first = [VARIANTS[STOCK]] if with_stock else []
    return [*first, *(VARIANTS[name] for name in dict.fromkeys(names))]
