"""Weight versions and digests of a bridged model, and the in-place push into a live engine."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from consistent_kernels.errors import InvalidInputError, StaleWeightsError
from consistent_kernels.protocol.weights import (
    WeightDigest,
    WeightReceipt,
    check_receipt,
    state_digest,
)
from consistent_kernels.quantization.parameters import SCALE_SUFFIX
from train_bridge.modules import Bridged, unwrapped
from train_bridge.weight_version import MODEL_DTYPE, WeightVersion

_FOLLOWED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hook: Any = None


class LiveEngine(Protocol):
    """What `push_weights` needs of an engine; vLLM's `LLM` has it."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of every worker."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached pages; False where running requests hold some."""


def follow_optimizers(model: nn.Module) -> None:
    """Bump the model's weight version after each step of any PyTorch optimizer over its parameters.

    One process-wide step hook looks at all bridged models, so an optimizer made before or after
    bridging, or around FSDP2's sharded parameters, is followed alike. Call
    `weight_version(model).bump()` after changing weights in any other way.
    """
    global _hook
    _FOLLOWED.add(model)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_FOLLOWED):
        if isinstance(model, Bridged) and any(id(p) in stepped for p in model.parameters()):
            model._bridge.version.bump()
            forget_gathered(model)


def forget_gathered(model: nn.Module) -> None:
    """Make FSDP2 gather every parameter again before its next use.

    A scoring forward between backward and step leaves the root gathered, and the next forward would
    then read it as it was before the step.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def weight_version(model: nn.Module) -> WeightVersion:
    """Return the counter of a bridged model; set `.value` to resume it."""
    return _bridged(model)._bridge.version


def exported_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of every parameter, as the forward reads it.

    Parameters are rounded to bf16. Those of a block-FP8 model come as its checkpoints hold them:
    float8_e4m3fn values, then fp32 scales under `<name>_scale_inv`. A tied head is not repeated.
    FSDP2 shards are gathered, so all ranks must take part.
    """
    inner = _bridged(model)
    state = inner._bridge
    for name, parameter in inner.hf_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else None
        if name not in state.quantized_names:
            yield name, (tensor if whole is None else whole).to(MODEL_DTYPE)
            continue
        if whole is not None:
            values, scale = state.quantized.quantize(whole)
        else:
            values, scale = state.quantized_weight(name, parameter)
        yield name, values
        yield f"{name}{SCALE_SUFFIX}", scale


def weight_receipt(model: nn.Module) -> WeightReceipt:
    """Return what an engine must answer once it holds the model's weights."""
    return _receipt(model, state_digest(exported_weights(model)))


def check_prepared(model: nn.Module) -> None:
    """Compare every kept rounded or quantized weight with its master, bit for bit.

    Finds a master changed through `.data`, which no counter sees.

    Raises:
        StaleWeightsError: names the parameters.
    """
    inner = _bridged(model)
    state = inner._bridge
    stale = []
    parameters = dict(inner.named_parameters())
    for name, kept in state.prepared.items():
        masters = _masters(inner, parameters, name)
        if kept.key != state.key_of(*masters):
            continue  # would be made again before its next use
        detached = [master.detach() for master in masters]
        whole = torch.stack(detached) if len(detached) > 1 else detached[0]
        rounded = state.engine_rows(name, whole).to(MODEL_DTYPE)
        ours = kept.weight.to(MODEL_DTYPE)
        if not torch.equal(rounded.view(torch.int16), ours.view(torch.int16)):
            stale.append(name if name in parameters else f"{name}.weight")
    if state.quantized is not None:
        stale += state.quantized.changed({name: parameters[name] for name in state.quantized_names})
    if stale:
        raise StaleWeightsError(
            f"{len(stale)} weight(s) changed without a new version: {_some(stale)}. Call "
            "weight_version(model).bump() after changing parameters through .data"
        )


def _masters(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], name: str
) -> tuple[torch.Tensor, ...]:
    """Return what a kept weight was made of."""
    # Stacked experts are kept by parameter, everything else by module.
    if name in parameters:
        return (parameters[name],)
    module = model.get_submodule(name)
    return tuple(module.masters()) if hasattr(module, "masters") else (module.weight,)


