"""Every FP8 and expert op, again, in another process and from views: the same bytes (R1)."""

from __future__ import annotations

import pytest
import torch
from child_process import run_python
from fresh_process import output_of_process
from interpreted import output_interpreted
from moe_cases import calls
from strided_cases import misread, packed, strided, turned

from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

SOURCE = """
from moe_cases import calls
from strided_cases import packed

for call in calls("cpu", "reference", seed={seed}).values():
    for _ in range(2):
        print_bits(call(packed))
"""
SOURCE_CUDA = """
import hashlib
import torch
from moe_cases import calls
from strided_cases import packed

for call in calls("cuda").values():
    for _ in range(2):
        data = call(packed).contiguous().cpu().view(torch.uint8).numpy().tobytes()
        print(hashlib.sha256(data).hexdigest())
"""
INTERPRETED = """
import warnings
import interpreted_fp8
from moe_cases import calls
from strided_cases import packed, strided, turned
from consistent_kernels.testing import bitwise_equal

interpreted_fp8.install()
warnings.simplefilter("ignore", RuntimeWarning)
for name, call in calls("cpu").items():
    for place in (strided, turned):
        if not bitwise_equal(call(place), call(packed)):
            print("other bits:", name, place.__name__)
"""

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="Triton programs need a CUDA device"
)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return output_of_process(SOURCE.format(seed=1), threads=1).split()


def test_moe_ops_are_stable_across_processes(printed: list[str]) -> None:
    assert len(printed) == 2 * len(calls("cpu", "reference"))
    assert printed[::2] == printed[1::2]
    assert output_of_process(SOURCE.format(seed=1), threads=3).split() == printed


def test_control_other_inputs_print_other_bits(printed: list[str]) -> None:
    other = output_of_process(SOURCE.format(seed=2), threads=1).split()
    assert all(ours != theirs for ours, theirs in zip(printed, other, strict=True))


def test_moe_ops_take_strided_arguments_by_reference() -> None:
    for name, call in calls("cpu", "reference").items():
        expected = call(packed)
        for place in (strided, turned):
            assert_bitwise_equal(call(place), expected, f"{name}, {place.__name__}")
        assert not bitwise_equal(call(misread), expected), f"control: {name} shows nothing"


def test_moe_ops_take_strided_arguments_interpreted() -> None:
    assert output_interpreted(INTERPRETED) == ""


@pytest.mark.gpu
@needs_cuda
def test_moe_ops_are_stable_across_processes_on_cuda() -> None:
    first, second = (run_python("-c", SOURCE_CUDA) for _ in range(2))
    assert first.returncode == 0, first.stderr
    digests = first.stdout.split()
    assert digests[::2] == digests[1::2]
    assert second.stdout == first.stdout


@pytest.mark.gpu
@needs_cuda
def test_moe_ops_take_strided_arguments_on_cuda() -> None:
    for name, call in calls("cuda").items():
        expected = call(packed)
        for place in (strided, turned):
            assert_bitwise_equal(call(place), expected, f"{name}, {place.__name__}")
        assert not bitwise_equal(call(misread), expected), f"control: {name} shows nothing"
