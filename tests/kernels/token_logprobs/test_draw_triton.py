"""The draw on CUDA, interpreted on a CPU: the id whose share of the mass holds the number."""

from __future__ import annotations

import pytest
import torch
from implementations import TRITON_CUDA
from interpreted import output_interpreted

from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile
from consistent_kernels.token_logprobs.spec import SMALLEST_DELTA, VOCAB_TILE

_INTERPRETED = """
import torch
from consistent_kernels.token_logprobs.draw_triton import draw

def partials(logits, temperature):
    z = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    z = torch.nn.functional.pad(z, (0, -z.shape[1] % 1024), value=-torch.inf)
    z = z.view(len(z), -1, 1024)
    m = z.amax(-1)
    base = m.masked_fill(m == -torch.inf, 0.0)
    s = (z - base[..., None]).exp().sum(-1)
    return torch.stack((m, s, torch.full_like(s, torch.nan)))

generator = torch.Generator().manual_seed(0)
logits = 3 * torch.randn(40, 5000, generator=generator)
logits[:, ::3] = -torch.inf
temperature = torch.tensor([0.7, 0.0, 1.3, 1.0]).repeat(10)
uniform = torch.rand(40, dtype=torch.float64, generator=generator)
drawn = draw(logits, temperature, partials(logits, temperature), uniform)
by = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
probability = (logits.double() / by).softmax(-1)
upto = probability.cumsum(-1).gather(1, drawn[:, None])[:, 0]
own = probability.gather(1, drawn[:, None])[:, 0]
assert bool((own > 0).all())
assert bool((uniform < upto + 1e-6).all() and (uniform >= upto - own - 1e-6).all())
assert len(set((drawn // 1024).tolist())) == 5, "every tile is drawn from"
other = draw(logits, temperature, partials(logits, temperature), uniform.flip(0))
assert not torch.equal(other, drawn), "control"
for row in (0, 7, 39):
    part = slice(row, row + 1)
    shares = partials(logits[part], temperature[part])
    alone = draw(logits[part], temperature[part], shares, uniform[part])
    assert torch.equal(alone, drawn[part]), row

# Ends of the distribution, and rows without one.
none = torch.full((5, 3000), -torch.inf)
none[:2, 1023] = none[:2, 1024] = 0.0
none[2, 2999] = 5.0
none[3] = torch.nan
nearly = 1.0 - 2**-53
uniform = torch.tensor([0.0, nearly, nearly, 0.5, 0.5], dtype=torch.float64)
drawn = draw(none, torch.ones(5), partials(none, torch.ones(5)), uniform).tolist()
assert drawn[:3] == [1023, 1024, 2999], drawn
assert all(0 <= token < 3000 for token in drawn)
print("done")
"""


def test_draw_gives_the_id_that_holds_the_number() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_draw_cross_compiles(arch: int) -> None:
    from consistent_kernels.token_logprobs.draw_triton import _NUM_WARPS, _draw_fwd_kernel

    cubin = cross_compile(
        _draw_fwd_kernel,
        arch=arch,
        signature={
            **dict.fromkeys(("logits_ptr", "temperature_ptr", "partials_ptr"), "*fp32"),
            "uniform_ptr": "*fp64",
            "out_ptr": "*i64",
            **dict.fromkeys(("logits_stride", "vocab", "tiles", "rows"), "i32"),
        },
        constexprs={"SMALLEST": SMALLEST_DELTA, "TILE": VOCAB_TILE, "TILES": 256},
        num_warps=_NUM_WARPS,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("impl_device", [TRITON_CUDA])
def test_scores_from_shared_partials_have_the_same_bits(impl_device: tuple[str, str]) -> None:
    from consistent_kernels.testing import assert_bitwise_equal
    from consistent_kernels.token_logprobs import token_logprobs_from_logits
    from consistent_kernels.token_logprobs.draw_triton import draw
    from consistent_kernels.token_logprobs.triton import tile_partials

    _, device = impl_device
    generator = torch.Generator(device).manual_seed(3)
    logits = 3 * torch.randn(65, 151_936, generator=generator, device=device)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.9], device=device).repeat(13)
    uniform = torch.rand(65, dtype=torch.float64, generator=generator, device=device)
    partials = tile_partials(logits, temperature, logits.shape[1])
    ids = draw(logits, temperature, partials, uniform)
    by = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    probability = (logits.double() / by).softmax(-1)
    upto = probability.cumsum(-1).gather(1, ids[:, None])[:, 0]
    own = probability.gather(1, ids[:, None])[:, 0]
    assert bool((uniform < upto + 1e-5).all())
    assert bool((uniform >= upto - own - 1e-5).all())
    options = {"temperature": temperature, "entropy": False, "impl": "triton"}
    shared = token_logprobs_from_logits(logits, ids, partials=partials, **options)
    alone = token_logprobs_from_logits(logits, ids, **options)
    assert_bitwise_equal(shared.logprob, alone.logprob)
    assert_bitwise_equal(shared.logsumexp, alone.logsumexp)
    for row in (0, 33, 64):
        part = slice(row, row + 1)
        own_partials = tile_partials(logits[part], temperature[part], logits.shape[1])
        token = draw(logits[part], temperature[part], own_partials, uniform[part])
        assert_bitwise_equal(token, ids[part])
