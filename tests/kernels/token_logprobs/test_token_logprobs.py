"""Relations of token log-probs: rows alone and together, hidden and logits, whole and in chunks."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    peaked_logits,
    poisoned_rows,
)
from consistent_kernels.token_logprobs import (
    TokenLogprobs,
    token_logprobs,
    token_logprobs_from_logits,
)

VOCABS = (1, 5, 1000, 1024, 1025, 49152)
TEMPERATURES = (1.0, 0.7, 0.0)


def ids_for(rows: int, vocab: int, *, seed: int, device: str) -> torch.Tensor:
    return torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed)).to(device)


def mixed_temperatures(rows: int, device: str) -> torch.Tensor:
    return torch.tensor([1.0, 0.7, 0.0, 1.3], device=device).repeat(rows // 4 + 1)[:rows]


def assert_same(actual: TokenLogprobs, expected: TokenLogprobs, rows: slice = slice(None)) -> None:
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert_bitwise_equal(a, b[rows], name)


def divided(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    by = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    by = torch.where(by == 0, 1.0, by).double().expand(logits.shape[0])
    return logits.double() / by[:, None]


@pytest.mark.parametrize("vocab", [*VOCABS, 151936])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_token_logprobs_matches_reference(
    impl_device: tuple[str, str], vocab: int, temperature: float
) -> None:
    impl, device = impl_device
    logits = peaked_logits(5, vocab, seed=1, device=device)
    ids = ids_for(5, vocab, seed=2, device=device)
    result = token_logprobs_from_logits(logits, ids, temperature=temperature, impl=impl)
    z = divided(logits, temperature)
    log_p = z.log_softmax(-1)
    expected = log_p.gather(1, ids[:, None])[:, 0]
    # u = 2^-24. z carries u |z| from the division, at the token and at the maximum that the
    # logsumexp follows; the last two roundings add u |lse| and u |logprob|. The sum of positive
    # terms is off by (10 tree levels + 149 merges + exp and log, 4 u each) u relative at most.
    unit = 2.0**-24
    scale = z.abs().amax(-1)
    bound = unit * (3 * scale + expected.abs() + 180)
    assert bool(((result.logprob.double() - expected).abs() <= bound).all())
    assert bool(((result.logsumexp.double() - z.logsumexp(-1)).abs() <= bound).all())
    entropy = -(log_p.exp() * log_p).sum(-1)
    # Each term p |z - M| carries the error of z and of the sum; sum p |z - M| <= H + log V.
    spread = entropy + torch.tensor(float(vocab)).log()
    bound = unit * (2 * scale + 180) * (2 + spread)
    assert bool(((result.entropy.double() - entropy).abs() <= bound).all())


@pytest.mark.parametrize("vocab", [1000, 2500, 49152])
def test_token_logprobs_is_batch_invariant(impl_device: tuple[str, str], vocab: int) -> None:
    impl, device = impl_device
    logits = peaked_logits(257, vocab, seed=3, device=device)
    ids = ids_for(257, vocab, seed=4, device=device)
    temperature = mixed_temperatures(257, device)
    whole = token_logprobs_from_logits(logits, ids, temperature=temperature, impl=impl)
    for rows in BATCH_SIZES:
        for start in {0, (257 - rows) // 2, 257 - rows}:
            part = slice(start, start + rows)
            result = token_logprobs_from_logits(
                logits[part], ids[part], temperature=temperature[part], impl=impl
            )
            assert_same(result, whole, part)


def test_token_logprobs_prefill_equals_decode(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    hidden = hazard_activations((70, 64), seed=5, device=device)
    weight = prepare_weight(
        torch.randn(3000, 64, generator=torch.Generator().manual_seed(6)).to(device) / 8,
        dtype=torch.bfloat16,
        impl=impl,
    )
    ids = ids_for(70, 3000, seed=7, device=device)
    whole = token_logprobs(hidden, weight, ids, temperature=0.7, impl=impl)
    for row in range(70):
        one = slice(row, row + 1)
        result = token_logprobs(hidden[one], weight, ids[one], temperature=0.7, impl=impl)
        assert_same(result, whole, one)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 513])
def test_token_logprobs_hidden_equals_logits(impl_device: tuple[str, str], rows: int) -> None:
    impl, device = impl_device
    hidden = hazard_activations((rows, 64), seed=8, device=device)
    master = torch.randn(2100, 64, generator=torch.Generator().manual_seed(9)).to(device) / 8
    weight = prepare_weight(master, dtype=torch.bfloat16, impl=impl)
    ids = ids_for(rows, 2100, seed=10, device=device)
    logits = linear(hidden, weight, impl=impl, out_dtype=torch.float32)
    options = {
        "temperature": mixed_temperatures(rows, device),
        "valid_vocab": 2080,
        "banned": torch.tensor([3, 2000], device=device),
        "impl": impl,
    }
    assert_same(
        token_logprobs(hidden, weight, ids, **options),
        token_logprobs_from_logits(logits, ids, **options),
    )


def test_token_logprobs_is_split_invariant(impl_device: tuple[str, str]) -> None:
    # Vocabulary in one piece = in chunks cut at tile boundaries, the shards of a parallel lm_head.
    impl, device = impl_device
    hidden = hazard_activations((33, 64), seed=11, device=device)
    master = torch.randn(2500, 64, generator=torch.Generator().manual_seed(39)).to(device) / 8
    weight = prepare_weight(master, dtype=torch.bfloat16, impl=impl)
    ids = ids_for(33, 2500, seed=12, device=device)
    whole = token_logprobs(hidden, weight, ids, temperature=0.7, impl=impl)
    for cuts in ((1024,), (1024, 2048)):
        shards = weight.tensor_split(cuts)
        logits = torch.cat(
            [linear(hidden, shard, impl=impl, out_dtype=torch.float32) for shard in shards], dim=1
        )
        chunked = token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl)
        assert_same(chunked, whole)


@pytest.mark.parametrize("width", [1024, 2048, 2500])
def test_token_logprobs_valid_vocab_equals_narrow_vocab(
    impl_device: tuple[str, str], width: int
) -> None:
    impl, device = impl_device
    logits = peaked_logits(33, 4096, seed=11, device=device)
    ids = ids_for(33, 1024, seed=12, device=device)
    wide = token_logprobs_from_logits(logits, ids, temperature=0.7, valid_vocab=width, impl=impl)
    narrow = token_logprobs_from_logits(logits[:, :width], ids, temperature=0.7, impl=impl)
    assert_same(wide, narrow)


def test_token_logprobs_temperature_rows_equal_one_number(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(32, 3000, seed=13, device=device)
    ids = ids_for(32, 3000, seed=14, device=device)
    mixed = token_logprobs_from_logits(
        logits, ids, temperature=mixed_temperatures(32, device), impl=impl
    )
    for column, temperature in enumerate((1.0, 0.7, 0.0, 1.3)):
        rows = slice(column, None, 4)
        one = token_logprobs_from_logits(
            logits[rows], ids[rows], temperature=temperature, impl=impl
        )
        assert_same(one, mixed, rows)
    greedy = token_logprobs_from_logits(logits, ids, temperature=0.0, impl=impl)
    assert_same(greedy, token_logprobs_from_logits(logits, ids, temperature=1.0, impl=impl))


def test_token_logprobs_of_many_ids_equal_one_by_one(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(17, 3000, seed=15, device=device)
    ids = torch.stack([ids_for(17, 3000, seed=s, device=device) for s in (16, 17, 18)], dim=1)
    together = token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl)
    assert together.logprob.shape == (17, 3)
    for column in range(3):
        one = token_logprobs_from_logits(logits, ids[:, column], temperature=0.7, impl=impl)
        assert_bitwise_equal(one.logprob, together.logprob[:, column].contiguous())
        assert_bitwise_equal(one.logsumexp, together.logsumexp)


def test_token_logprobs_do_not_depend_on_entropy(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(17, 3000, seed=19, device=device) * 20
    logits[:, 100:1200] = -float("inf")
    ids = ids_for(17, 90, seed=20, device=device)
    with_entropy = token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl)
    without = token_logprobs_from_logits(logits, ids, temperature=0.7, entropy=False, impl=impl)
    assert without.entropy is None
    assert_bitwise_equal(without.logprob, with_entropy.logprob)
    assert_bitwise_equal(without.logsumexp, with_entropy.logsumexp)


def test_token_logprobs_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(64, 49152, seed=21, device=device)
    ids = ids_for(64, 49152, seed=22, device=device)
    first = token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            again = token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl)
            assert_same(again, first)
    finally:
        torch.set_num_threads(threads)


def test_token_logprobs_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(9, 2500, seed=23, device=device)
    ids = ids_for(9, 2000, seed=24, device=device)
    options = {"temperature": 0.7, "valid_vocab": 2050, "impl": impl}
    clean = token_logprobs_from_logits(logits, ids, **options)
    logits[:, 2050:] = float("nan")
    assert_same(token_logprobs_from_logits(logits, ids, **options), clean)
    buffer, rows = poisoned_rows(logits, before=3, after=20)
    padded_ids = torch.zeros(buffer.shape[0], dtype=torch.int64, device=device)
    padded_ids[rows] = ids
    among = token_logprobs_from_logits(buffer, padded_ids, **options)
    assert_same(TokenLogprobs(*(part[rows] for part in among)), clean)
    wide = torch.full((9, 4096), float("nan"), device=device)
    wide[:, :2500] = logits
    strided = token_logprobs_from_logits(wide[:, :2500], ids, **options)
    assert_same(strided, clean)


def test_token_logprobs_masked_ids_vanish(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(9, 2500, seed=25, device=device)
    banned = torch.tensor([0, 7, 1500], device=device)
    ids = torch.tensor([5, 7, 2400], device=device).repeat(9, 1)
    result = token_logprobs_from_logits(
        logits, ids, temperature=0.7, valid_vocab=2300, banned=banned, impl=impl
    )
    logits[:, 2300:] = -float("inf")
    logits[:, banned] = -float("inf")
    assert_same(token_logprobs_from_logits(logits, ids, temperature=0.7, impl=impl), result)
    assert bool(result.logprob[:, 0].isfinite().all())
    assert bool((result.logprob[:, 1:] == -float("inf")).all())
    assert bool(result.entropy.isfinite().all())
    mask = torch.zeros(2500, dtype=torch.bool, device=device)
    mask[banned] = True
    again = token_logprobs_from_logits(
        logits, ids, temperature=0.7, valid_vocab=2300, banned=mask, impl=impl
    )
    assert_same(again, result)


def test_token_logprobs_of_a_single_choice(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = torch.full((3, 3000), -float("inf"), device=device)
    logits[:, 2999] = torch.tensor([-5.0, 0.0, 1e30], device=device)
    ids = torch.full((3,), 2999, device=device)
    result = token_logprobs_from_logits(logits, ids, temperature=1.0, impl=impl)
    zero = torch.zeros(3, device=device)
    assert_bitwise_equal(result.logprob, zero)
    assert_bitwise_equal(result.entropy, zero)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_token_logprobs_propagate_nonfinite(impl_device: tuple[str, str], value: float) -> None:
    impl, device = impl_device
    logits = peaked_logits(4, 3000, seed=26, device=device)
    clean = token_logprobs_from_logits(
        logits, ids_for(4, 1000, seed=27, device=device), temperature=1.0, impl=impl
    )
    logits[2, 1234] = value
    result = token_logprobs_from_logits(
        logits, ids_for(4, 1000, seed=27, device=device), temperature=1.0, impl=impl
    )
    for part, other in zip(result, clean, strict=True):
        assert not bool(part[2].isfinite())
        assert_bitwise_equal(part[:2], other[:2])
        assert_bitwise_equal(part[3:], other[3:])
    nothing = torch.full((1, 3000), -float("inf"), device=device)
    empty = token_logprobs_from_logits(
        nothing, torch.zeros(1, dtype=torch.int64, device=device), temperature=1.0, impl=impl
    )
    assert bool(empty.logprob.isnan().all())


def test_token_logprobs_of_no_rows(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    result = token_logprobs_from_logits(
        torch.empty(0, 3000, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
        temperature=1.0,
        impl=impl,
    )
    assert [part.shape for part in result] == [(0,), (0,), (0,)]


def test_token_logprobs_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(17, 3000, seed=28, device=device)
    ids = ids_for(17, 3000, seed=29, device=device)

    def score(values: torch.Tensor) -> torch.Tensor:
        return token_logprobs_from_logits(values, ids, temperature=0.7, impl=impl).logprob

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(score, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(logits), score(logits))


def test_exp_and_log_do_not_depend_on_position() -> None:
    # The reference program rests on this: the vector body and the tail of ATen's loops, and any
    # cut of a loop between threads, must agree.
    generator = torch.Generator().manual_seed(30)
    x = -torch.rand(4099, generator=generator) * 104
    for function, values in ((torch.exp, x), (torch.log, 1 - x)):
        whole = function(values)
        for size in (1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1000):
            for start in range(0, 40):
                part = slice(start, start + size)
                assert_bitwise_equal(function(values[part].clone()), whole[part])
        assert_bitwise_equal(function(values[::3]), whole[::3])


def test_control_log_softmax_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(64, 49152, seed=31, device=device)
    ids = ids_for(64, 49152, seed=32, device=device)
    result = token_logprobs_from_logits(logits, ids, temperature=1.0, impl=impl)
    stock = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert not bitwise_equal(stock, result.logprob)


def test_control_tree_that_follows_the_batch_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(64, 49152, seed=33, device=device)
    ids = ids_for(64, 49152, seed=34, device=device)
    result = token_logprobs_from_logits(logits, ids, temperature=1.0, impl=impl)
    # A tile that shrinks as the batch grows, as schedulers of stock kernels choose it.
    tile = 49152 // 64
    maximum = logits.amax(-1, keepdim=True)
    sums = (logits - maximum).exp().view(64, -1, tile).sum(-1).sum(-1)
    assert not bitwise_equal(maximum[:, 0] + sums.log(), result.logsumexp)


def test_control_temperature_on_one_side_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(17, 3000, seed=35, device=device)
    ids = ids_for(17, 3000, seed=36, device=device)
    at = {t: token_logprobs_from_logits(logits, ids, temperature=t, impl=impl) for t in (1.0, 0.6)}
    assert not bitwise_equal(at[0.6].logprob, at[1.0].logprob)
    assert not bitwise_equal(at[0.6].logprob, at[1.0].logprob / 0.6)
    # Multiplying by the reciprocal is another rounding than dividing.
    multiplied = token_logprobs_from_logits(
        logits * torch.tensor(1 / 0.6, device=device), ids, temperature=1.0, impl=impl
    )
    assert not bitwise_equal(multiplied.logprob, at[0.6].logprob)
    # Case 19: logits [2, 1, 0] at T = 0.6 give -0.2026, and log-prob / T gives -0.679.
    small = torch.tensor([[2.0, 1.0, 0.0]], device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    value = token_logprobs_from_logits(small, first, temperature=0.6, impl=impl).logprob
    assert abs(float(value) + 0.2026) < 5e-5


def test_control_unrounded_logits_differ(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(17, 3000, seed=37, device=device)
    ids = ids_for(17, 3000, seed=38, device=device)
    options = {"temperature": 1.0, "impl": impl}
    result = token_logprobs_from_logits(logits, ids, **options)
    rounded = token_logprobs_from_logits(logits.bfloat16().float(), ids, **options)
    assert not bitwise_equal(rounded.logprob, result.logprob)


def test_token_logprobs_rejects_bad_inputs() -> None:
    logits, ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    options = {"temperature": 1.0, "impl": "reference"}
    with pytest.raises(InvalidInputError, match=r"logits must be float32 of shape \(T, V\)"):
        token_logprobs_from_logits(logits.bfloat16(), ids, **options)
    with pytest.raises(InvalidInputError, match=r"ids must be of shape \(2,\) or \(2, k\)"):
        token_logprobs_from_logits(logits, ids[:1], **options)
    with pytest.raises(InvalidInputError, match="ids must be int32 or int64"):
        token_logprobs_from_logits(logits, ids.float(), **options)
    with pytest.raises(InvalidInputError, match="ids must be between 0 and 7, got -100"):
        token_logprobs_from_logits(logits, ids - 100, **options)
    with pytest.raises(InvalidInputError, match="ids must be between 0 and 7, got 8"):
        token_logprobs_from_logits(logits, ids + 8, **options)
    with pytest.raises(InvalidInputError, match="temperature must be finite and not negative"):
        token_logprobs_from_logits(logits, ids, temperature=-1.0, impl="reference")
    with pytest.raises(InvalidInputError, match="temperature must be not negative, got -1"):
        token_logprobs_from_logits(
            logits, ids, temperature=torch.tensor([1.0, -1.0]), impl="reference"
        )
    with pytest.raises(InvalidInputError, match=r"temperature must be a number or a float tensor"):
        token_logprobs_from_logits(logits, ids, temperature=torch.ones(3), impl="reference")
    with pytest.raises(InvalidInputError, match="valid_vocab must be between 1 and 8, got 9"):
        token_logprobs_from_logits(logits, ids, valid_vocab=9, **options)
    with pytest.raises(InvalidInputError, match=r"valid_vocab must be an integer, got 4\.0"):
        token_logprobs_from_logits(logits, ids, valid_vocab=4.0, **options)
    # -1 would ban the last id.
    for outside in (-1, 8):
        with pytest.raises(InvalidInputError, match=f"ids between 0 and 7, got {outside}"):
            token_logprobs_from_logits(logits, ids, banned=torch.tensor([2, outside]), **options)
    with pytest.raises(InvalidInputError, match=r"banned must be a tensor .*, got list"):
        token_logprobs_from_logits(logits, ids, banned=[1, 2], **options)
    with pytest.raises(InvalidInputError, match="banned must be ids of shape"):
        token_logprobs_from_logits(logits, ids, banned=torch.ones(8), **options)
    with pytest.raises(InvalidInputError, match=r"hidden, weight must be of shapes"):
        token_logprobs(torch.zeros(2, 4), torch.zeros(8, 5), ids, **options)
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        token_logprobs_from_logits(logits, ids, temperature=1.0, impl="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="9 GB of logits on a CUDA device")
def test_token_logprobs_beyond_int32_offsets() -> None:
    vocab, rows = 151936, 14200
    assert rows * vocab > 2**31
    few = peaked_logits(9, vocab, seed=40, device="cuda")
    ids = ids_for(9, vocab, seed=41, device="cuda")
    options = {"temperature": 0.7, "impl": "triton"}
    expected = token_logprobs_from_logits(few, ids, **options)
    logits = torch.zeros(rows, vocab, device="cuda")
    logits[-9:] = few
    many = torch.zeros(rows, dtype=torch.int64, device="cuda")
    many[-9:] = ids
    result = token_logprobs_from_logits(logits, many, **options)
    assert_same(TokenLogprobs(*(part[-9:] for part in result)), expected)
