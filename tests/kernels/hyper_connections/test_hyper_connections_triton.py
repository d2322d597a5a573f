"""The Triton programs of the hyper-connection maps: compiled for absent GPUs, and interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import output_interpreted

from consistent_kernels.hyper_connections.spec import (
    K_PART,
    RUN_PARTS,
    SPAN_RUNS,
    MapSchedule,
    MixSchedule,
    map_schedule,
    mix_schedule,
    post_schedule,
)
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile, stack_bytes

SPAN_PARTS = RUN_PARTS * SPAN_RUNS
PARTS = (1, RUN_PARTS, SPAN_PARTS)
FLOATS = {"norm_eps", "eps", "post_multiplier"}
BF16 = {"x_ptr", "y_ptr", "input_ptr", "out_ptr"}


def signature_of(kernel: object, constexprs: dict[str, object], bf16: set[str]) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in bf16:
            return "*bf16"
        if name.endswith("_ptr"):
            return "*fp32"
        return "fp32" if name in FLOATS else "i32"

    return {name: kind(name) for name in kernel.arg_names if name not in constexprs}


def mix_constexprs(schedule: MixSchedule) -> dict[str, object]:
    return {
        "K": 4 * 4096, "N": 24, "BLOCK_N": 32, "ROW_TILE": schedule.row_tile, "K_PART": K_PART,
        "PART_LEVELS": 4, "RUN_PARTS": RUN_PARTS, "PARTS": schedule.parts, "OVERLAP": True,
        "EARLY": schedule.early,
    }  # fmt: skip


def map_constexprs(schedule: MapSchedule, parts: int) -> dict[str, object]:
    return {
        "H": 4096, "S": 4, "STREAM_LEVELS": 2, "N": 24, "BLOCK_N": 32, "PARTS": parts,
        "RUN_PARTS": RUN_PARTS, "SPAN_PARTS": SPAN_PARTS, "ENTRIES": 128 // parts, "SPANS": 4,
        "SPAN_LEVELS": 2, "BLOCK_H": schedule.hidden_block, "COMB_TOKENS": schedule.comb_tokens,
        "ITERATIONS": 20, "HAS_COMB": True, "SAFE": True, "OVERLAP": True,
    }  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [64, 256, 4096])
def test_hyper_connections_cross_compile(arch: int, tokens: int, tmp_path: Path) -> None:
    from consistent_kernels.hyper_connections.triton import _hc_map_fwd_kernel
    from consistent_kernels.hyper_connections.triton_mix import _hc_mix_fwd_kernel
    from consistent_kernels.hyper_connections.triton_post import _hc_post_fwd_kernel

    mix, maps = mix_schedule(tokens, 24, arch == 90), map_schedule(tokens, 24)
    post = post_schedule(tokens)
    compiled = [
        (_hc_mix_fwd_kernel, mix_constexprs(mix), mix.warps, mix.stages, 0),
        (_hc_map_fwd_kernel, map_constexprs(maps, mix.parts), maps.warps, 3, maps.registers),
    ]
    if tokens == 4096:
        constexprs = {"H": 4096, "S": 4, "BLOCK_H": post.hidden_block}
        compiled.append((_hc_post_fwd_kernel, constexprs, post.warps, 3, 0))
    for kernel, constexprs, warps, stages, registers in compiled:
        cubin = cross_compile(
            kernel,
            arch=arch,
            signature=signature_of(kernel, constexprs, BF16),
            constexprs=constexprs,
            num_warps=warps,
            num_stages=stages,
            registers=registers,
            enable_fp_fusion=False,
            aligned=[n for n in kernel.arg_names if n.endswith(("_ptr", "_stride"))],
        )
        assert cubin.startswith(b"\x7fELF")
        assert stack_bytes(cubin, tmp_path) == 0


def test_a_schedule_takes_whole_parts_runs_or_spans() -> None:
    batches = (1, 64, 128, 129, 1024, 1025, 4096, 1 << 20)
    chosen = [mix_schedule(tokens, 24, True).parts for tokens in batches]
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(PARTS)
    assert {mix_schedule(tokens, 24, False).row_tile for tokens in batches} == {64}


INTERPRETED = """
import torch
from consistent_kernels.hyper_connections.reference import hc_head_ref, hc_post_ref, hc_pre_ref
from consistent_kernels.hyper_connections.spec import MapSchedule, MixSchedule
from consistent_kernels.hyper_connections.triton import hc_map_fwd
from consistent_kernels.hyper_connections.triton_post import hc_post_fwd
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

g = torch.Generator().manual_seed(0)
# 4,640 columns: one span, one run of the next, one part of the next run, and a tail.
streams, hidden = 4, 1160
# fp16, for the interpreter takes bf16 for integers.
x = hazard_activations((3, streams, hidden), seed=1, dtype=torch.float16)
y = hazard_activations((3, hidden), seed=2, dtype=torch.float16)
fn = torch.randn(24, streams * hidden, generator=g) * 0.05
scale, base = 1 + 0.2 * torch.randn(3, generator=g), 0.3 * torch.randn(24, generator=g)
numbers = (1e-6, 1e-6, 3, 2.0)
maps = MapSchedule(hidden_block=1024, comb_tokens=2)
ours = hc_map_fwd(x, fn, scale, base, *numbers, has_comb=True)
expected = hc_pre_ref(x, fn, scale, base, *numbers)
# The mixes differ in the order of fp32 additions only; the maps amplify it a few times.
for actual, value, bound in zip(ours, expected, (2**-6, 1e-4, 1e-4), strict=True):
    assert torch.allclose(actual.float(), value.float(), rtol=bound, atol=1e-4)
