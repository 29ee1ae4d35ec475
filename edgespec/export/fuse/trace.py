"""Walking through data values: what they come from, and where they lead. No opinion on what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from edgespec.export.fuse.facts import Facts, strip

_MAX_STEPS = 64


def forward(facts: Facts, start: ir.Value, is_goal: Callable[[ir.Node, int], bool]) -> tuple[ir.Node, int] | None:
    """Return the nearest node downstream of `start`, with the index of the input that leads to it, that is a goal.

    Only data is followed (not what is computed from its shape), and not through other products of matrices.
    """
    queue, seen = [start], {start}
    while queue and len(seen) < _MAX_STEPS:
        value = queue.pop(0)
        for node, index in value.uses():
            if is_goal(node, index):
                return node, index
            if node.op_type in ("MatMul", "Gemm"):
                continue
            fresh = [v for v in node.outputs if facts.is_data(v) and v not in seen]
            seen.update(fresh)
            queue += fresh
    return None


def dominator(facts: Facts, value: ir.Value) -> ir.Value | None:
    """Return the nearest data value that all of `value` is computed from, or None if it isn't near."""
    node = value.producer()
    if node is None:
        return None
    pending = set(facts.data_inputs(node))
    for _ in range(_MAX_STEPS):
        if len(pending) <= 1:
            return next(iter(pending), None)
        if any(v.producer() is None for v in pending):
            return None
        last = max(pending, key=lambda v: facts.order[v.producer()])
        pending.remove(last)
        pending.update(facts.data_inputs(last.producer()))
    return None


@dataclass(frozen=True)
class Peeled:
    """`value` times `scale` is what was peeled, but for casts and dimensions of one."""

    value: ir.Value
    scale: float


def peel(facts: Facts, value: ir.Value) -> Peeled:
    """Walk back through casts, constant factors and reshapes that only add or drop dimensions of one."""
    scale = 1.0
    while (node := value.producer()) is not None:
        inputs = facts.data_inputs(node)
        factor = _factor(facts, node, inputs[0]) if len(inputs) == 1 else None
        if factor is None:
            break
        value, scale = inputs[0], scale * factor
    return Peeled(value, scale)


def _factor(facts: Facts, node: ir.Node, data: ir.Value) -> float | None:
    if node.op_type in ("Cast", "Identity", "Dropout"):
        return 1.0
    if node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
        return 1.0 if _same_but_ones(facts, data, node.outputs[0]) else None
    if node.op_type in ("Mul", "Div") and len(node.inputs) == 2:
        other = node.inputs[1] if node.inputs[0] is data else node.inputs[0]
        number = facts.scalar(other)
        if number and (node.op_type == "Mul" or node.inputs[0] is data):
            return number if node.op_type == "Mul" else 1 / number
    return None


def _same_but_ones(facts: Facts, a: ir.Value, b: ir.Value) -> bool:
    settings = range(len(facts.settings))
    shapes = [(facts.shape(a, i), facts.shape(b, i)) for i in settings]
    return all(x is not None and y is not None and strip(x) == strip(y) for x, y in shapes)
