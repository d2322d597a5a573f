"""Relations of the FP8 caches: bytes, pages, poison, absent entries, phases."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from kv_cases import POISON, e4m3_byte, fp32, hazard_rows, poisoned_cache

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    LAYOUTS,
    V4,
    V32,
    KVLayout,
    WorkspaceBounds,
    gather_indexer_k,
    gather_kv_fp8,
    new_cache,
    round_trip_kv_fp8,
    workspace_indices,
    write_kv_fp8,
)
from consistent_kernels.kv_cache_fp8.reference import quantize_kv_ref, read_slots_ref
from consistent_kernels.testing import BATCH_SIZES, assert_bitwise_equal, bitwise_equal

EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def expected_scale(values: list[Fraction], layout: KVLayout, power_of_two: bool) -> Fraction:
    amax = max(abs(value) for value in values)
    if layout is V32:
        return max(fp32(amax / 448), Fraction(2) ** -126)
    scale = fp32(max(amax, fp32(1e-4)) / 448)
    if not power_of_two:
        return scale
    power = Fraction(2) ** -40
    while power < scale:
        power *= 2
    return power


@pytest.mark.parametrize(
    ("layout", "scale_format"),
    [(V32, "fp32"), (V4, "ue8m0"), (INDEXER, "fp32"), (INDEXER, "ue8m0")],
)
def test_write_kv_fp8_matches_rational_arithmetic(layout: KVLayout, scale_format: str) -> None:
    kv = hazard_rows(7, layout, seed=1)
    values, scale = quantize_kv_ref(kv, layout, scale_format)
    for token in range(7):
        for group in range(layout.groups):
            columns = slice(group * layout.group, (group + 1) * layout.group)
            exact = [Fraction(value) for value in kv[token, columns].tolist()]
            s = expected_scale(exact, layout, scale_format == "ue8m0")
            assert Fraction(scale[token, group].item()) == s
            got = values[token, columns].tolist()
            for value, byte, source in zip(exact, got, kv[token, columns].tolist(), strict=True):
                # The division rounds to fp32 first; -0.0 keeps its sign.
                want = e4m3_byte(fp32(value / s))
                sign = 0x80 if str(source).startswith("-") else 0
                assert byte == (want & 0x7F | sign)


@EACH_LAYOUT
def test_kv_cache_fp8_matches_reference(impl_device: tuple[str, str], layout: KVLayout) -> None:
    impl, device = impl_device
    kv = hazard_rows(50, layout, seed=2, device=device)
    rows = round_trip_kv_fp8(kv, layout=layout, impl=impl)
    fp8 = layout.fp8_values
    assert_bitwise_equal(rows[:, fp8:], kv[:, fp8:].contiguous())
    x = kv[:, :fp8].double().unflatten(1, (layout.groups, layout.group))
    amax = x.abs().amax(-1, keepdim=True)
    # Half a unit of e4m3 (2^-4 of the value, or 2^-10 of the scale below its normals), where the
    # scale is at most 2 amax / 448, or the floor's; then one rounding to bf16 (2^-8).
    scale = (amax.clamp_min(1e-4) if layout is not V32 else amax) / 448 * 2
    bound = x.abs() * (2**-4 + 2**-8 + 2**-11) + scale * 2**-10 + 2.0**-126
    error = (rows[:, :fp8].double().view_as(x) - x).abs()
    assert bool((error <= bound).all())


def test_cache_bytes_lie_where_flashmla_reads_them() -> None:
    # 656: values | scales | rope of one token together.
    kv = hazard_rows(16, V32, seed=3)
    cache = new_cache(1, 16, V32, "cpu")
    write_kv_fp8(kv, cache, int32(range(16), "cpu"), layout=V32, impl="reference")
    values, scale = quantize_kv_ref(kv, V32, "fp32")
    assert torch.equal(cache[0, :, :512], values)
    assert torch.equal(cache[0, :, 512:528].contiguous().view(torch.float32), scale)
    assert torch.equal(cache[0, :, 528:].contiguous().view(torch.bfloat16), kv[:, 512:])
    # 584: all tokens' values and ropes, then all tokens' 7 exponents and a zero.
    kv = hazard_rows(16, V4, seed=4)
    cache = new_cache(1, 16, V4, "cpu")
    write_kv_fp8(kv, cache, int32(range(16), "cpu"), layout=V4, impl="reference")
    values, scale = quantize_kv_ref(kv, V4, "ue8m0")
    flat = cache.flatten()
    data = flat[: 16 * 576].view(16, 576)
    assert torch.equal(data[:, :448], values)
    assert torch.equal(data[:, 448:].contiguous().view(torch.bfloat16), kv[:, 448:])
    exponents = flat[16 * 576 :].view(16, 8)
    assert torch.equal(torch.exp2(exponents[:, :7].float() - 127), scale)
    assert not bool(exponents[:, 7].any())
    # 132: all tokens' values, then all tokens' scales.
    kv = hazard_rows(16, INDEXER, seed=5)
    cache = new_cache(1, 16, INDEXER, "cpu")
    write_kv_fp8(kv, cache, int32(range(16), "cpu"), layout=INDEXER, impl="reference")
    values, scale = quantize_kv_ref(kv, INDEXER, "ue8m0")
    flat = cache.flatten()
    assert torch.equal(flat[: 16 * 128].view(16, 128), values)
    assert torch.equal(flat[16 * 128 :].view(torch.float32), scale[:, 0])


@EACH_LAYOUT
def test_write_kv_fp8_is_batch_invariant(impl_device: tuple[str, str], layout: KVLayout) -> None:
    impl, device = impl_device
    kv = hazard_rows(257, layout, seed=6, device=device)
    whole = round_trip_kv_fp8(kv, layout=layout, impl=impl)
    for rows in BATCH_SIZES:
        for start in {0, (257 - rows) // 2, 257 - rows}:
            part = slice(start, start + rows)
            got = round_trip_kv_fp8(kv[part], layout=layout, impl=impl)
            assert_bitwise_equal(got, whole[part].contiguous())


@EACH_LAYOUT
@pytest.mark.parametrize("block_size", [16, 64])
def test_gather_kv_fp8_paged_equals_contiguous(
    impl_device: tuple[str, str], layout: KVLayout, block_size: int
) -> None:
    # Two requests of 70 and 33 tokens: decoded token by token into scattered pages among poison,
    # against one contiguous private cache, as a trainer has it.
    impl, device = impl_device
    lengths = (70, 33)
    rows = [hazard_rows(n, layout, seed=7 + n, device=device) for n in lengths]
    contiguous = new_cache(8, block_size, layout, device)
    starts = int32([0, 70], device)
    write_kv_fp8(torch.cat(rows), contiguous, int32(range(103), device), layout=layout, impl=impl)
    pages = -(-70 // block_size)
    cache = poisoned_cache(2 * pages + 1, block_size, layout, device=device)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(8))
    table = order.view(2, pages).to(torch.int32)
    for request, kv in enumerate(rows):
        for chunk in (slice(0, 1), slice(1, 20), *(slice(i, i + 1) for i in range(20, len(kv)))):
            position = torch.arange(len(kv))[chunk]
            page = table[request, position // block_size]
            slots = (page * block_size + position % block_size).to(torch.int64)
            slots = torch.cat([slots, torch.tensor([-1])])
            padded = torch.cat([kv[chunk], torch.full_like(kv[:1], float("nan"))])
            write_kv_fp8(padded, cache, slots.to(device), layout=layout, impl=impl)
    table[1, -(-33 // block_size) :] = 2 * pages  # never needed: the spare, poisoned page
    generator = torch.Generator().manual_seed(9)
    positions = torch.stack(
        [torch.randint(-1, n, (40,), generator=generator) for n in (70, 33, 70)]
    ).to(torch.int32)
    positions[:, -5:] = -1
    requests = int32([0, 1, 0], device)
    args = (positions.to(device), requests)
    paged = gather_kv_fp8(cache, *args, layout=layout, impl=impl, block_table=table.to(device))
    packed = gather_kv_fp8(contiguous, *args, layout=layout, impl=impl, starts=starts)
    assert_bitwise_equal(paged, packed)
    assert bool(paged.isfinite().all())
    assert not bool(paged[positions.to(device) < 0].any())
    # Whole contexts, as prefill reads them, hold the same rows.
    places = torch.arange(70, dtype=torch.int32).expand(2, 70).clone()
    places[1, 33:] = -1
    whole = gather_kv_fp8(
        cache,
        places.to(device),
        int32([0, 1], device),
        layout=layout,
        impl=impl,
        block_table=table.to(device),
    )
    # The rows' indices come with them: into some columns of a wider tensor, from any first row.
    columns = torch.full((3, 50), 77, dtype=torch.int32, device=device)
    again = gather_kv_fp8(
        cache, *args, layout=layout, impl=impl, block_table=table.to(device),
        indices=columns[:, 7:47], first_row=11,
    )  # fmt: skip
    assert_bitwise_equal(again, paged)
    named = workspace_indices(args[0])
    assert_bitwise_equal(columns[:, 7:47], torch.where(named >= 0, named + 11, -1))
    assert bool((columns[:, :7] == 77).all() and (columns[:, 47:] == 77).all())
    index = workspace_indices(args[0], requests, 70).long()
    picked = whole.flatten(0, 1)[index.clamp_min(0)]
    picked[index < 0] = 0.0
    assert_bitwise_equal(picked, paged)


@EACH_LAYOUT
def test_write_kv_fp8_touches_its_slots_only(
    impl_device: tuple[str, str], layout: KVLayout
) -> None:
    impl, device = impl_device
    cache = poisoned_cache(3, 16, layout, device=device)
    kv = hazard_rows(3, layout, seed=10, device=device)
    write_kv_fp8(kv, cache, int32([40, -1, 5], device), layout=layout, impl=impl)
    step = cache.stride(0)
    flat = cache.as_strided((3 * step,), (1,)).cpu()
    token_step, bf16_at, scale_step, scale_at = layout.offsets(16)
    touched = torch.zeros(3 * step, dtype=torch.bool)
    for slot in (40, 5):
        base, token = slot // 16 * step, slot % 16
        touched[base + token * token_step :][: layout.fp8_values] = True
        touched[base + token * token_step + bf16_at :][: 2 * layout.bf16_values] = True
        touched[base + scale_at + token * scale_step :][: layout.scale_room] = True
    assert int(touched.sum()) == 2 * layout.token_bytes
    assert bool((flat[~touched] == POISON).all())


@EACH_LAYOUT
def test_kv_cache_fp8_is_run_to_run_stable(impl_device: tuple[str, str], layout: KVLayout) -> None:
    impl, device = impl_device
    kv = hazard_rows(129, layout, seed=11, device=device)
    first = round_trip_kv_fp8(kv, layout=layout, impl=impl)
    for block_size in (16, 64, 128):
        again = round_trip_kv_fp8(kv, layout=layout, impl=impl, block_size=block_size)
        assert_bitwise_equal(again, first)


@EACH_LAYOUT
def test_kv_cache_fp8_nonfinite_values_are_defined(
    impl_device: tuple[str, str], layout: KVLayout
) -> None:
    impl, device = impl_device
    kv = hazard_rows(6, layout, seed=12, device=device)
    clean = round_trip_kv_fp8(kv, layout=layout, impl=impl)
    kv[3, 7], kv[5, 3] = float("nan"), float("-inf")
    rows = round_trip_kv_fp8(kv, layout=layout, impl=impl)
    # A NaN stays where it is; an infinity takes its group with it; other rows see neither.
    group = slice(0, layout.group)
    assert bool(rows[3, 7].isnan())
    assert int(rows[3].isnan().sum()) == 1
    assert bool(rows[5, group].isnan().all())
    assert int(rows[5].isnan().sum()) == layout.group
    bits = rows[rows.isnan()].view(torch.int16)
    assert bool((bits == 0x7FC0).all())
    for row in (0, 1, 2, 4):
        assert_bitwise_equal(rows[row], clean[row])


@EACH_LAYOUT
def test_kv_cache_fp8_compiled_equals_eager(impl_device: tuple[str, str], layout: KVLayout) -> None:
    impl, device = impl_device
    kv = hazard_rows(20, layout, seed=16, device=device)
    slots, zero = int32(range(20), device), int32([0], device)

    def step(cache: torch.Tensor) -> torch.Tensor:
        write_kv_fp8(kv, cache, slots, layout=layout, impl=impl)
        return gather_kv_fp8(cache, slots[None], zero, layout=layout, impl=impl, starts=zero)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    caches = [new_cache(2, 16, layout, device) for _ in range(2)]
    assert_bitwise_equal(compiled(caches[0]), step(caches[1]))
    assert_bitwise_equal(caches[0], caches[1])


def test_gather_indexer_k_returns_the_stored_bytes(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    kv = hazard_rows(33, INDEXER, seed=13, device=device)
    cache = new_cache(3, 16, INDEXER, device)
    slots = int32(range(33), device)
    write_kv_fp8(kv, cache, slots, layout=INDEXER, impl=impl)
    zero = int32([0], device)
    values, scale = gather_indexer_k(cache, slots[None], zero, starts=zero)
    expected, expected_scale = quantize_kv_ref(kv, INDEXER, "ue8m0")
    assert torch.equal(values[0].view(torch.uint8), expected)
    assert_bitwise_equal(scale[0], expected_scale[:, 0].contiguous())


def test_workspace_is_sized_from_static_bounds() -> None:
    bounds = WorkspaceBounds(
        V32, selected_queries=256, k=2048, context_positions=163840, contexts=2
    )
    assert bounds.rows == 256 * 2048
    assert bounds.nbytes == 256 * 2048 * 576 * 2
    small = WorkspaceBounds(V4, selected_queries=2, k=4, context_positions=16)
    workspace = small.allocate("cpu")
    assert workspace.shape == (16, 512)
    assert small.view(workspace, 2, 4).data_ptr() == workspace.data_ptr()
    with pytest.raises(InvalidInputError, match=r"queries \* k must be at most 16, got 20"):
        small.view(workspace, 5, 4)
    positions = int32([[3, 0, -1], [5, -1, -1]], "cpu")
    assert workspace_indices(positions).tolist() == [[0, 1, -1], [3, -1, -1]]
    shifted = workspace_indices(positions, int32([0, 1], "cpu"), 16)
    assert shifted.tolist() == [[3, 0, -1], [21, -1, -1]]


def test_control_bf16_scale_on_reading_differs(impl_device: tuple[str, str]) -> None:
    # FlashMLA's FP8 decode rounds an fp32 scale to bf16 first: not what prefill reads.
    impl, device = impl_device
    kv = hazard_rows(64, V32, seed=14, device=device)
    cache = new_cache(4, 16, V32, device)
    slots = int32(range(64), device)
    write_kv_fp8(kv, cache, slots, layout=V32, impl=impl)
    values, scale, _ = read_slots_ref(cache, slots.long(), V32)
    q = values.view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
    early = (q * scale.bfloat16().float()[:, :, None]).bfloat16().flatten(1)
    rows = round_trip_kv_fp8(kv, layout=V32, impl=impl)
    assert not bitwise_equal(early, rows[:, :512].contiguous())


def test_control_reciprocal_instead_of_division_differs() -> None:
    kv = hazard_rows(257, V32, seed=15)
    values, scale = quantize_kv_ref(kv, V32, "fp32")
    x = kv[:, :512].float().unflatten(1, (4, 128))
    scaled = (x * (1.0 / scale)[:, :, None]).clamp(-448, 448)
    other = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    assert not torch.equal(values, other)


def test_kv_cache_fp8_rejects_bad_inputs() -> None:
    cache = new_cache(2, 16, V32, "cpu")
    kv = torch.zeros(2, 576, dtype=torch.bfloat16)
    slots = int32([0, 1], "cpu")
    with pytest.raises(InvalidInputError, match=r"uint8 of shape \[blocks, block_size, 584\]"):
        write_kv_fp8(kv, cache, slots, layout=V4, impl="reference")
    with pytest.raises(InvalidInputError, match=r"kv must be bfloat16 of shape \[T, 576\]"):
        write_kv_fp8(kv.float(), cache, slots, layout=V32, impl="reference")
    with pytest.raises(InvalidInputError, match="slot_mapping must be 1-D int32 or int64"):
        write_kv_fp8(kv, cache, slots.float(), layout=V32, impl="reference")
    with pytest.raises(UnsupportedError, match="scale_format 'ue8m0' for v32"):
        write_kv_fp8(kv, cache, slots, layout=V32, impl="reference", scale_format="ue8m0")
    with pytest.raises(UnsupportedError, match="supported: reference, triton, cuda"):
        write_kv_fp8(kv, cache, slots, layout=V32, impl="flash_mla")
    with pytest.raises(InvalidInputError, match="blocks a multiple of 16 bytes apart"):
        write_kv_fp8(
            torch.zeros(2, 128, dtype=torch.bfloat16),
            new_cache(2, 5, INDEXER, "cpu"),
            slots,
            layout=INDEXER,
            impl="reference",
        )
    positions = slots[None]
    with pytest.raises(InvalidInputError, match="one of the two, got neither"):
        gather_kv_fp8(cache, positions, slots[:1], layout=V32, impl="reference")
    with pytest.raises(InvalidInputError, match="out must be contiguous bfloat16"):
        gather_kv_fp8(
            cache, positions, slots[:1], layout=V32, impl="reference", starts=slots, out=kv
        )
    for wrong in (positions[:, 1:], positions.long(), positions.repeat(1, 2)[:, ::2]):
        with pytest.raises(InvalidInputError, match="indices must be"):
            gather_kv_fp8(
                cache, positions, slots[:1], layout=V32, impl="reference", starts=slots,
                indices=wrong,
            )  # fmt: skip


def test_kv_cache_fp8_rejects_indices_out_of_range() -> None:
    cache = new_cache(2, 16, V32, "cpu")
    kv = torch.zeros(1, 576, dtype=torch.bfloat16)
    zero = int32([0], "cpu")
    with pytest.raises(InvalidInputError, match="slot_mapping must be below 32, got 32"):
        write_kv_fp8(kv, cache, int32([32], "cpu"), layout=V32, impl="reference")

    def gather(position: int, request: int = 0, **places: torch.Tensor) -> None:
        gather_kv_fp8(
            cache,
            int32([[position]], "cpu"),
            int32([request], "cpu"),
            layout=V32,
            impl="reference",
            **places,
        )

    with pytest.raises(InvalidInputError, match="positions must be below 16, got 16"):
        gather(16, block_table=zero[None])
    with pytest.raises(InvalidInputError, match="requests must be below 1, got 1"):
        gather(0, request=1, starts=zero)
    with pytest.raises(InvalidInputError, match="block_table must be below 32, got 35"):
        gather(3, block_table=int32([[2]], "cpu"))
    with pytest.raises(InvalidInputError, match="starts must be below 32, got 40"):
        gather(10, starts=int32([30], "cpu"))