def require_finite(model: nn.Module, op: str) -> None:
    """Raise InvalidInputError naming the parameters that hold NaN or infinity."""
    _refuse_nonfinite(
        op,
        [
            name
            for name, parameter in _bridged(model).named_parameters()
            if not bool(torch.isfinite(parameter.detach()).all())
        ],
    )


def push_weights(
    model: nn.Module, engine: LiveEngine, *, path: Path | None = None
) -> WeightReceipt:
    """Write the model's weights into a running engine, in place, and check that it has them.

    Args:
        model: bridged.
        engine: its workers carry vllm_consistent's extension, with no request running.
        path: a folder that engine and trainer share; weights then go through a .safetensors file
            in it (an engine in another process). By reference otherwise.

    Returns:
        The receipt that the engine gave: version, digest by Hugging Face name, contract digest.

    Raises:
        InvalidInputError: a parameter is not finite; nothing was sent.
        StaleWeightsError: a receipt shows another version, contract or other bits, or the prefix
            cache could not be reset.
    """
    check_prepared(model)
    weights = dict(exported_weights(model))
    expected = _receipt(model, state_digest(weights.items()))
    _refuse_nonfinite("push_weights", list(expected.nonfinite))
    call: dict[str, Any] = {"version": expected.version}
    if path is None:
        call["weights"] = weights
    else:
        call["path"] = str(_write(weights, path))
    try:
        answers = engine.collective_rpc("update_weights_in_place", kwargs=call)
    except (AttributeError, NotImplementedError) as error:
        # What vLLM raises of a worker without our extension.
        raise StaleWeightsError(
            f"push_weights: the engine's workers take no weights ({error}): the plugin is not "
            "active there. Start the engine with VLLM_CONSISTENT=1 and vllm-consistent installed"
        ) from error
    if not engine.reset_prefix_cache():
        raise StaleWeightsError(
            "push_weights: the engine's prefix cache could not be reset, requests are running. "
            "Finish or abort them before a weight update"
        )
    if not answers:
        raise StaleWeightsError("push_weights: no worker of the engine sent a receipt")
    for rank, answer in enumerate(answers):
        if not isinstance(answer, Mapping):
            raise StaleWeightsError(f"push_weights: worker {rank} sent no receipt but {answer!r}")
        try:
            receipt = WeightReceipt.from_dict(answer)
            check_receipt(receipt, _of_rows(expected, weights, receipt.rows))
        except StaleWeightsError as error:
            raise StaleWeightsError(f"push_weights: worker {rank}: {error}") from None
    return expected


def _of_rows(
    expected: WeightReceipt,
    weights: Mapping[str, torch.Tensor],
    rows: Mapping[str, tuple[int, int]],
) -> WeightReceipt:
    """Return what a worker must answer that holds these rows of some parameters alone."""
    shared = {name: held for name, held in rows.items() if name in weights}
    if not shared:
        return expected
    parts = [(name, weights[name][start:stop]) for name, (start, stop) in shared.items()]
    digests = {**expected.digest.tensors, **state_digest(parts, shared).tensors}
    return dataclasses.replace(expected, digest=WeightDigest(digests))


def _write(weights: Mapping[str, torch.Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return file


def _receipt(model: nn.Module, digest: WeightDigest) -> WeightReceipt:
    state = _bridged(model)._bridge
    return WeightReceipt(state.version.value, digest, state.contract.digest)


def _refuse_nonfinite(op: str, names: list[str]) -> None:
    if names:
        raise InvalidInputError(
            f"{op}: parameters must be finite, got NaN or infinity in {_some(names)}. "
            "Load the last checkpoint; a step with a non-finite gradient must be skipped"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _bridged(model: nn.Module) -> Any:
    inner = unwrapped(model)
    if not isinstance(inner, Bridged):
        raise InvalidInputError(
            f"weights: model must be bridged, got {type(model).__name__}. Call bridge_model first"
        )
    return inner
