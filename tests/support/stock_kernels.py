"""vLLM's Triton kernels where its build switches Triton off, to be run by Triton's interpreter."""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType


def load_stock_kernels(path: str, *names: str) -> ModuleType:
    """Return a module with these functions of vLLM's file, as they stand there.

    On a CPU vLLM's `triton.jit` is a placeholder, so the text is taken, not the object. Triton
    reads a kernel's source from its file: the module has one of its own.

    Args:
        path: inside vLLM's package.
        names: the kernel, and what it calls of the same file.
    """
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / path).read_text()
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    lines, parts = text.splitlines(), ["import triton", "import triton.language as tl"]
    for name in names:
        node = found[name]
        first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    file = Path(tempfile.mkdtemp()) / "stock_kernels_text.py"
    file.write_text("\n\n\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location("stock_kernels_text", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
