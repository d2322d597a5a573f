"""Prepared weights follow their masters; a push is believed only after the engine's receipt."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, StaleWeightsError
from consistent_kernels.protocol.weights import WeightReceipt, state_digest
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import push_weights, token_logprobs, unbridge_model, weight_version
from train_bridge.weights import check_prepared, exported_weights, weight_receipt

IDS = torch.arange(5, 40)[None]


class FakeEngine:
    """An engine of two workers that keeps bf16 copies, with faults to order."""

    def __init__(
        self, contract_digest: str, *, fault: str = "", resets: bool = True, shares: bool = False
    ) -> None:
        self.contract_digest = contract_digest
        self.fault = fault
        self.resets = resets
        self.shares = shares
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: Any = None
    ) -> list[Any]:
        assert method == "update_weights_in_place"
        self.calls.append(method)
        if "path" in kwargs:
            from safetensors.torch import load_file

            weights: Mapping[str, torch.Tensor] = load_file(kwargs["path"])
        else:
            weights = kwargs["weights"]
        for name, tensor in weights.items():
            assert tensor.dtype == torch.bfloat16
            self.weights[name] = tensor.clone()
        return [self._receipt(kwargs["version"], rank) for rank in range(2)]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def _receipt(self, version: int, rank: int) -> dict[str, Any]:
        served = dict(self.weights)
        contract = self.contract_digest
        if rank == 1 and self.fault == "version":
            version -= 1
        if rank == 1 and self.fault == "bit":
            name = "model.layers.1.mlp.up_proj.weight"
            bits = served[name].clone().view(torch.int16)
            bits[3, 5] ^= 1
            served[name] = bits.view(torch.bfloat16)
        if rank == 1 and self.fault == "missing":
            del served["model.norm.weight"]
        if rank == 1 and self.fault == "contract":
            contract = "0" * 64
        rows = self._shared_rows(served, rank) if self.shares else {}
        digest = state_digest(served.items(), rows)
        return WeightReceipt(version, digest, contract, rows).to_dict()

    def _shared_rows(
        self, served: dict[str, torch.Tensor], rank: int
    ) -> dict[str, tuple[int, int]]:
        # Each worker keeps half of the experts, and says so.
        rows = {}
        for name in [name for name in served if ".experts." in name]:
            half = served[name].shape[0] // 2
            rows[name] = (rank * half, (rank + 1) * half)
            kept = served[name][slice(*rows[name])].clone()
            if rank == 1 and self.fault == "expert":
                kept.view(torch.int16).flatten()[7] ^= 1
            served[name] = kept
        return rows


def engine_for(model: torch.nn.Module, **options: Any) -> FakeEngine:
    return FakeEngine(model._bridge.contract.digest, **options)


def scores(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, IDS).log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_push_gives_the_engine_the_bits_of_the_forward(
    family: str, dtype: torch.dtype, make_bridged: Callable, make_stock: Callable
) -> None:
    model = make_bridged(family, dtype)
    weight_version(model).bump()
    engine = engine_for(model)
    receipt = push_weights(model, engine)
    assert engine.calls == ["update_weights_in_place", "reset_prefix_cache"]
    assert receipt.version == 1
    assert receipt.to_dict() == weight_receipt(model).to_dict()
    names = [name for name, _ in make_stock(family).named_parameters()]
    assert list(engine.weights) == names
    for name, prepared in model._bridge.prepared.items():
        assert_bitwise_equal(engine.weights[f"{name}.weight"], prepared.weight.to(torch.bfloat16))


def test_push_through_a_file_equals_push_by_reference(
    make_bridged: Callable, tmp_path: Path
) -> None:
    model = make_bridged("qwen2", torch.float32)
    near, far = engine_for(model), engine_for(model)
    push_weights(model, near)
    push_weights(model, far, path=tmp_path / "new")
    for name, tensor in near.weights.items():
        assert_bitwise_equal(far.weights[name], tensor, name)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("version", r"version 0 is served, 1 is expected"),
        ("bit", r"model\.layers\.1\.mlp\.up_proj\.weight \("),
        ("missing", r"model\.norm\.weight is not served"),
        ("contract", r"contract 0000"),
    ],
)
def test_push_rejects_a_wrong_receipt(fault: str, message: str, make_bridged: Callable) -> None:
    model = make_bridged("llama")
    weight_version(model).bump()
    with pytest.raises(StaleWeightsError, match=message):
        push_weights(model, engine_for(model, fault=fault))


def test_push_checks_the_experts_of_each_rank(make_bridged: Callable) -> None:
    model = make_bridged("qwen3_moe")
    receipt = push_weights(model, engine_for(model, shares=True))
    assert receipt.to_dict() == weight_receipt(model).to_dict()
    with pytest.raises(StaleWeightsError, match=r"worker 1: .*experts\.down_proj \("):
        push_weights(model, engine_for(model, shares=True, fault="expert"))


def test_push_rejects_an_engine_with_running_requests(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    with pytest.raises(StaleWeightsError, match="prefix cache could not be reset"):
        push_weights(model, engine_for(model, resets=False))


def test_push_rejects_an_engine_without_workers_or_receipts(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    engine = engine_for(model)
    engine.collective_rpc = lambda *_, **__: []
    with pytest.raises(StaleWeightsError, match="no worker"):
        push_weights(model, engine)
    engine.collective_rpc = lambda *_, **__: [None]
    with pytest.raises(StaleWeightsError, match="worker 0 sent no receipt"):
        push_weights(model, engine)


def test_push_rejects_nonfinite_parameters_before_sending(make_bridged: Callable) -> None:
    model = make_bridged("qwen3", torch.float32)
    engine = engine_for(model)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_norm.weight[3] = float("nan")
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 3.4e38  # infinite once rounded to bf16
    with pytest.raises(InvalidInputError, match="finite") as error:
        push_weights(model, engine)
    assert "model.layers.2.self_attn.k_norm.weight" in str(error.value)
    assert "model.layers.0.mlp.down_proj.weight" in str(error.value)
    assert engine.calls == []


def test_push_rejects_a_model_that_is_not_bridged(make_stock: Callable) -> None:
    with pytest.raises(InvalidInputError, match="Call bridge_model first"):
        push_weights(make_stock("llama"), FakeEngine(""))


def test_prepared_weights_are_cast_once_per_version(make_bridged: Callable) -> None:
    model = make_bridged("llama", torch.float32)
    before = scores(model)
    kept = {name: prepared.weight for name, prepared in model._bridge.prepared.items()}
    assert len(kept) == 7 * len(model.model.layers) + 1
    scores(model)
    assert all(model._bridge.prepared[name].weight is weight for name, weight in kept.items())
    weight_version(model).bump()
    assert_bitwise_equal(scores(model), before)
    assert all(model._bridge.prepared[name].weight is not weight for name, weight in kept.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda model, p: p.mul_(1.5),
        lambda model, p: setattr(p, "data", p.data * 1.5),
        lambda model, p: p.data.mul_(1.5) is weight_version(model).bump(),
        lambda model, p: model.load_state_dict(model.state_dict() | {NAME: p.detach() * 1.5}),
        lambda model, p: model.load_state_dict({**model.state_dict(), NAME: p * 1.5}, assign=True),
    ],
    ids=["in place", "new data", ".data and bump", "load_state_dict", "assign"],
)
def test_prepared_weights_follow_every_change(change: Callable, make_bridged: Callable) -> None:
    model, expected = make_bridged("llama", torch.float32), make_bridged("llama", torch.float32)
    before = scores(model)
    with torch.no_grad():
        expected.get_parameter(NAME).mul_(1.5)
        change(model, model.get_parameter(NAME))
    check_prepared(model)
    after = scores(model)
    assert not torch.equal(after, before)
    assert_bitwise_equal(after, scores(expected))


NAME = "model.layers.1.mlp.gate_proj.weight"


def test_silent_changes_of_data_are_found_before_a_push(make_bridged: Callable) -> None:
    model = make_bridged("llama", torch.float32)
    before = scores(model)
    model.get_parameter(NAME).data.mul_(1.5)
    # The control: no counter of PyTorch's shows it, so the forward keeps the old weight.
    assert_bitwise_equal(scores(model), before)
    engine = engine_for(model)
    with pytest.raises(StaleWeightsError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight"):
        push_weights(model, engine)
    assert engine.calls == []
    weight_version(model).bump()
    push_weights(model, engine)
    assert not torch.equal(scores(model), before)


def test_exported_weights_round_to_nearest_even(make_bridged: Callable) -> None:
    model = make_bridged("llama", torch.float32)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0039064])
    with torch.no_grad():
        model.model.norm.weight[:4] = ties
    exported = dict(exported_weights(model))["model.norm.weight"]
    assert exported[:4].tolist() == [1.0, 1.015625, -1.0, 1.0078125]


def test_version_follows_optimizers_around_bridging(make_stock: Callable) -> None:
    from train_bridge import bridge_model

    model = make_stock("llama", torch.float32)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    bridge_model(model)
    late = torch.optim.AdamW([model.model.norm.weight], lr=0.1)
    token_logprobs(model, IDS).log_probs.sum().backward()
    early.step()
    late.step()
    assert weight_version(model).value == 2
    unbridge_model(model)
    early.step()
    bridge_model(model)
    assert weight_version(model).value == 0


def test_bridged_models_are_freed(make_bridged: Callable) -> None:
    import weakref

    model = make_bridged("llama")
    scores(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_push_to_a_stock_engine_says_that_the_plugin_is_missing(make_bridged: Callable) -> None:
    class StockEngine(FakeEngine):
        def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
            raise NotImplementedError(f"Worker has no method {method}")

    model = make_bridged("llama")
    with pytest.raises(StaleWeightsError, match=r"plugin is not active .* VLLM_CONSISTENT=1"):
        push_weights(model, StockEngine("0" * 64))
