"""Finds floating-point arithmetic outside our ops in a compiled graph.

Inductor fuses and reorders what it understands; what happens inside an opaque op it cannot touch.
So a graph whose only floating-point operators are ours (and vLLM's attention, which calls ours) has
the bits of eager execution.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

_OUR_NAMESPACES = ("consistent_kernels",)
_OUR_OPS = ("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update")
_MOVES = frozenset(
    {
        # Views, copies and allocation: no arithmetic.
        *("alias", "as_strided", "cat", "clone", "copy", "copy_", "detach", "empty", "empty_like"),
        *(
            "empty_strided",
            "expand",
            "narrow",
            "new_empty",
            "permute",
            "reshape",
            "select",
            "slice",
        ),
        *("slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose"),
        *("unbind", "unsqueeze", "unsafe_split", "view", "_unsafe_view", "contiguous", "flatten"),
        *("chunk", "unflatten", "size", "empty_permuted", "zeros", "full", "zero_", "index_select"),
        *("auto_functionalized", "auto_functionalized_v2", "sym_size"),
    }
)


def foreign_float_ops(graph: GraphModule) -> list[str]:
    """Return "node: operator" for each floating-point operator of `graph` that is not ours.

    Nested graphs (higher-order operators, piecewise pieces) are walked too.
    """
    found = []
    for module in _graphs(graph):
        for node in module.graph.nodes:
            name = _operator(node)
            if name is not None and _touches_floats(node) and not _is_allowed(name):
                found.append(f"{node.name}: {name}")
    return found


def _graphs(graph: GraphModule) -> Iterator[GraphModule]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield module


def _operator(node: Node) -> str | None:
    if node.op == "call_method":
        return f"Tensor::{node.target}"
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.name().split(".")[0] if "." in target.name() else target.name()
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", str(target))
    return f"{module}::{name}"


def _is_allowed(name: str) -> bool:
    namespace, _, op = name.rpartition("::")
    return (
        namespace in _OUR_NAMESPACES
        or name in _OUR_OPS
        or op in _MOVES
        or (namespace in ("_operator", "operator") and op in ("getitem", "setitem"))
    )


def _touches_floats(node: Node) -> bool:
    values = [node.meta.get("val", node.meta.get("example_value"))]
    values += [
        inner.meta.get("val", inner.meta.get("example_value")) for inner in node.all_input_nodes
    ]
    return any(_is_float(value) for value in values)


def _is_float(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    if isinstance(value, (tuple, list)):
        return any(_is_float(item) for item in value)
    return False
