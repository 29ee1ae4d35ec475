"""Cutting pieces out of a graph and running them. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.export.fuse.report import NoMatch

Array = NDArray[Any]
Rewrite = Callable[["Clone", ir.Node], bool]


class Clone:
    """A growing copy of some nodes of a graph, in topological order.

    `values` maps original values to copies. What is put there beforehand is where the copying stops.
    """

    def __init__(self, rewrite: Rewrite | None = None) -> None:
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.values: dict[ir.Value, ir.Value] = {}
        self._rewrite = rewrite
        self._constants = 0

    def add_input(self, value: ir.Value, dtype: ir.DataType, rank: int) -> None:
        """Make `value` an input of the copy."""
        shape = ir.Shape([None] * rank)
        copy = ir.Value(name=value.name, type=ir.TensorType(dtype), shape=shape)
        self.inputs.append(copy)
        self.values[value] = copy

    def constant(self, array: Array) -> ir.Value:
        """Return a new constant of the copy."""
        self._constants += 1
        tensor = ir.tensor(np.asarray(array, order="C"), name=f"cut_constant_{self._constants}")
        return self._initializer(tensor.name, tensor)

    def emit(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """Add a node to the copy and return its output."""
        node = ir.node(op_type, inputs, attributes, name=f"cut_node_{len(self.nodes)}")
        node.outputs[0].name = f"cut_value_{len(self.nodes)}"
        self.nodes.append(node)
        output: ir.Value = node.outputs[0]
        return output

    def copy_of(self, value: ir.Value | None) -> ir.Value | None:
        """Return the copy of `value`, whose producer was copied before (initializers are copied on demand)."""
        if value is None:
            return None
        if value not in self.values:
            if value.const_value is None or value.producer() is not None:
                raise NoMatch(f"the value {value.name} cannot be computed from what is given")
            self.values[value] = self._initializer(value.name, value.const_value)
        return self.values[value]

    def copy_node(self, node: ir.Node) -> None:
        """Copy one node whose inputs were copied before."""
        if self._rewrite is not None and self._rewrite(self, node):
            return
        inputs = [self.copy_of(value) for value in node.inputs]
        outputs = [ir.Value(name=value.name) for value in node.outputs]
        copy = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=outputs)
        copy.name = node.name
        self.nodes.append(copy)
        self.values.update(zip(node.outputs, outputs, strict=True))

    def model(self, outputs: Iterable[ir.Value], opsets: Mapping[str, int]) -> ir.Model:
        """Wrap up as a model with these (copied) values as its outputs."""
        graph = ir.Graph(
            self.inputs,
            list(outputs),
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports=dict(opsets),
            name="cut",
        )
        return ir.Model(graph, ir_version=8)

    def _initializer(self, name: str | None, tensor: ir.TensorProtocol) -> ir.Value:
        if isinstance(tensor, ir.ExternalTensor):
            # A cut has no folder beside it to find a file in. A copy, because views would keep the file mapped.
            tensor = ir.tensor(np.array(tensor.numpy()), name=name)
        value_type, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape)
        value = ir.Value(name=name, type=value_type, shape=shape, const_value=tensor)
        self.initializers.append(value)
        return value


def ancestors(outputs: Iterable[ir.Value], stops: Callable[[ir.Value], bool], limit: int) -> list[ir.Node]:
    """Return the nodes that compute `outputs`, in topological order, not going beyond values that `stops`.

    Raises:
        NoMatch: there are more than `limit` of them.
    """
    order: dict[ir.Node, None] = {}
    entered: set[ir.Node] = set()
    stack = [(value.producer(), False) for value in outputs if not stops(value)]
    while stack:
        node, is_done = stack.pop()
        if node is None or node in order:
            continue
        if is_done:
            order[node] = None
            continue
        if node in entered:
            continue
        entered.add(node)
        if len(entered) > limit:
            raise NoMatch(f"more than {limit} operators lie between the ends of a part of the attention")
        stack.append((node, True))
        stack += [(v.producer(), False) for v in node.inputs if v is not None and not stops(v)]
    return list(order)


class Runner:
    """An ONNX Runtime session over a cut: plain operators, unoptimised, one thread."""

    def __init__(self, model: ir.Model) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = False
        data = ir.to_proto(model).SerializeToString()
        self._call(lambda: self._open(ort, data, options))

    def _open(self, ort: Any, data: bytes, options: Any) -> None:
        self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def __call__(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run with every input that the cut has (others are left out) and return its outputs in order."""
        wanted = {i.name: feeds[i.name] for i in self._session.get_inputs()}
        outputs: list[Array] = self._call(lambda: self._session.run(None, wanted))
        return outputs

    @staticmethod
    def _call(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # onnxruntime's exceptions share no base class but this one
            raise NoMatch(f"a part of the graph cannot be run on its own ({error})") from error
