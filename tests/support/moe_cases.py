"""Calls of the FP8 and expert ops whose arguments may lie apart in memory, as views do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from strided_cases import Place

from consistent_kernels.experts import experts, experts_bwd, prepare_expert_weight
from consistent_kernels.fp8_experts import fp8_experts, fp8_experts_bwd, quantize_expert_weight
from consistent_kernels.fp8_linear import fp8_gemm, fp8_linear, fp8_linear_bwd
from consistent_kernels.quantization import quantize_blocks, quantize_rows, quantize_weight
from consistent_kernels.router import RouterParameters, router, router_bwd

GROUPED = RouterParameters(
    num_experts=16, top_k=3, scoring="sigmoid", renormalize=True, scale=2.5, num_groups=4,
    top_groups=2,
)  # fmt: skip
PLAIN = RouterParameters(num_experts=12, top_k=3, scoring="softmax", renormalize=True)


def _flat(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of some results behind each other."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def calls(
    device: str, impl: str = "triton", seed: int = 1
) -> dict[str, Callable[[Place], torch.Tensor]]:
    """Return {what is moved: call}; each call gives the bytes to be compared."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def ids(experts: int, slots: int) -> torch.Tensor:
        chosen = torch.rand((5, experts), generator=generator).topk(slots).indices
        chosen[1, 1] = -1
        return chosen.int().to(device)

    run, scales = {"impl": impl}, {"impl": impl, "scale_format": "ue8m0"}
    x, weight = normal(5, 256), normal(192, 256)
    rows, row_scale = quantize_rows(x, **scales)
    blocks, block_scale = quantize_weight(weight, **scales)
    logits, plain, bias = normal(5, 16), normal(5, 12), normal(16)
    forced = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 1, 2], [9, 3, 1]], device=device)
    valid = torch.tensor([True, False, True, True, False], device=device)
    chosen, of_slots, hidden = ids(4, 2), normal(5, 2), normal(5, 64).half()
    shared = normal(5, 64).half()
    stacked = [
        prepare_expert_weight(w * 0.1, dtype=torch.float16, impl=impl)
        for w in (normal(4, 64, 64), normal(4, 64, 32))
    ]
    wide, beside = normal(5, 256).half(), normal(5, 256).half()
    fp8 = [quantize_expert_weight(w, **scales) for w in (normal(4, 256, 256), normal(4, 256, 128))]

    def route(at: Place, name: str) -> torch.Tensor:
        moved = {"logits": logits, "bias": bias, "valid": valid}
        moved[name] = at(moved[name])
        found = router(
            moved["logits"], moved["bias"], valid=moved["valid"], parameters=GROUPED, **run
        )
        return _flat(*found)

    def route_back(at: Place) -> torch.Tensor:
        named, _ = router(plain, parameters=PLAIN, valid=valid, **run)
        return router_bwd(at(normal_grad), at(plain), at(named), parameters=PLAIN, **run)

    normal_grad = normal(5, 3)

    def serve(at: Place, name: str) -> torch.Tensor:
        moved = {"x": hidden, "ids": chosen, "weights": of_slots, "shared": shared}
        moved[name] = at(moved[name])
        rest = [moved[k] for k in ("ids", "weights", "shared")]
        return experts(moved["x"], *stacked, *rest, **run)

    def serve_back(at: Place) -> torch.Tensor:
        arguments = (at(hidden), *stacked, at(chosen), at(of_slots))
        return _flat(*experts_bwd(at(shared), *arguments, **run))

    def serve_fp8(at: Place, name: str) -> torch.Tensor:
        moved = {"x": wide, "ids": chosen, "weights": of_slots, "shared": beside}
        moved[name] = at(moved[name])
        rest = [moved[k] for k in ("ids", "weights", "shared")]
        return fp8_experts(moved["x"], *fp8, *rest, **scales)

    def serve_fp8_back(at: Place) -> torch.Tensor:
        arguments = (at(wide), *fp8, at(chosen), at(of_slots))
        return _flat(*fp8_experts_bwd(at(beside), *arguments, **scales))

    return {
        "quantize_rows x": lambda at: _flat(*quantize_rows(at(x), **scales)),
        "quantize_blocks weight": lambda at: _flat(*quantize_blocks(at(weight), **scales)),
        "quantize_weight master": lambda at: _flat(*quantize_weight(at(weight), **scales)),
        "fp8_linear x": lambda at: fp8_linear(at(x.half()), blocks, block_scale, **scales),
        "fp8_gemm x_scale": lambda at: fp8_gemm(
            rows, at(row_scale), blocks, block_scale, out_dtype=torch.float32, **scales
        ),
        "fp8_linear_bwd grad_y": lambda at: _flat(
            *fp8_linear_bwd(at(x[:, :192]), rows, row_scale, blocks, block_scale, **run)
        ),
        "router logits": lambda at: route(at, "logits"),
        "router bias": lambda at: route(at, "bias"),
        "router valid": lambda at: route(at, "valid"),
        "router forced": lambda at: _flat(
            *router(plain, parameters=PLAIN, forced=at(forced), valid=valid, **run)
        ),
        "router_bwd all": route_back,
        "experts x": lambda at: serve(at, "x"),
        "experts ids": lambda at: serve(at, "ids"),
        "experts weights": lambda at: serve(at, "weights"),
        "experts shared": lambda at: serve(at, "shared"),
        "experts_bwd all": serve_back,
        "fp8_experts x": lambda at: serve_fp8(at, "x"),
        "fp8_experts ids": lambda at: serve_fp8(at, "ids"),
        "fp8_experts weights": lambda at: serve_fp8(at, "weights"),
        "fp8_experts shared": lambda at: serve_fp8(at, "shared"),
        "fp8_experts_bwd all": serve_fp8_back,
    }
