"""A tensor computed from a parameter, kept at one address so that captured graphs stay valid."""

from __future__ import annotations

import torch

from consistent_kernels.errors import StaleWeightsError


class Derived:
    """Holds the prepared form of one weight, or nothing where that form is the weight itself."""

    def __init__(self) -> None:
        self._own: torch.Tensor | None = None
        self._built = False

    @property
    def built(self) -> bool:
        """Whether `rebuild` was ever called."""
        return self._built

    @property
    def own(self) -> torch.Tensor | None:
        """The separate copy, or None where the weight is used as loaded."""
        return self._own

    def rebuild(self, weight: torch.Tensor, prepared: torch.Tensor) -> None:
        """Take `prepared`, just computed from `weight`."""
        if prepared.data_ptr() == weight.data_ptr():
            self._own = None
        elif self._own is None or self._own.shape != prepared.shape:
            self._own = prepared
        else:
            self._own.copy_(prepared)
        self._built = True

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor to compute with."""
        if self._own is not None:
            return self._own
        if not self._built:
            raise StaleWeightsError(
                "a layer runs before its weights were processed after loading; load weights "
                "through the model loader or update_weights_in_place"
            )
        return weight
