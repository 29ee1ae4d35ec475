"""A float32 graph in half precision: weights, cache and what is computed between; logits leave in float32.

Knows nothing of attention. Meant for GPUs; processors have few operators in float16 and convert back and forth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.errors import ExportError

_SINGLE, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)


def to_half(model: ir.Model, advance: Callable[[float], None] = lambda fraction: None) -> int:
    """Change every float32 value of a graph to float16, in place; return how many weights that were.

    Masks of minus infinity stay what they are; finite numbers beyond the range of float16 become its ends.

    Raises:
        ExportError: the graph has branches, which the pass does not look into.
    """
    graph = model.graph
    weights = [value for value in graph.initializers.values() if value.dtype is _SINGLE]
    for done, value in enumerate(weights):
        assert value.const_value is not None
        value.const_value = _lazy_half(value.const_value)
        value.dtype = _HALF
        advance((done + 1) / len(weights))
    for node in graph:
        _change_attributes(node)
        for output in node.outputs:
            if output.dtype is _SINGLE:
                output.dtype = _HALF
    for value in graph.inputs:
        if value.dtype is _SINGLE:
            value.dtype = _HALF
    _widen_logits(graph)
    return len(weights)


def _change_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            raise ExportError(f"the graph has branches ({node.op_type} {node.name}): fp16 cannot be had, choose fp32")
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype is _SINGLE:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_half(attribute.as_tensor().numpy())))
        elif name == "value_float":
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_half(np.array(attribute.as_float()))))
        elif name == "to" and node.op_type == "Cast" and attribute.as_int() == _SINGLE.value:
            node.attributes[name] = ir.AttrInt64(name, _HALF.value)


def _widen_logits(graph: ir.Graph) -> None:
    index = next(i for i, value in enumerate(graph.outputs) if value.name == "logits")
    old = graph.outputs[index]
    node = ir.node("Cast", [old], {"to": _SINGLE.value}, name="logits.single")
    new = node.outputs[0]
    new.name, old.name = "logits", "logits.half"
    new.type, new.shape = ir.TensorType(_SINGLE), old.shape
    graph.append(node)
    graph.outputs[index] = new


def _lazy_half(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Converted each time that it is looked at, so that a model never exists twice."""

    def read() -> ir.Tensor:
        return ir.Tensor(_half(tensor.numpy()), name=tensor.name)

    return ir.LazyTensor(read, dtype=_HALF, shape=ir.Shape(tensor.shape), name=tensor.name)


def _half(array: NDArray[Any]) -> NDArray[np.float16]:
    limited = np.where(np.isfinite(array), np.clip(array, -_LARGEST, _LARGEST), array)
    return np.ascontiguousarray(limited.astype(np.float16)).reshape(array.shape)
