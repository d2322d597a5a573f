"""Launches past Triton's own binding: one compiled form for each key, in the signature's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent_kernels import triton_launch
from consistent_kernels.errors import InvalidInputError
from consistent_kernels.triton_launch import launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Kernel:
    """Stands for a `triton.jit` function of two tensors, a number and two constants."""

    arg_names = ("x_ptr", "y_ptr", "stride", "WIDTH", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **constants: Any) -> Compiled:
            self.direct.append((grid, args, constants))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return call


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "PAST_BINDING", True)
    monkeypatch.setattr(triton_launch, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


def tensor(offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(OnCuda)


CONSTANTS = {"WIDTH": 48, "BLOCK": 64}


def test_the_second_call_launches_what_the_first_compiled() -> None:
    kernel, x, y = Kernel(), tensor(), tensor()
    launch(kernel, (5,), (x, y, 64), CONSTANTS, num_warps=4)
    assert kernel.direct == [((5,), (x, y, 64), CONSTANTS | {"num_warps": 4})]
    launch(kernel, (7, 3), (y, x, 128), CONSTANTS, num_warps=4)
    assert len(kernel.direct) == 1
    (call,) = kernel.compiled[0].calls
    assert call[:6] == (7, 3, 1, 77, "function", "metadata")
    assert call[6:9] == (None, None, None)
    assert call[9] is y
    assert call[10] is x
    assert call[11:] == (128, 48, 64)


@pytest.mark.parametrize(
    "other",
    [
        {"args": (tensor(), tensor(1), 64)},
        {"args": (tensor(dtype=torch.float32), tensor(), 64)},
        {"args": (tensor(), tensor(), 65)},
        {"args": (tensor(), tensor(), 1)},
        {"args": (tensor(), tensor(), 1 << 36)},
        {"args": (tensor(), tensor(), 64.0)},
        {"constants": {"WIDTH": 49, "BLOCK": 64}},
        {"num_warps": 8},
    ],
    ids=["alignment", "dtype", "divisibility", "one", "int64", "float", "constant", "option"],
)
def test_whatever_triton_specializes_on_is_compiled_anew(other: dict[str, Any]) -> None:
    kernel = Kernel()
    given = {"args": (tensor(), tensor(), 64), "constants": CONSTANTS, "num_warps": 4}
    launch(kernel, (5,), **given)
    launch(kernel, (5,), **(given | other))
    assert len(kernel.direct) == 2


def test_constants_out_of_order_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="constants"):
        launch(Kernel(), (5,), (tensor(), tensor(), 64), {"BLOCK": 64, "WIDTH": 48})


def test_switched_off_triton_takes_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "PAST_BINDING", False)
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (5,), (tensor(), tensor(), 64), CONSTANTS, num_warps=4)
    assert len(kernel.direct) == 2
    assert not triton_launch._COMPILED


def test_the_interpreter_takes_every_call() -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (5,), (torch.zeros(4), torch.zeros(4), 4), CONSTANTS)
    assert len(kernel.direct) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches need a CUDA device")
def test_direct_launches_equal_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    from consistent_kernels.rms_norm import triton as rms_norm

    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 3, 500):
        x, residual = (
            torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        monkeypatch.undo()
        monkeypatch.setattr(triton_launch, "PAST_BINDING", True)
        triton_launch._COMPILED.clear()
        first = rms_norm.rms_norm_fwd(x, residual, weight, 1e-6)
        assert triton_launch._COMPILED
        again = rms_norm.rms_norm_fwd(x, residual, weight, 1e-6)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = rms_norm.rms_norm_fwd(x, residual, weight, 1e-6)
        torch.cuda.synchronize()
        for other in (again, aside):
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
