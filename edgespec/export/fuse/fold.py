"""Computing once what depends on weights alone. Knows nothing of attention."""

from __future__ import annotations

import onnx_ir as ir

from edgespec.export.fuse.build import Builder, clean
from edgespec.export.fuse.cut import Clone, Runner

#: Bytes of the largest weight that takes part: products of large ones are for whoever writes the graph.
_LARGEST = 1 << 20
_UNFIT = ("Constant", "ConstantOfShape", "Expand", "Range", "RandomNormal", "RandomUniform")


def fold_constants(model: ir.Model) -> int:
    """Replace what small initializers and constants determine by its value; return how many nodes that was."""
    graph = model.graph
    known = {value for value in graph.initializers.values() if _is_small(value)}
    known |= {node.outputs[0] for node in graph if node.op_type == "Constant"}
    nodes = []
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        if given and node.op_type not in _UNFIT and not node.domain and all(value in known for value in given):
            nodes.append(node)
            known.update(node.outputs)
    inside = set(nodes)
    ends = [v for node in nodes for v in node.outputs if any(user not in inside for user in v.consumers())]
    ends = [value for value in ends if not value.is_graph_output()]
    if not ends:
        return 0
    _replace(model, nodes, ends)
    return len(nodes)


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.nbytes <= _LARGEST


def _replace(model: ir.Model, nodes: list[ir.Node], ends: list[ir.Value]) -> None:
    clone = Clone()
    for node in nodes:
        for value in node.inputs:
            producer = value.producer() if value is not None and value not in clone.values else None
            if producer is not None and producer.op_type == "Constant":
                clone.copy_node(producer)
        clone.copy_node(node)
    outputs = [clone.emit("Identity", [clone.values[value]]) for value in ends]
    results = Runner(clone.model(outputs, model.graph.opset_imports))({})
    builder = Builder(model.graph)
    for value, result in zip(ends, results, strict=True):
        value.replace_all_uses_with(builder.constant(result, f"{value.name}.folded"))
    clean(model)
