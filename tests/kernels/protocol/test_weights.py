"""Weight digests: shards add up, fused tensors split, one changed bit shows; receipts."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, StaleWeightsError
from consistent_kernels.protocol import (
    TensorDigest,
    WeightReceipt,
    check_receipt,
    state_digest,
    tensor_digest,
)
from consistent_kernels.testing import flip_lowest_bit, hazard_activations

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
MASK = (1 << 64) - 1


def python_key(index: int, seed: int) -> int:
    x = (index + seed) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31) | 1


def python_digest(weight: torch.Tensor) -> int:
    bits = weight.bfloat16().view(torch.int16).tolist()
    return (
        sum(
            python_key(r, 0x1B873593) * python_key(c, 0x2545F491) * value
            for r, row in enumerate(bits)
            for c, value in enumerate(row)
        )
        & MASK
    )


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_digest_matches_reference(device: str) -> None:
    weight = hazard_activations((19, 23), seed=1, dtype=torch.float32)
    digest = tensor_digest(weight.to(device))
    assert digest == TensorDigest(python_digest(weight), 19 * 23, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(700, 96), (40000, 3), (3, 70000)])
def test_tensor_digest_is_split_invariant(device: str, shape: tuple[int, int]) -> None:
    weight = hazard_activations(shape, seed=2, device=device)
    whole = tensor_digest(weight)
    for cut in (1, shape[0] // 3, shape[0] - 1):
        parts = tensor_digest(weight[:cut]) + tensor_digest(weight[cut:], row_start=cut)
        assert parts == whole
    cut = shape[1] // 3
    columns = tensor_digest(weight[:, :cut]) + tensor_digest(weight[:, cut:], column_start=cut)
    assert columns == whole


def test_tensor_digest_of_a_fused_slice_equals_the_parameter() -> None:
    q, k, v = (hazard_activations((n, 64), seed=n) for n in (192, 64, 32))
    fused = torch.cat([q, k, v])
    bias = torch.cat([part[:, 0] for part in (q, k, v)])
    named = {"q": fused[:192], "k": fused[192:256], "v": fused[256:], "q.bias": bias[:192]}
    assert state_digest(named.items()) == state_digest(
        {"q": q, "k": k, "v": v, "q.bias": q[:, 0]}.items()
    )


def test_tensor_digest_of_master_equals_its_bf16_copy() -> None:
    master = torch.randn(65, 33, generator=torch.Generator().manual_seed(3))
    rounded = master.bfloat16()
    assert tensor_digest(master) == tensor_digest(rounded) == tensor_digest(rounded.float())
    assert tensor_digest(torch.nn.Parameter(master).t()) == tensor_digest(rounded.t().contiguous())


def test_control_tensor_digest_sees_one_bit_and_every_move() -> None:
    weight = torch.randn(65, 33, generator=torch.Generator().manual_seed(4)).bfloat16()
    digests = {tensor_digest(weight).value}
    for row in range(65):
        digests.add(tensor_digest(flip_lowest_bit(weight, (row, row % 33))).value)
    assert len(digests) == 66
    swapped_rows = weight[[1, 0, *range(2, 65)]]
    swapped_columns = weight[:, [1, 0, *range(2, 33)]]
    negative_zero = torch.zeros_like(weight)
    negative_zero[3, 3] = -0.0
    for other in (swapped_rows, swapped_columns, weight.view(33, 65), weight.flatten()):
        digests.add(tensor_digest(other).value)
    assert len(digests) == 70
    assert tensor_digest(negative_zero) != tensor_digest(torch.zeros_like(weight))


def test_state_digest_names_nonfinite_and_counts() -> None:
    bad = torch.ones(3, 4)
    bad[1, 2] = float("nan")
    huge = torch.full((2,), 3.4e38)  # finite in fp32, infinite in bf16
    digest = state_digest([("b", bad), ("a", torch.ones(5)), ("c", huge), ("d", torch.empty(0, 4))])
    assert digest.nonfinite == ("b", "c")
    assert digest.parameters == 19
    assert list(digest.tensors) == ["a", "b", "c", "d"]
    assert state_digest([("b", bad)]) == state_digest([("b", bad.clone())])


def test_state_digest_shards_add_up() -> None:
    weights = {f"w{i}": hazard_activations((30, 8), seed=i) for i in range(3)}
    whole = state_digest(weights.items())
    first = state_digest([("w0", weights["w0"])])
    second = state_digest([(n, w) for n, w in weights.items() if n != "w0"])
    assert first + second == whole
    assert (first + second).total == whole.total
    assert first.total != whole.total
    assert whole.differences(first) == ["w1", "w2"]


def test_state_digest_of_rows_add_up() -> None:
    weights = {"experts": hazard_activations((5, 6, 8), seed=1), "gate": torch.ones(5, 8)}
    whole = state_digest(weights.items())
    cut = weights["experts"]
    first = state_digest([("experts", cut[:3]), ("gate", weights["gate"])], {"experts": (0, 3)})
    second = state_digest([("experts", cut[3:])], {"experts": (3, 5)})
    assert first + second == whole
    unplaced = state_digest([("experts", cut[3:])])
    assert first + unplaced != whole


def test_state_digest_rejects_bad_inputs() -> None:
    with pytest.raises(InvalidInputError, match="unique names, got a twice"):
        state_digest([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(InvalidInputError, match=r"a must be floating point, got torch.int64"):
        state_digest([("a", torch.ones(1, dtype=torch.int64))])
    with pytest.raises(InvalidInputError, match="tensor must be floating point"):
        tensor_digest(torch.ones(1, dtype=torch.int8))


def receipt(version: int = 3, scale: float = 1.0, names: tuple[str, ...] = ("a", "b")) -> object:
    weights = [(name, torch.full((4, 4), 2.0) * scale) for name in names]
    return WeightReceipt(version, state_digest(weights), "c" * 64)


def test_weight_receipt_survives_transport() -> None:
    ours = receipt()
    assert WeightReceipt.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    share = dataclasses.replace(ours, rows={"a": (0, 4)})
    assert WeightReceipt.from_dict(json.loads(json.dumps(share.to_dict()))) == share
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert ours.parameters == 32
    check_receipt(receipt(), ours)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours.version = 4
    with pytest.raises(TypeError):
        ours.digest.tensors["a"] = TensorDigest(0, 0, 0)
    altered = ours.to_dict()
    altered["digest"]["a"][0] = "0" * 16
    with pytest.raises(InvalidInputError, match="It was altered"):
        WeightReceipt.from_dict(altered)


def test_check_receipt_rejects_stale_weights() -> None:
    ours = receipt()
    with pytest.raises(StaleWeightsError, match="version 2 is served, 3 is expected"):
        check_receipt(receipt(version=2), ours)
    with pytest.raises(StaleWeightsError, match=r"2 parameter\(s\) differ: a \([0-9a-f]{16} != "):
        check_receipt(receipt(scale=1.0078125), ours)  # one bf16 ulp
    with pytest.raises(StaleWeightsError, match=r"1 parameter\(s\) differ: b is not served"):
        check_receipt(receipt(names=("a",)), ours)
    with pytest.raises(StaleWeightsError, match="c is not expected"):
        check_receipt(receipt(names=("a", "b", "c")), ours)
    with pytest.raises(StaleWeightsError, match="contract cccccccccccccccc is served, dddd"):
        check_receipt(ours, dataclasses.replace(ours, contract_digest="d" * 64))
    many = tuple(f"w{i:02}" for i in range(9))
    with pytest.raises(StaleWeightsError, match="and 4 more"):
        check_receipt(receipt(scale=2.0, names=many), receipt(names=many))
