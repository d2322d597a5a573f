"""Bytewise equality: `torch.equal` takes +0.0 for -0.0 and refuses NaN == NaN, integers do not."""

from __future__ import annotations

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of `tensor` as an integer tensor of the same shape."""
    return tensor.detach().contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree (NaN payloads and signed zeros count)."""
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.equal(integer_view(actual), integer_view(expected))
    )


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, msg: str = "") -> None:
    """Raise AssertionError naming the first differing coordinate, its values and bit patterns."""
    prefix = f"{msg}: " if msg else ""
    assert actual.dtype == expected.dtype, f"{prefix}dtype {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{prefix}shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    )
    assert actual.device == expected.device, f"{prefix}device {actual.device} != {expected.device}"
    bits_actual, bits_expected = integer_view(actual), integer_view(expected)
    differs = bits_actual != bits_expected
    count = int(differs.sum())
    if count == 0:
        return
    first = tuple(int(i) for i in differs.nonzero()[0])
    width = actual.element_size() * 2
    mask = (1 << (4 * width)) - 1
    raise AssertionError(
        f"{prefix}{count} of {differs.numel()} elements differ; first at {first}: "
        f"{actual[first].item()!r} (0x{int(bits_actual[first]) & mask:0{width}x}) != "
        f"{expected[first].item()!r} (0x{int(bits_expected[first]) & mask:0{width}x})"
    )
