"""What an op's fake says of its results is what they are: a compiled graph asserts the strides.

A result that follows the strides of an argument would stop such a graph, or be read wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moe_cases
import pytest
import strided_cases
import torch
from implementations import REFERENCE_CPU, TRITON_CUDA
from strided_cases import packed, strided, turned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Layout = tuple[Any, ...]


def layouts(results: Any) -> list[Layout]:
    """Shape, dtype and strides of each tensor; an empty one may have any strides."""
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return [(x.shape, x.dtype, x.stride() if x.numel() else None) for x in tensors]


class Compared(TorchDispatchMode):
    """Runs every op of ours and its fake, and keeps the ops whose layouts differ."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.differing: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "consistent_kernels":
            return func(*args, **kwargs)
        with FakeTensorMode() as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            promised = layouts(func(*fakes[0], **fakes[1]))
        results = func(*args, **kwargs)
        self.seen.add(func.name())
        if layouts(results) != promised:
            self.differing.add(func.name())
        return results


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA])
def calls(request: pytest.FixtureRequest) -> list[Callable]:
    impl, device = request.param
    return [
        call for cases in (strided_cases, moe_cases) for call in cases.calls(device, impl).values()
    ]


@pytest.mark.parametrize("place", [packed, strided, turned])
def test_results_lie_as_their_fakes_say(calls: list[Callable], place: strided_cases.Place) -> None:
    with Compared() as compared:
        for call in calls:
            call(place)
    assert compared.differing == set()
    assert len(compared.seen) > 20


def test_control_a_result_with_other_strides_is_seen() -> None:
    with torch.library._scoped_library("consistent_kernels", "FRAGMENT") as library:
        library.define("turned_copy(Tensor x) -> Tensor")
        library.impl("turned_copy", turned, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "consistent_kernels::turned_copy", torch.empty_like, lib=library
        )
        with Compared() as compared:
            torch.ops.consistent_kernels.turned_copy(torch.ones(3, 2))
    assert compared.differing == {"consistent_kernels::turned_copy"}
