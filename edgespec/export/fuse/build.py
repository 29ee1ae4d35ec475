"""Adding nodes and constants to a graph: the few verbs that the passes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from edgespec.export.fuse.cut import Array

MICROSOFT = "com.microsoft"


class Builder:
    """Appends to `graph`. The order of the nodes is put right by `clean` at the end."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._names = {v.name for v in graph.inputs} | set(graph.initializers)
        self._names |= {v.name for node in graph for v in node.outputs}

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        domain: str = "",
        num_outputs: int = 1,
        **attributes: Any,
    ) -> ir.Node:
        """Append a node; its outputs are called `name`, `name:1`, ..."""
        name = self._unique(name)
        outputs = [ir.Value(name=name if i == 0 else f"{name}:{i}") for i in range(num_outputs)]
        node = ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=name)
        self.graph.append(node)
        return node

    def op(self, op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
        """Append a node with one output and return that."""
        output: ir.Value = self.node(op_type, inputs, name, **attributes).outputs[0]
        return output

    def constant(self, array: Array, name: str) -> ir.Value:
        """Register a small initializer."""
        name = self._unique(name)
        return self._register(ir.tensor(np.asarray(array, order="C"), name=name), name)

    def ints(self, numbers: Sequence[int], name: str) -> ir.Value:
        """Register a vector of int64."""
        return self.constant(np.array(numbers, dtype=np.int64), name)

    def lazy(self, make: Callable[[], Array], shape: Sequence[int], dtype: ir.DataType, name: str) -> ir.Value:
        """Register an initializer that is computed when it is written, so that it takes no memory before."""
        name = self._unique(name)

        def tensor() -> ir.Tensor:
            return ir.Tensor(np.asarray(make(), order="C"), name=name)

        return self._register(ir.LazyTensor(tensor, dtype=dtype, shape=ir.Shape(shape), name=name), name)

    def input(self, name: str, shape: Sequence[int | str]) -> ir.Value:
        """Add an int64 input of the graph."""
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        self._names.add(name)
        return value

    def _register(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        shape = ir.Shape(tensor.shape)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _unique(self, name: str) -> str:
        unique, i = name, 0
        while unique in self._names:
            i += 1
            unique = f"{name}_{i}"
        self._names.add(unique)
        return unique


def clean(model: ir.Model) -> None:
    """Remove what nothing uses, and sort the nodes."""
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)


def drop_identities(graph: ir.Graph) -> None:
    """Connect the users of Identity nodes to what these copy (exporters share equal weights that way)."""
    for node in list(graph):
        if node.op_type == "Identity" and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            graph.remove(node, safe=True)


def constant_value(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or a Constant node, or None."""
    return None if value is None else ir.convenience.get_const_tensor(value)
