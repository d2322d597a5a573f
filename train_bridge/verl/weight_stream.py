"""verl's export of weights, rounded once by us and closed with a receipt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from consistent_kernels.errors import ConsistencyError, InvalidInputError
from consistent_kernels.protocol.handover import HANDOVER_NAME, Handover
from consistent_kernels.protocol.weights import (
    TensorDigest,
    WeightDigest,
    WeightReceipt,
    tensor_digest,
)
from train_bridge.hf import bridge_state
from train_bridge.modules import unwrapped
from train_bridge.reporting import consistency_report
from train_bridge.weight_version import MODEL_DTYPE


def weight_stream(
    model: nn.Module, named: Iterable[tuple[str, torch.Tensor]], *, served: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter in bf16, then the record that the engine must agree with.

    Masters are rounded here as the forward rounds them (to nearest, ties to even), so that the
    digest is that of the bits on the wire, which are also half as many. A tied head is not sent
    twice.

    Args:
        model: bridged; its weight version is that of the stream.
        named: (Hugging Face name, whole tensor) pairs; on several ranks all must iterate.
        served: whether this trainer has run a forward on tokens that the engine sampled.

    Raises:
        ConsistencyError: a parameter is absent from `named`.
        InvalidInputError: a parameter is not finite.
    """
    names = {name for name, _ in unwrapped(model).hf_parameters()}
    state = bridge_state(model)
    version = state.version.value
    digests: dict[str, TensorDigest] = {}
    device = torch.device("cpu")
    for name, tensor in named:
        if name not in names:
            continue
        rounded = tensor.detach().to(MODEL_DTYPE)
        digests[name] = tensor_digest(rounded)
        device = rounded.device
        yield name, rounded
    missing = sorted(names - digests.keys())
    if missing:
        raise ConsistencyError(f"weights not exported: {', '.join(missing[:8])}")
    receipt = WeightReceipt(version, WeightDigest(digests), state.contract.digest)
    if receipt.nonfinite:
        raise InvalidInputError(
            f"weights sent to the engine must be finite, got NaN or infinity in "
            f"{', '.join(receipt.nonfinite[:8])}. Resume from the last checkpoint"
        )
    record = Handover(receipt, consistency_report(model), served)
    yield HANDOVER_NAME, record.to_tensor(device)
