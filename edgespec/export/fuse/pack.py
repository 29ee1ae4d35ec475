"""Joining the projections of q, k and v to one product, where the graph allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.build import Builder
from edgespec.export.fuse.cut import Array
from edgespec.export.fuse.facts import Facts
from edgespec.export.fuse.region import Region
from edgespec.export.fuse.report import NoMatch

_LAYOUT = ("Slice", "Split", "Reshape", "Transpose", "Gather", "Squeeze", "Unsqueeze", "Cast", "Identity")


@dataclass(frozen=True)
class Projection:
    """`data @ weight + bias`, weight [inputs, outputs]."""

    data: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def joined_rows(facts: Facts, heads: ir.Value) -> ir.Value | None:
    """Return the value [1, tokens, heads * head_dim] that `heads` [1, heads, tokens, head_dim] only rearranges."""
    node = heads.producer()
    if node is None or node.op_type != "Transpose" or tuple(node.attributes["perm"].value) != (0, 2, 1, 3):
        return None
    reshape = node.inputs[0].producer()
    if reshape is None or reshape.op_type != "Reshape":
        return None
    shapes = [facts.shape(heads, i) or () for i in range(len(facts.settings))]
    rows: ir.Value = reshape.inputs[0]
    is_joined = facts.has_shape(rows, [(1, shape[2], shape[1] * shape[3]) for shape in shapes])
    return rows if is_joined else None


def pack_qkv(builder: Builder, facts: Facts, heads: Sequence[ir.Value], name: str) -> ir.Value | None:
    """Return a value [1, tokens, channels of q, then k, then v], or None if these have no common product.

    Args:
        heads: q, k and v, each [1, heads, tokens, head_dim].
    """
    rows = [joined_rows(facts, value) for value in heads]
    projections = [_projection(facts, value) if value is not None else None for value in rows]
    if all(p is not None for p in projections):
        return _concatenate(builder, [p for p in projections if p is not None], name)
    return _rearrange(builder, facts, heads, name)


def _projection(facts: Facts, value: ir.Value) -> Projection | None:
    node, bias = value.producer(), None
    if node is not None and node.op_type == "Add":
        data = facts.data_inputs(node)
        bias = next((v for v in node.inputs if v.const_value is not None and len(v.shape) == 1), None)
        node = data[0].producer() if bias is not None and len(data) == 1 else None
    if node is None or node.op_type != "MatMul" or node.inputs[1].const_value is None:
        return None
    if len(node.inputs[1].shape) != 2 or not facts.is_data(node.inputs[0]):
        return None
    return Projection(node.inputs[0], node.inputs[1], bias)


def _concatenate(builder: Builder, parts: Sequence[Projection], name: str) -> ir.Value | None:
    if len({part.data for part in parts}) > 1 or len({part.bias is None for part in parts}) > 1:
        return None
    tensors = [part.weight.const_value for part in parts]
    biases = [part.bias.const_value.numpy() for part in parts if part.bias is not None]
    width = sum(int(t.shape[1]) for t in tensors)

    def weight() -> Array:
        return np.concatenate([t.numpy() for t in tensors], axis=1)

    shape, dtype = (int(tensors[0].shape[0]), width), tensors[0].dtype
    product = Projection(
        parts[0].data,
        builder.lazy(weight, shape, dtype, f"{name}.weight"),
        builder.constant(np.concatenate(biases), f"{name}.bias") if biases else None,
    )
    return _product(builder, product, name)


def _product(builder: Builder, projection: Projection, name: str) -> ir.Value:
    output = builder.op("MatMul", [projection.data, projection.weight], f"{name}.product")
    if projection.bias is None:
        return output
    return builder.op("Add", [output, projection.bias], f"{name}.sum")


def _rearrange(builder: Builder, facts: Facts, heads: Sequence[ir.Value], name: str) -> ir.Value | None:
    """Use a product that already holds q, k and v, its columns put in order if they are not."""
    source = _common_source(facts, heads)
    if source is None:
        return None
    try:
        order = np.concatenate([_channels(facts, source, value) for value in heads])
    except NoMatch:  # more than a rearrangement lies between: q, k and v stay apart
        return None
    if np.array_equal(order, np.arange(len(order))):
        return source
    projection = _projection(facts, source)
    if projection is None or not np.array_equal(np.sort(order), np.arange(len(order))):
        return None
    return _product(builder, _reorder(builder, projection, order, name), name)


def _reorder(builder: Builder, projection: Projection, order: Array, name: str) -> Projection:
    tensor = projection.weight.const_value

    def weight() -> Array:
        columns: Array = tensor.numpy()[:, order]
        return columns

    bias = None
    if projection.bias is not None:
        bias = builder.constant(projection.bias.const_value.numpy()[order], f"{name}.bias")
    ordered = builder.lazy(weight, tuple(map(int, tensor.shape)), tensor.dtype, f"{name}.weight")
    return Projection(projection.data, ordered, bias)


def _common_source(facts: Facts, heads: Sequence[ir.Value]) -> ir.Value | None:
    """Return the value [1, tokens, all channels] that all of `heads` are cut out of."""
    shapes = [[facts.shape(value, i) or () for value in heads] for i in range(len(facts.settings))]
    wanted = [(1, part[0][2], sum(s[1] * s[3] for s in part)) for part in shapes]
    pending = set(heads)
    while True:
        if len(pending) == 1 and facts.has_shape(next(iter(pending)), wanted):
            return pending.pop()
        movable = [v for v in pending if v.producer() is not None and v.producer().op_type in _LAYOUT]
        if not movable or len(pending) > 8:
            return None
        last = max(movable, key=lambda v: facts.order[v.producer()])
        pending.remove(last)
        pending.update(facts.data_inputs(last.producer()))


def _channels(facts: Facts, source: ir.Value, heads: ir.Value) -> Array:
    """Return which channel of `source` each channel of `heads` (in the order heads, head_dim) is."""
    region = Region(facts, [source], heads)
    shape = facts.shape(source) or ()
    numbers = np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape)
    tokens = facts.shape(heads) or ()
    found = region(numbers).reshape(tokens)
    if (found != found[:, :, :1]).any():
        raise NoMatch("a channel is not the same for every token")
    channels: Array = found[0, :, 0].ravel().astype(np.int64)
    return channels
