"""The binaries that a report names: every compiled variant of a Triton kernel, by its code."""

from __future__ import annotations

import types

import pytest
import torch

from consistent_kernels.binaries import served_binaries


def test_served_binaries_name_a_variant_and_hash_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from consistent_kernels.rms_norm.triton import _rms_norm_fwd_kernel as kernel

    def compiled(key: str, code: bytes) -> types.SimpleNamespace:
        return types.SimpleNamespace(hash=key * 64, asm={"cubin": code})

    monkeypatch.setattr(kernel, "device_caches", {0: ({"x": compiled("a", b"one")}, None)})
    first = served_binaries()
    name = f"triton._rms_norm_fwd_kernel.{'a' * 16}"
    assert len(first[name]) == 64
    monkeypatch.setattr(kernel, "device_caches", {0: ({"x": compiled("a", b"two")}, None)})
    assert served_binaries()[name] != first[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a CUDA device")
def test_served_binaries_lists_what_ran() -> None:
    from consistent_kernels.rms_norm import add_rms_norm, rms_norm

    x = torch.ones(3, 320, device="cuda", dtype=torch.bfloat16)
    rms_norm(x, x[0], 1e-6, impl="triton")
    before = {name for name in served_binaries() if "_rms_norm_fwd_kernel" in name}
    add_rms_norm(x, x, x[0], 1e-6, impl="triton")
    after = {name for name in served_binaries() if "_rms_norm_fwd_kernel" in name}
    assert before
    assert len(after - before) == 1
