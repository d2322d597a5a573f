"""Puts our forwards under a Hugging Face model, in place, and takes them off again."""

from __future__ import annotations

from typing import Any

from torch import nn

from consistent_kernels.attention import AttentionParameters
from consistent_kernels.contract import Contract, check_same
from consistent_kernels.errors import ConfigurationError
from consistent_kernels.model_facts import ModelFacts, model_facts
from consistent_kernels.resolve import resolve_contract
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.router import RouterParameters
from train_bridge.causal_lm import is_sharded
from train_bridge.classes import CONSISTENT, MODELS, QUANTIZED, UNUSED, ConsistentLMHead
from train_bridge.functions.quantization import QuantizedWeights
from train_bridge.masters import remember_quantization, served_quantization
from train_bridge.modules import Bridged, unwrapped
from train_bridge.state import BridgeState
from train_bridge.weight_version import MASTER_DTYPES, WeightVersion
from train_bridge.weights import follow_optimizers


def bridge_model(
    model: nn.Module,
    contract: Contract | None = None,
    *,
    device_type: str | None = None,
    program: str | None = None,
) -> nn.Module:
    """Give a Hugging Face model the forward of the engine, in place.

    Modules change their class (to a subclass of their own, of the same name); parameters, buffers,
    names, hooks and state_dict stay. Call it after loading and before FSDP2's `fully_shard`.
    Bridging a bridged model again only checks the contract.

    Args:
        model: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or Qwen3MoeForCausalLM, fp32 or
            bf16 parameters.
        contract: the engine's, whose implementations and quantization are taken; resolved from the
            model when None (block FP8 where its configuration says so: `load_masters`).
        device_type: "cpu" or "cuda", where the forward will run; where the parameters are, by
            default.
        program: "triton" takes our own kernels on CUDA and none out of vLLM's wheel, as
            VLLM_CONSISTENT_PROGRAM=triton does in the engine; None the fastest. A contract decides
            before it.

    Returns:
        The same object.

    Raises:
        ConfigurationError: everything about the model that no contract covers, at once.
        ContractMismatchError: this side would compute something else than `contract` says.
        MissingBinaryError: the fastest program needs vLLM's CUDA wheel or a CUDA toolkit.
    """
    if is_bridged(model):
        state = model._bridge
        if device_type not in (None, state.device_type):
            raise ConfigurationError(
                [f"the model is bridged for {state.device_type}, not for {device_type}"],
                "bridge_model",
            )
    else:
        state = _new_state(model, device_type, contract, program)
    if contract is not None:
        check_same(state.contract, contract, ours_is="this trainer", theirs_is="the engine")
    if not is_bridged(model):
        _swap(model, state)
        follow_optimizers(model)
    return model


def unbridge_model(model: nn.Module) -> nn.Module:
    """Undo `bridge_model`, in place; a model that is not bridged is left alone."""
    for module in model.modules():
        if isinstance(module, Bridged):
            module.__class__ = type(module).stock
            del module._bridge, module._bridge_name
    return model


def is_bridged(model: nn.Module) -> bool:
    """Return whether `bridge_model` was called on the model."""
    return isinstance(model, Bridged)


def bridge_state(model: nn.Module) -> BridgeState:
    """Return the state shared by the modules of a bridged model, also through wrappers.

    Raises:
        ConfigurationError: the model is not bridged.
    """
    inner = unwrapped(model)
    if not is_bridged(inner):
        raise ConfigurationError(
            [f"{type(model).__name__} is not bridged; call bridge_model first"], "model"
        )
    return inner._bridge


def _new_state(
    model: nn.Module, device_type: str | None, contract: Contract | None, program: str | None
) -> BridgeState:
    if is_sharded(model):
        raise ConfigurationError(
            ["it is sharded already; call bridge_model before fully_shard"],
            f"model {type(model).__name__}",
        )
    violations: list[str] = []
    facts: ModelFacts | None = None
    config = getattr(model, "config", None)
    quantization = served_quantization(config, contract)
    try:
        facts = model_facts(
            config, "bfloat16", architecture=type(model).__name__, quantization=quantization
        )
    except ConfigurationError as error:
        violations += error.violations
    if type(model) in MODELS:
        violations += _model_violations(model)
    elif facts is not None:
        violations.append(f"class {type(model).__module__}.{type(model).__name__} is unknown")
    device = device_type or next((p.device.type for p in model.parameters()), "unknown")
    if device not in ("cpu", "cuda"):
        violations.append(f"parameters are on {device!r}; give device_type 'cpu' or 'cuda'")
    if violations:
        raise ConfigurationError(violations, f"model {type(model).__name__}")
    remember_quantization(model, quantization)
    resolved = resolve_contract(facts, device, only=program, like=contract)
    version = WeightVersion()
    return BridgeState(
        contract=resolved,
        facts=facts,
        version=version,
        quantized=_quantized_weights(facts, resolved, version),
        device_type=device,
        rope=RopeParameters.from_hf_config(model.config),
        attention=AttentionParameters(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            scale=facts.head_dim**-0.5,
            sliding_window=facts.sliding_window,
        ),
        router=RouterParameters.from_hf_config(model.config) if facts.moe else None,
    )


def _quantized_weights(
    facts: ModelFacts, contract: Contract, version: WeightVersion
) -> QuantizedWeights | None:
    if facts.scale_format is None:
        return None
    impl = contract.implementation("quantization")
    return QuantizedWeights(version, scale_format=facts.scale_format, impl=impl)


def _model_violations(model: Any) -> list[str]:
    violations = []
    dropout = getattr(model.config, "attention_dropout", 0.0)
    if dropout:
        violations.append(f"attention_dropout={dropout} is not supported; set it to 0")
    dtypes = {p.dtype for p in model.parameters()} - set(MASTER_DTYPES)
    if dtypes:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        violations.append(f"parameters of {names} are not supported; use float32 or bfloat16")
    foreign = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if type(module) not in CONSISTENT and not isinstance(module, UNUSED)
    ]
    if foreign:
        violations.append(f"modules that no op serves: {', '.join(foreign[:8])}")
    patched = [name for name, module in model.named_modules() if "forward" in vars(module)]
    if patched:
        violations.append(
            f"forwards replaced on the instance (accelerate, Liger, ...): {', '.join(patched[:8])}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    if tied != bool(model.config.tie_word_embeddings):
        violations.append(
            f"tie_word_embeddings is {model.config.tie_word_embeddings}, but the parameters are "
            f"{'one' if tied else 'two'}; call model.tie_weights() or correct the configuration"
        )
    return violations


def _swap(model: nn.Module, state: BridgeState) -> None:
    head = model.get_output_embeddings()
    quantized: list[str] = []
    for name, module in model.named_modules():
        kind = ConsistentLMHead if module is head else CONSISTENT.get(type(module))
        if kind is None:
            continue
        if state.facts.quantization and module is not head and type(module) in QUANTIZED:
            kind, parameters = QUANTIZED[type(module)]
            quantized += [f"{name}.{parameter}" for parameter in parameters]
        module.__class__ = kind
        module._bridge = state
        module._bridge_name = name or type(module).__name__
    state.quantized_names = frozenset(quantized)
