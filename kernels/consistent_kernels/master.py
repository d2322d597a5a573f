"""Master weights rounded to the model dtype: opaque, for a compiler leaves out a cast and back."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("round_master(Tensor master, ScalarType dtype, ScalarType kept) -> Tensor")


def _round_master(master: torch.Tensor, dtype: torch.dtype, kept: torch.dtype) -> torch.Tensor:
    return master.to(dtype).to(kept).contiguous()


_LIBRARY.impl("round_master", _round_master, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::round_master", lib=_LIBRARY)
def _(master: torch.Tensor, dtype: torch.dtype, kept: torch.dtype) -> torch.Tensor:
    return torch.empty(master.shape, dtype=kept, device=master.device)


def round_master(master: torch.Tensor, dtype: torch.dtype, kept: torch.dtype) -> torch.Tensor:
    """Return `master` rounded to `dtype`, to nearest even, held in `kept`; contiguous.

    Args:
        master: a weight of any float dtype; detached.
        dtype: the model dtype; kept: the dtype that an implementation reads.

    Returns:
        The master itself where it already is contiguous and both dtypes are its own.
    """
    master = master.detach()
    if dtype in (master.dtype, kept):
        return master.to(kept).contiguous()
    return torch.ops.consistent_kernels.round_master(master, dtype, kept)
