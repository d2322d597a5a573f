"""The weights a worker serves: loads them in place, rebuilds what is derived, leaves receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from consistent_kernels.contract import Contract
from consistent_kernels.errors import (
    ConfigurationError,
    ConsistencyError,
    InvalidInputError,
    StaleWeightsError,
)
from vllm_consistent.weights.names import (
    HeldExperts,
    checkpoint_parts,
    expected_shapes,
    held_experts,
    hf_views,
)
from vllm_consistent.weights.pages import PageVersions
from vllm_consistent.weights.quantized import FP8, as_served, is_quantized

TIED_HEAD = "lm_head.weight"
TIED_TO = "model.embed_tokens.weight"


class ServedWeights:
    """One model's weights.

    Attributes:
        version: the trainer's counter, 0 for the checkpoint that the engine was started with.
        stale: why the weights may not be served now, or None.
        held: rows of the parameters that ranks share, by Hugging Face name.
    """

    def __init__(
        self, model: torch.nn.Module, tied: bool, contract: Contract | None = None
    ) -> None:
        self.version = 0
        self.stale: str | None = None
        self.held: dict[str, HeldExperts] = held_experts(model)
        self._model = model
        self._tied = tied
        self._contract = contract
        self._generation = 0
        self._pages = PageVersions()
        self._loaded: set[str] = set()
        self._load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = model.load_weights
        model.load_weights = self._load_from_outside
        self._check_served()

    def views(self) -> dict[str, torch.Tensor]:
        """Return {Hugging Face name: view into the storage that is served}."""
        return hf_views(self._model)

    def check_step(self, step: Any, block_sizes: Sequence[int]) -> None:
        """Raise StaleWeightsError if `step` (a SchedulerOutput) would serve stale weights.

        Args:
            step: vLLM's SchedulerOutput.
            block_sizes: positions a page, for each group of layers.
        """
        if step.total_num_scheduled_tokens and self.stale:
            raise StaleWeightsError(f"rollout refused: {self.stale}")
        self._pages.check(step, self._generation, block_sizes)

    def mark_stale(self, reason: str) -> None:
        """Refuse rollouts until weights are loaded completely again."""
        self.stale = reason
        self._loaded = set()

    def update(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None, finish: bool
    ) -> None:
        """Load tensors by Hugging Face name into the existing storage.

        Args:
            weights: (name, tensor) pairs of any float dtype; rounded to the model dtype. Experts
                come stacked, as transformers names them, or one by one, as checkpoints do; all of
                them, also where this rank holds a share (it takes its own). FP8 weights come with
                their scales, or as masters (see `quantized.as_served`).
            version: the trainer's counter; the old one plus 1 by default.
            finish: False when more buckets of the same update follow.

        Raises:
            InvalidInputError: unknown name, wrong shape or dtype, or a version that is no integer;
                nothing was loaded.
            ConsistencyError: a tensor holds NaN or infinity, or what rounds to it; nothing was
                loaded.
            StaleWeightsError: the update ends without some weight.
        """
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InvalidInputError(f"weight update: version must be an integer, got {version!r}")
        views = self._all_views()
        pairs = self._own(self._checked(dict(weights)), views)
        pairs = as_served(pairs, views, self._contract)
        self.stale = "a weight update is under way; finish it first"
        with torch.no_grad():
            # vLLM's loader knows stacked experts, but neither their scales nor a part of a stack.
            direct = {n for n in pairs if is_quantized(n, views[n]) or n in self.held}
            for name in direct:
                views[name].copy_(pairs[name])
            rest = [(name, tensor) for name, tensor in pairs.items() if name not in direct]
            if rest:
                self._load(rest)
        self._loaded |= pairs.keys()
        if finish:
            self.finish(version, self._loaded)

    def finish(self, version: int | None, loaded: set[str] | None = None) -> None:
        """Rebuild derived weights and serve; `loaded` None means that all names were loaded.

        Raises:
            StaleWeightsError: a weight is missing; the engine stays stale.
            ConsistencyError: a weight is not finite; the engine stays stale.
        """
        if loaded is not None:
            views = self.views()
            stacked = {
                name
                for name, parts in checkpoint_parts(views, self.held).items()
                if parts.keys() <= loaded
            }
            missing = sorted(views.keys() - loaded - stacked)
            if missing:
                raise StaleWeightsError(
                    f"weight update lacks {len(missing)} tensor(s): {', '.join(missing[:8])}"
                    f"{', ...' if len(missing) > 8 else ''}; send every parameter"
                )
        self._rebuild()
        self._check_served()
        self._generation += 1
        self.version = self.version + 1 if version is None else version
        self._loaded = set()
        self.stale = None

    def verify_derived(self) -> None:
        """Recompute every derived weight; raise StaleWeightsError naming one that differs."""
        for path, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            follows = getattr(method, "packed_follows", None)
            if follows is not None and not follows(module):
                raise StaleWeightsError(
                    f"{path}: the packed weight does not follow the loaded one; somebody wrote "
                    "into the parameter. Use update_weights_in_place"
                )
            derived = _as_tuple(getattr(method, "prepared", None))
            if all(getattr(each, "own", None) is None for each in derived):
                continue
            for each, fresh in zip(derived, _as_tuple(method.prepare(module)), strict=True):
                own = each.own
                if own is None or torch.equal(own.view(torch.uint8), fresh.view(torch.uint8)):
                    continue
                raise StaleWeightsError(
                    f"{path}: the prepared weight does not follow the loaded one; somebody wrote "
                    "into the parameter. Use update_weights_in_place"
                )

    def _rebuild(self) -> None:
        for module in self._model.modules():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "prepared"):
                method.process_weights_after_loading(module)

    def _load_from_outside(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        self.mark_stale(
            "model.load_weights was called past update_weights_in_place; call it to finish"
        )
        return self._load(weights)

    def _all_views(self) -> dict[str, torch.Tensor]:
        views = self.views()
        for parts in checkpoint_parts(views, self.held).values():
            views |= parts
        return views

    def _own(
        self, pairs: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what this rank holds of `pairs`: its rows of a stack, its experts."""
        return {
            name: tensor[self.held[name].rows] if name in self.held else tensor
            for name, tensor in pairs.items()
            if name in views
        }

    def _checked(self, pairs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        expected = expected_shapes(self.views(), self.held)
        checked = dict(pairs)
        if not all(isinstance(tensor, torch.Tensor) for tensor in checked.values()):
            raise InvalidInputError(
                "weight update: tensors must be torch.Tensor; vLLM's RPC to another process turns "
                "them into lists. Write a .safetensors file (in /dev/shm to stay in memory) and "
                "pass its path"
            )
        integers = [
            f"{name} must be of a float dtype, got {tensor.dtype}"
            for name, tensor in checked.items()
            if not tensor.is_floating_point()
        ]
        if integers:
            raise InvalidInputError(f"weight update: {'; '.join(integers[:8])}")
        if self._tied and TIED_HEAD in checked:
            head = checked.pop(TIED_HEAD)
            body = checked.get(TIED_TO)
            if body is not None and not torch.equal(head, body):
                raise InvalidInputError(
                    f"weight update: {TIED_HEAD} must equal {TIED_TO}, to which the model ties it"
                )
        unknown = sorted(checked.keys() - expected.keys())
        if unknown:
            raise InvalidInputError(
                f"weight update: unknown tensor(s) {', '.join(unknown[:8])}; names are those of "
                "the Hugging Face checkpoint"
            )
        shapes = [
            f"{name} must be {expected[name]}, got {tuple(tensor.shape)}"
            for name, tensor in checked.items()
            if tuple(tensor.shape) != expected[name]
        ]
        if shapes:
            raise InvalidInputError(f"weight update: {'; '.join(shapes[:8])}")
        _require_finite(checked)
        return checked

    def _check_served(self) -> None:
        _require_finite(self.views())


def _as_tuple(value: Any) -> tuple[Any, ...]:
    # Experts have two prepared weights, other layers one.
    return value if isinstance(value, tuple) else (value,)


def _require_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if bad:
        raise ConsistencyError(
            f"weights hold NaN or infinity in {len(bad)} tensor(s): {', '.join(bad[:8])}"
            f"{', ...' if len(bad) > 8 else ''}; they are not served"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FP8:
        # e4m3fn has no infinity, and one NaN of either sign.
        return tensor.numel() == 0 or int((tensor.view(torch.uint8) & 0x7F).max()) < 0x7F
    # One pass without temporaries; aminmax propagates NaN. A finite fp32 may round to infinity.
    return tensor.numel() == 0 or all(
        bool(torch.isfinite(end.to(torch.bfloat16))) for end in torch.aminmax(tensor)
    )


def read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """Read a .safetensors file, or every one in a folder.

    Raises:
        ConfigurationError: there is none, or one that is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    if not files or not all(file.is_file() for file in files):
        raise ConfigurationError([f"no .safetensors file at {path}"], "weight update")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(
                [f"{file} cannot be read ({error}); write it again"], "weight update"
            ) from error
    return tensors
