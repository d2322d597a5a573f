"""Every op of the sparse attention, again and in another process: the same bytes (R1)."""

from __future__ import annotations

import pytest
import torch
from child_process import run_python
from fresh_process import output_of_process
from strided_cases import calls, packed, strided, turned

from consistent_kernels.testing import assert_bitwise_equal

SOURCE = """
from strided_cases import calls, packed

for name, call in calls("cpu", "reference", seed={seed}).items():
    for _ in range(2):
        print_bits(call(packed))
"""
SOURCE_CUDA = """
import hashlib
import torch
from strided_cases import calls, packed

for call in calls("cuda").values():
    for _ in range(2):
        data = call(packed).contiguous().cpu().view(torch.uint8).numpy().tobytes()
        print(hashlib.sha256(data).hexdigest())
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return output_of_process(SOURCE.format(seed=1), threads=1).split()


def test_sparse_ops_are_stable_across_processes(printed: list[str]) -> None:
    assert len(printed) == 2 * len(calls("cpu", "reference"))
    assert printed[::2] == printed[1::2]
    assert output_of_process(SOURCE.format(seed=1), threads=3).split() == printed


def test_control_other_inputs_print_other_bits(printed: list[str]) -> None:
    other = output_of_process(SOURCE.format(seed=2), threads=1).split()
    assert all(ours != theirs for ours, theirs in zip(printed, other, strict=True))


def test_sparse_ops_take_strided_arguments_by_reference() -> None:
    """What the Triton programs are held to in test_strided_arguments.py."""
    for name, call in calls("cpu", "reference").items():
        for place in (strided, turned):
            assert_bitwise_equal(call(place), call(packed), f"{name}, {place.__name__}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton programs need a CUDA device")
def test_sparse_ops_are_stable_across_processes_on_cuda() -> None:
    first, second = (run_python("-c", SOURCE_CUDA) for _ in range(2))
    assert first.returncode == 0, first.stderr
    digests = first.stdout.split()
    assert digests[::2] == digests[1::2]
    assert second.stdout == first.stdout