assert_bitwise_equal(hc_post_fwd(y, x, *expected[1:]), hc_post_ref(y, x, *expected[1:]))
head = hc_map_fwd(x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6, 1, 1.0, has_comb=False)[0]
value = hc_head_ref(x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6)
assert torch.allclose(head.float(), value.float(), rtol=2**-6, atol=1e-4)
alone = hc_map_fwd(x[2:], fn, scale, base, *numbers, has_comb=True)
for actual, value in zip(alone, ours, strict=True):
    assert_bitwise_equal(actual, value[2:])
for parts in PARTS:
    mix = MixSchedule(parts, row_tile=16)
    other = hc_map_fwd(x, fn, scale, base, *numbers, has_comb=True, mix=mix, maps=maps)
    for actual, value in zip(other, ours, strict=True):
        assert_bitwise_equal(actual, value)
# The control: the columns in another order are other additions, and other bits.
order = torch.arange(hidden).roll(128)
turned = fn.view(24, streams, hidden)[:, :, order].reshape(24, -1)
other = hc_map_fwd(x[:, :, order], turned, scale, base, *numbers, has_comb=True)
assert not bitwise_equal(other[2], ours[2])
assert torch.allclose(other[2], ours[2], atol=1e-4)
print("equal")
""".replace("PARTS", str(PARTS))


def test_hyper_connections_interpreted_match_reference() -> None:
    assert output_interpreted(INTERPRETED).strip() == "equal"


def weights_on_cuda(hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    fn = torch.randn(24, 4 * hidden, generator=g) * 0.05
    scale, base = 1 + 0.2 * torch.randn(3, generator=g), 0.3 * torch.randn(24, generator=g)
    return fn.cuda(), scale.cuda(), base.cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernels")
def test_the_terms_of_fn_lose_no_bit() -> None:
    """Rows of x with one 1 pick single elements of fn: sums of three terms, and zeros."""
    from consistent_kernels.hyper_connections.triton_mix import hc_mix_fwd

    g = torch.Generator().manual_seed(6)
    fn = torch.randn(24, 4096, generator=g).cuda()
    at = torch.randint(4096, (256,), generator=g).cuda()
    x = torch.zeros(256, 4096, dtype=torch.bfloat16, device="cuda")
    x[torch.arange(256, device="cuda"), at] = 1.0
    picked = hc_mix_fwd(x, fn, MixSchedule(SPAN_PARTS), False)[0]
    assert_bitwise_equal(picked[:, :24].contiguous(), fn[:, at].t().contiguous())
    assert_bitwise_equal(picked[:, 24].contiguous(), torch.ones(256, device="cuda"))
    # The control: two terms alone are not fn.
    high = fn.bfloat16().float()
    assert not torch.equal(high + (fn - high).bfloat16().float(), fn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernels")
@pytest.mark.parametrize("reach", [1.0, 30.0])
def test_divisions_without_a_branch_have_the_bits_of_div_rn(
    reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consistent_kernels.hyper_connections import triton as kernels

    x = hazard_activations((4096, 4, 96), seed=5, device="cuda")
    fn, scale, base = weights_on_cuda(96)
    run = (x, fn, reach * scale, base, 1e-6, 1e-6, 20, 2.0, True)
    fast = kernels.hc_map_fwd(*run)
    monkeypatch.setattr(kernels, "has_safe_eps", lambda eps: False)
    for actual, value in zip(fast, kernels.hc_map_fwd(*run), strict=True):
        assert_bitwise_equal(actual, value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernels")
@pytest.mark.parametrize("tokens", [5, 200])
def test_hc_pre_of_eight_streams_gives_equal_bits(tokens: int) -> None:
    """Eighty mixes: no pipeline, or shared memory does not hold it."""
    from consistent_kernels.hyper_connections.triton import hc_map_fwd

    x = hazard_activations((tokens, 8, 640), seed=7, device="cuda")
    g = torch.Generator().manual_seed(8)
    weights = [torch.randn(80, 8 * 640, generator=g) * 0.05, torch.ones(3), torch.zeros(80)]
    run = (x, *(value.cuda() for value in weights), 1e-6, 1e-6, 20, 2.0, True)
    expected = hc_map_fwd(*run)
    for parts in PARTS:
        for actual, value in zip(
            hc_map_fwd(*run, mix=MixSchedule(parts, warps=8, stages=1)), expected, strict=True
        ):
            assert_bitwise_equal(actual, value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernels")
@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_schedules_of_hc_pre_give_equal_bits(tokens: int) -> None:
    from consistent_kernels.hyper_connections.triton import hc_map_fwd

    x = hazard_activations((tokens, 4, 1160), seed=4, device="cuda")
    weights = weights_on_cuda(1160)
    numbers = (1e-6, 1e-6, 20, 2.0)
    expected = hc_map_fwd(x, *weights, *numbers, has_comb=True)
    maps = MapSchedule()
    pairs = [(MixSchedule(parts), maps) for parts in PARTS]
    pairs += [(MixSchedule(RUN_PARTS, row_tile=128, warps=8), maps)]
    pairs += [(MixSchedule(RUN_PARTS, early=False), MapSchedule(1024, 2, 8))]
    pairs += [(MixSchedule(RUN_PARTS), MapSchedule(overlap=False))]
    pairs += [(MixSchedule(1, early=False), MapSchedule(registers=128))]
    pairs += [(MixSchedule(1, row_tile=128, warps=8), MapSchedule(1024, registers=128))]
    late = MixSchedule(SPAN_PARTS, row_tile=128, warps=8, early=False)
    pairs += [(late, MapSchedule(comb_tokens=8))]
    for mix, schedule in pairs:
        other = hc_map_fwd(x, *weights, *numbers, has_comb=True, mix=mix, maps=schedule)
        for actual, value in zip(other, expected, strict=True):
            assert_bitwise_equal(actual, value)
