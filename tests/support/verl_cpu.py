"""verl on a CPU: the platform that verl lacks.

Import it before verl (verl does so itself with VERL_USE_EXTERNAL_MODULES=verl_cpu).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


_DEVICE_MODULE = types.SimpleNamespace(
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    manual_seed_all=_nothing,
    is_available=lambda: False,
    current_device=_zero,
    device_count=lambda: 1,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    memory_allocated=_zero,
    memory_reserved=_zero,
    get_device_name=lambda *_: "CPU",
    mem_get_info=lambda *_: (1 << 34, 1 << 34),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


_init_process_group = torch.distributed.init_process_group


def _init_gloo(backend: str | None = None, **kwargs: Any) -> None:
    # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here.
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


torch.distributed.init_process_group = _init_gloo
# verl's reference policy pins its offloaded parameters; without a device there is nothing to pin.
torch.Tensor.pin_memory = lambda self, *_: self


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device, the host."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: torch.device("cpu"))
    device_count = staticmethod(lambda: 1)
    set_device = staticmethod(_nothing)
    synchronize = staticmethod(_nothing)
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    set_allocator_settings = staticmethod(_nothing)
    empty_cache = staticmethod(_nothing)
    get_device_capability = staticmethod(lambda *_: (None, None))
    communication_backend_name = staticmethod(lambda: "gloo")
    visible_devices_envvar = staticmethod(lambda: "CUDA_VISIBLE_DEVICES")
    profiler_start = staticmethod(_nothing)
    profiler_stop = staticmethod(_nothing)
    # Ray counts accelerators by this name; `ray.init(num_gpus=1)` needs no device.
    ray_resource_name = staticmethod(lambda: "GPU")
    ray_noset_envvars = staticmethod(lambda: ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    is_ipc_supported = staticmethod(lambda: False)
    cudart = staticmethod(_nothing)

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # chosen by VERL_PLATFORM=cpu alone

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield
