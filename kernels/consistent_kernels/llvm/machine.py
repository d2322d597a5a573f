"""The machine that kernels are compiled for, and the compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import platform
from importlib import metadata
from typing import Any

_FEATURES = ("avx2", "fma")
_WIDE = "avx512bf16"
_KEPT: list[Any] = []
"""Compiled modules: their code lives as long as the engine object does."""


@functools.cache
def _features() -> dict[str, bool]:
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


@functools.cache
def is_available() -> bool:
    """Return whether kernels can be compiled and run here: x86-64 with AVX2 and llvmlite."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    if importlib.util.find_spec("llvmlite") is None:
        return False
    return all(_features().get(name, False) for name in _FEATURES)


@functools.cache
def multiplier() -> str:
    """Return how bf16 numbers are multiplied and added here: "dpbf16" (pairs, AVX-512) or "fma"."""
    return "dpbf16" if _features().get(_WIDE, False) else "fma"


@functools.cache
def vector_bits() -> int:
    """Return the width of the vector registers: 512 or 256. It moves no bits."""
    return 512 if _features().get("avx512f", False) else 256


def identity() -> dict[str, str]:
    """Return what decides bits besides our sources, for a program's schedule."""
    return {"multiply": multiplier(), "llvmlite": metadata.version("llvmlite")}


@functools.cache
def _target() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple()


def compile_kernel(module: Any, name: str, cpu: str | None = None) -> int:
    """Return the address of function `name` of an `llvmlite.ir.Module`, compiled for this CPU.

    Nothing is contracted or reassociated: the instructions carry no fast-math flag, and a fused
    multiply-add is one only where the module says so.

    Args:
        cpu: compile for this older CPU instead, by LLVM's name.
    """
    from llvmlite import binding

    machine = _target().create_target_machine(
        cpu=cpu or binding.get_host_cpu_name(),
        features="" if cpu else binding.get_host_cpu_features().flatten(),
        opt=3,
    )
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    # The kernels are vectors already; guesses of the vectorizers only cost compile time.
    options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _KEPT.append(engine)
    return engine.get_function_address(name)


@functools.cache
def gomp_parallel() -> int | None:
    """Return the address of OpenMP's entry point in the runtime that PyTorch uses, if there is one.

    Its threads are PyTorch's own, so the two never compete for cores.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
