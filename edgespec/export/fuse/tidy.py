"""Rewriting a graph so that it loads fast and every weight can be quantised: products of [1, S, K] with [K, N].

Knows nothing of attention; works on fused and unfused graphs. A weight that has to be transposed is computed when the
model is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgespec.export.fuse.build import Builder, clean, constant_value
from edgespec.export.fuse.cut import Array

#: Operators whose result has the type of their first input.
_SAME_TYPE = {
    *("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Sqrt", "Tanh", "Sigmoid", "Erf", "Relu", "Softmax", "MatMul", "Gemm"),
    *("Gather", "Reshape", "Transpose", "Slice", "Concat", "Split", "Unsqueeze", "Squeeze", "Expand"),
    *("LayerNormalization", "SimplifiedLayerNormalization", "GroupQueryAttention"),
}


def tidy(model: ir.Model) -> None:
    """Apply every rewriting of this module."""
    gemm_to_matmul(model)
    untie_head(model)
    drop_casts(model)
    fold_norms(model)


def gemm_to_matmul(model: ir.Model) -> int:
    """Turn each Gemm with a constant weight into MatMul and Add (quantisers know only MatMul); return how many."""
    builder, count = Builder(model.graph), 0
    for node in [n for n in model.graph if n.op_type == "Gemm" and _is_plain_gemm(n)]:
        weight = node.inputs[1]
        if _number(node, "transB", 0):
            weight = _transposed(builder, weight)
        name = node.outputs[0].name or "gemm"
        result = builder.op("MatMul", [node.inputs[0], weight], f"{name}.product")
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            result = builder.op("Add", [result, node.inputs[2]], f"{name}.sum")
        _replace(node.outputs[0], result)
        count += 1
    clean(model)
    return count


def untie_head(model: ir.Model) -> int:
    """Give products with a transposed weight (an LM head tied to the embedding) a weight [K, N]; return how many."""
    builder, count = Builder(model.graph), 0
    for node in list(model.graph):
        source = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if source is None or source.op_type != "Transpose":
            continue
        weight = source.inputs[0]
        if weight.is_initializer() and len(weight.shape) == 2:
            node.replace_input_with(1, _transposed(builder, weight))
            count += 1
    clean(model)
    return count


def drop_casts(model: ir.Model) -> int:
    """Remove casts to the type that a value has already; return how many."""
    types: dict[ir.Value, ir.DataType | None] = {}
    count = 0
    for node in list(model.graph):
        for value in node.outputs:
            types[value] = value.dtype or _type_of(node, types)
        if node.op_type != "Cast" or (node.outputs[0].is_graph_output() and not _may_be_output(node.inputs[0])):
            continue
        before = types.get(node.inputs[0]) or node.inputs[0].dtype
        if before is not None and before.value == node.attributes["to"].value:
            _replace(node.outputs[0], node.inputs[0])
            count += 1
    clean(model)
    return count


def fold_norms(model: ir.Model) -> int:
    """Write RMS norms (Zhang and Sennrich 2019) as one SimplifiedLayerNormalization each; return how many."""
    builder, count = Builder(model.graph), 0
    for node in list(model.graph):
        found = _rms_norm(node) if node.op_type == "Pow" else None
        if found is None:
            continue
        data, weight, epsilon, output = found
        name = (output.name or "norm").replace("/Mul_1_output_0", "")
        folded = builder.op(
            "SimplifiedLayerNormalization",
            [data, weight],
            f"{name}.folded",
            axis=-1,
            epsilon=epsilon,
            stash_type=1,
        )
        _replace(output, folded)
        count += 1
    clean(model)
    return count


def _replace(old: ir.Value, new: ir.Value) -> None:
    """Let `new` take the place of `old`, among the graph's outputs too."""
    if old.is_graph_output():
        outputs = new.producer().graph.outputs
        index = outputs.index(old)
        new.name, old.name, new.shape, new.type = old.name, f"{old.name}.old", old.shape, old.type
        outputs[index] = new
    old.replace_all_uses_with(new)


def _may_be_output(value: ir.Value) -> bool:
    """Whether a value can take over the name of an output of the graph."""
    return value.producer() is not None and not value.is_graph_output()


def _transposed(builder: Builder, weight: ir.Value) -> ir.Value:
    tensor = weight.const_value
    shape = [int(n) for n in reversed(tensor.shape)]

    def make() -> Array:
        turned: Array = tensor.numpy().T
        return turned

    return builder.lazy(make, shape, tensor.dtype, f"{weight.name}.transposed")


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


def _is_plain_gemm(node: ir.Node) -> bool:
    is_scaled = _number(node, "alpha", 1) != 1 or _number(node, "beta", 1) != 1
    return not is_scaled and not _number(node, "transA", 0) and bool(node.inputs[1].is_initializer())


def _type_of(node: ir.Node, types: Mapping[ir.Value, ir.DataType | None]) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].value)
    if node.op_type not in _SAME_TYPE or not node.inputs or node.inputs[0] is None:
        return None
    first = node.inputs[0]
    return types.get(first) or first.dtype


def _rms_norm(power: ir.Node) -> tuple[ir.Value, ir.Value, float, ir.Value] | None:
    """Return (data, weight, epsilon, output) if `weight * data / sqrt(mean(data ** 2) + epsilon)` starts here."""
    data = power.inputs[0]
    mean = _only_user(power, "ReduceMean") if _constant(power.inputs[1]) == 2 else None
    if mean is None or not _is_last_axis(mean):
        return None
    shifted = _only_user(mean, "Add")
    root = _only_user(shifted, "Sqrt")
    inverse = _only_user(root, "Reciprocal") or _only_user(root, "Div")
    scaled = _only_user(inverse, "Mul")
    weighted = _only_user(scaled, "Mul")
    if shifted is None or inverse is None or scaled is None or weighted is None:
        return None
    epsilon = _other_constant(shifted, mean.outputs[0])
    weight = next((v for v in weighted.inputs if v is not scaled.outputs[0]), None)
    inverted_one = inverse.op_type == "Reciprocal" or _constant(inverse.inputs[0]) == 1
    if epsilon is None or not inverted_one or data not in scaled.inputs:
        return None
    if weight is None or not weight.is_initializer() or len(weight.shape) != 1:
        return None
    return data, weight, epsilon, weighted.outputs[0]


def _only_user(node: ir.Node | None, op_type: str) -> ir.Node | None:
    if node is None or len(node.outputs[0].uses()) != 1 or node.outputs[0].is_graph_output():
        return None
    user: ir.Node = next(iter(node.outputs[0].uses()))[0]
    return user if user.op_type == op_type else None


def _is_last_axis(mean: ir.Node) -> bool:
    axes = constant_value(mean.inputs[1]) if len(mean.inputs) > 1 else None
    return axes is not None and axes.numpy().tolist() == [-1] and _number(mean, "keepdims", 1) == 1


def _constant(value: ir.Value | None) -> float | None:
    tensor = constant_value(value)
    return float(tensor.numpy().ravel()[0]) if tensor is not None and tensor.size == 1 else None


def _other_constant(node: ir.Node, value: ir.Value) -> float | None:
    other = next((v for v in node.inputs if v is not value), None)
    return _constant(other)
