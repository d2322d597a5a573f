"""Whether the checkpoint that an engine was started from holds every weight that it serves.

vLLM does not say so: a linear layer whose weight is missing keeps what its memory held
(vllm/model_executor/model_loader/default_loader.py: track_weights_loading passes over every layer
with a `process_weights_after_loading`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from consistent_kernels.errors import StaleWeightsError
from vllm_consistent.weights.names import checkpoint_parts

_FORMATS = ("auto", "hf", "safetensors")


def missing_weights(folder: Path, views: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the served weights that no .safetensors file in `folder` holds; none without files.

    Args:
        folder: of the checkpoint.
        views: of `hf_views`; a tied head is not among them.
    """
    from safetensors import safe_open

    names: set[str] = set()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    if not files:
        return []
    parts = checkpoint_parts(dict(views), {})
    stacked = {name for name, each in parts.items() if each.keys() <= names}
    return sorted(views.keys() - names - stacked)


def check_checkpoint(vllm_config: Any, views: Mapping[str, torch.Tensor]) -> None:
    """Raise StaleWeightsError naming what a bf16 checkpoint on this disk lacks.

    Not looked at: weights that come later ("dummy"), other formats, quantized ones, hub names.
    """
    model = vllm_config.model_config
    folder = Path(model.model)
    if model.quantization is not None or not folder.is_dir():
        return
    if str(vllm_config.load_config.load_format) not in _FORMATS:
        return
    missing = missing_weights(folder, views)
    if missing:
        raise StaleWeightsError(
            f"{folder} lacks {len(missing)} of the model's weights: {', '.join(missing[:8])}"
            f"{', ...' if len(missing) > 8 else ''}; vLLM would serve whatever is in memory there"
        )
