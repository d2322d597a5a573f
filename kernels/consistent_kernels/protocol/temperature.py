"""The temperatures that engine and trainer divide by alike."""

from __future__ import annotations

import torch

from consistent_kernels.errors import invalid

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this one when asked for a lower one that is not 0, and says so in a warning only
(vllm/sampling_params.py: SamplingParams.__post_init__, _MAX_TEMP)."""

HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses a higher one (vllm/sampling_params.py: SamplingParams._verify_args)."""

_EXPECTED = f"0 (greedy, scored at 1) or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
_HINT = (
    f"vLLM samples lower ones at {LOWEST_TEMPERATURE} and refuses higher ones: pass what the "
    "engine divided by"
)


def is_shared_temperature(value: float) -> bool:
    """Return whether vLLM divides by `value` when asked for it."""
    return value == 0 or LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE


def check_temperature(op: str, temperature: float | torch.Tensor) -> None:
    """Raise InvalidInputError for a temperature that the engine does not divide by.

    Args:
        op: for the message.
        temperature: one number, or a float tensor; a look at a tensor waits for its device.
    """
    if not isinstance(temperature, torch.Tensor):
        if not is_shared_temperature(float(temperature)):
            raise invalid(op, "temperature", _EXPECTED, temperature, _HINT)
        return
    # The fp32 value of LOWEST_TEMPERATURE lies below the fp64 one.
    lowest = torch.tensor(LOWEST_TEMPERATURE, dtype=torch.float32).item()
    fine = (temperature == 0) | ((temperature >= lowest) & (temperature <= HIGHEST_TEMPERATURE))
    if not bool(fine.all()):
        wrong = temperature[~fine].flatten()[0].item()
        raise invalid(op, "temperature", _EXPECTED, wrong, _HINT)
