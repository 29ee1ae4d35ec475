"""What a draft wants to know of its target: an output `hidden` with what some layers' attention and the head read.

Knows weights and products, and no architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from edgespec.errors import ExportError
from edgespec.export.fuse.build import Builder, clean, constant_value
from edgespec.export.fuse.rows import KEEP, find_head

HIDDEN = "hidden"
_MOST_STEPS = 200  # between a layer's cache and the product before it


def add_hidden(model: ir.Model, layers: Sequence[int]) -> int:
    """Add an output `hidden` [1, keep, F]: what the attention's projections of each of `layers` read, then the head.

    Args:
        model: a tidied decoder, fused or with a growing cache; `keep_rows` has been tried.
        layers: numbers of layers, in the order of the output.
    Returns:
        F, the width of a row.
    Raises:
        ExportError: a layer or the head cannot be found.
    """
    graph = model.graph
    head = find_head(graph)
    if head is None or not _is_matrix(head.inputs[1]):
        raise ExportError("the LM head was not found, whose input the draft reads: use another draft")
    sources = [(_projection(graph, layer), f"{HIDDEN}.{layer}") for layer in layers]
    builder = Builder(graph)
    parts = [_last_rows(builder, graph, node, name) for node, name in sources]
    parts.append(_as_rows(builder, head.inputs[0], _width(head), f"{HIDDEN}.head"))
    output = builder.op("Concat", parts, HIDDEN, axis=-1)
    width = sum(_width(node) for node in (*(node for node, _ in sources), head))
    output.name = HIDDEN
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, KEEP, width])
    graph.outputs.append(output)
    clean(model)
    return width


def _projection(graph: ir.Graph, layer: int) -> ir.Node:
    """The product with a weight that makes a layer's queries, or its keys where attention is not fused."""
    name = f"past_key_values.{layer}.key"
    past = next((value for value in graph.inputs if value.name == name), None)
    uses = [] if past is None else [node for node, _ in past.uses()]
    fused = next((node for node in uses if node.op_type == "GroupQueryAttention"), None)
    joined = next((node for node in uses if node.op_type == "Concat"), None)
    starts: list[ir.Value | None] = []
    if fused is not None:
        starts = [fused.inputs[0]]
    elif joined is not None:
        starts = [value for value in joined.inputs if value is not past]
    found = _nearest_product(starts)
    if found is None:
        raise ExportError(f"layer {layer} was not found, whose input the draft reads: use another draft")
    return found


def _nearest_product(starts: Iterable[ir.Value | None]) -> ir.Node | None:
    queue, seen = [value.producer() for value in starts if value is not None], 0
    while queue and seen < _MOST_STEPS:
        node, seen = queue.pop(0), seen + 1
        if node is None:
            continue
        if node.op_type == "MatMul" and _is_matrix(node.inputs[1]):
            return node
        queue += [value.producer() for value in node.inputs if value is not None]
    return None


def _last_rows(builder: Builder, graph: ir.Graph, node: ir.Node, name: str) -> ir.Value:
    """What a product multiplies, of the rows that the head computes."""
    rows = _as_rows(builder, node.inputs[0], _width(node), name)
    keep = next((value for value in graph.inputs if value.name == KEEP), None)
    if keep is None:
        return rows
    start, end = builder.op("Neg", [keep], f"{name}.start"), builder.ints([np.iinfo(np.int64).max], f"{name}.end")
    return builder.op("Slice", [rows, start, end, builder.ints([1], f"{name}.axis")], f"{name}.rows")


def _as_rows(builder: Builder, value: ir.Value, width: int, name: str) -> ir.Value:
    """[1, rows, width], where some models multiply [rows, width]."""
    return builder.op("Reshape", [value, builder.ints([1, -1, width], f"{name}.shape")], f"{name}.flat")


def _is_matrix(value: ir.Value | None) -> bool:
    weight = constant_value(value)
    return weight is not None and len(weight.shape) == 2


def _width(node: ir.Node) -> int:
    weight = constant_value(node.inputs[1])
    assert weight is not None, node
    return int(weight.shape[0])
