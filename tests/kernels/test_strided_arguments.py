"""Triton programs read arguments where they lie: positions, slots, borders, sinks, norm weights.

A kernel walks a pointer; only its launcher knows strides. The reference takes any, so a launcher
that forgets gives other results without a word.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import output_interpreted
from strided_cases import calls, misread, packed, strided, turned

from consistent_kernels.testing import bitwise_equal

INTERPRETED = """
import warnings
import interpreted_fp8
from strided_cases import calls, misread, packed, strided, turned
from consistent_kernels.testing import bitwise_equal

interpreted_fp8.install()
warnings.simplefilter("ignore", RuntimeWarning)
for name, call in calls("cpu").items():
    expected = call(packed)
    for place in (strided, turned):
        if not bitwise_equal(call(place), expected):
            print("other bits:", name, place.__name__)
    if bitwise_equal(call(misread), expected):
        print("shows nothing:", name)
"""


def test_strided_arguments_move_no_bit_interpreted() -> None:
    """Also the control: each call shows what a launcher would do that took them for packed."""
    assert output_interpreted(INTERPRETED) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton programs need a CUDA device")
def test_strided_arguments_move_no_bit() -> None:
    for name, call in calls("cuda").items():
        expected = call(packed)
        for place in (strided, turned):
            assert bitwise_equal(call(place), expected), (name, place.__name__)
        assert not bitwise_equal(call(misread), expected), f"control: {name} shows nothing"
