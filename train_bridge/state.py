"""What all modules of one bridged model share: contract, ops' parameters, prepared weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from consistent_kernels.attention import AttentionParameters
from consistent_kernels.contract import Contract
from consistent_kernels.errors import StaleWeightsError, invalid
from consistent_kernels.experts import prepare_expert_weight
from consistent_kernels.linear import prepare_weight
from consistent_kernels.model_facts import ModelFacts
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.router import RouterParameters
from train_bridge.functions.quantization import QuantizedWeights
from train_bridge.weight_version import MASTER_DTYPES, MODEL_DTYPE, WeightVersion


@dataclasses.dataclass(frozen=True)
class _Prepared:
    key: tuple[int, ...]
    weight: torch.Tensor


@dataclasses.dataclass
class BridgeState:
    """Shared by the modules of one bridged model.

    Attributes:
        contract: specs and programs; names the implementation of every op.
        facts: what the model is.
        device_type: where the forward runs.
        rope, attention: parameters of the ops.
        version: of the weights.
        sharded: parameters are gathered layer by layer (FSDP2), so nothing may be kept of them.
        prepared: rounded weights by module name; of experts by parameter name.
        router: of a mixture of experts, or None.
        prepared_rows: the most rows whose kernels are compiled and probed.
        prepared_head: the most rows of one call of the head for whole logits, likewise.
        quantized: the FP8 weights of this version by parameter name, or None where there are none.
        quantized_names: parameters that the forward reads in FP8.
    """

    contract: Contract
    facts: ModelFacts
    device_type: str
    rope: RopeParameters
    attention: AttentionParameters
    version: WeightVersion = dataclasses.field(default_factory=WeightVersion)
    sharded: bool = False
    prepared: dict[str, _Prepared] = dataclasses.field(default_factory=dict)
    router: RouterParameters | None = None
    prepared_rows: int = 0
    prepared_head: int = 0
    quantized: QuantizedWeights | None = None
    quantized_names: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model prepares its own weights.
        return self.__dict__ | {"prepared": {}}

    def impl(self, op: str) -> str:
        """Return the implementation that the contract chose for `op`."""
        return self.contract.implementation(op)

    def prepared_weight(
        self, name: str, master: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `master` rounded to the model dtype, cast once per weight version.

        The key holds the explicit version and what PyTorch knows of the tensor, so an in-place
        change outside an optimizer is noticed too (one through `.data` is not: bump the version).
        """
        return self._kept(
            name, (master,), lambda: self._prepare(self.engine_rows(name, master), out_dtype)
        )

    def prepared_experts(self, name: str, master: torch.Tensor) -> torch.Tensor:
        """Return stacked expert weights [E, N, K] rounded to the model dtype, as `prepared_weight`.

        Args:
            name: of the parameter.
            master: the parameter.
        """
        return self._kept(name, (master,), lambda: self._prepare_experts(master))

    def quantized_weight(
        self, name: str, master: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `master` in FP8 with its scales, quantized once per weight version.

        Args:
            name: of the parameter.
            master: the parameter, [N, K] or [E, N, K].
        """
        if self.sharded:
            return self.quantized.quantize(master)
        return self.quantized.get(name, master)

    def _kept(
        self, name: str, masters: tuple[torch.Tensor, ...], prepare: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        for master in masters:
            self._check_master(name, master)
        if self.sharded:
            return prepare()
        key = self.key_of(*masters)
        found = self.prepared.get(name)
        if found is not None and found.key == key:
            return found.weight
        self.prepared.pop(name, None)
        weight = prepare()
        self.prepared[name] = _Prepared(key, weight)
        return weight

    def engine_rows(self, name: str, master: torch.Tensor) -> torch.Tensor:
        """Return the rows of the master as the engine orders them; as they are, by default."""
        return master

    @staticmethod
    def _check_master(name: str, master: torch.Tensor) -> None:
        # model.half() after bridging would round twice, and the engine once.
        if master.dtype not in MASTER_DTYPES:
            raise invalid(
                "forward",
                f"the weight of {name}",
                "float32 or bfloat16",
                master.dtype,
                "Cast the model back, and load its weights again",
            )

    def _prepare(self, master: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        # A tensor made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            return prepare_weight(
                master, dtype=MODEL_DTYPE, impl=self.impl("linear"), out_dtype=out_dtype
            )

    def _prepare_experts(self, master: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return prepare_expert_weight(master, dtype=MODEL_DTYPE, impl=self.impl("experts"))

    def key_of(self, *masters: torch.Tensor) -> tuple[int, ...]:
        """What a rounded copy of the masters is valid for."""
        known = (number for m in masters for number in (m._version, m.data_ptr()))
        return self.version.value, *known

    def watch(self, output: torch.Tensor, name: str, *masters: torch.Tensor) -> None:
        """Make the backward through `output` fail if weights change before it.

        autograd's own check sees neither a master behind a rounded copy nor a change of `.data`.
        """
        if not output.requires_grad:
            return
        version, versions = self.version.value, [master._version for master in masters]

        def check(_: torch.Tensor) -> None:
            if self.version.value != version:
                raise StaleWeightsError(
                    f"backward of {name}: its forward used weight version {version}, now it is "
                    f"{self.version.value}. Run the forward again after each optimizer step"
                )
            if [master._version for master in masters] != versions:
                raise StaleWeightsError(
                    f"backward of {name}: its weight was changed in place since the forward. Run "
                    "the forward again after each change"
                )

        output.register_hook(check)
