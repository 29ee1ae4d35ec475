"""Making a foreign decoder graph one that a session runs: its inputs, the sizes of its cache, its head.

Graphs whose attention is GroupQueryAttention get the shared cache: their lengths follow from `past_len` instead of a
mask. Others keep their growing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgespec.bundle import CacheKind
from edgespec.errors import ExportError
from edgespec.export.fuse import keep_rows
from edgespec.export.fuse.build import Builder, clean, drop_identities
from edgespec.export.fuse.lengths import Lengths
from edgespec.export.fuse.report import NoMatch

_ATTENTION = "GroupQueryAttention"
_KNOWN = ("input_ids", "attention_mask", "position_ids", "keep")
_ROWS = ("num_logits_to_keep", "logits_to_keep")


@dataclass(frozen=True, slots=True)
class Weights:
    """How a graph's weights are stored: `fp32`, `fp16`, `int8` or `int4`, in which blocks, and how many they are."""

    precision: str
    block_size: int | None
    count: int


def has_shared_attention(model: ir.Model) -> bool:
    """Whether every layer's attention is the operator that writes into its past."""
    keys = [v for v in model.graph.inputs if (v.name or "").endswith(".key")]
    return bool(keys) and len(attention_nodes(model)) == len(keys)


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == _ATTENTION]


def share_cache(model: ir.Model, head_dim: int | None, max_len: int) -> int:
    """Let a graph with GroupQueryAttention run on one buffer, its lengths derived from `past_len`.

    Args:
        model: changed in place.
        head_dim: channels of a cached head, where the graph leaves that open.
        max_len: most tokens that are wanted.
    Returns:
        Most tokens that the graph's rope tables allow, less a row to spare, and at most `max_len`.
    Raises:
        ExportError: a size is open, or something else reads the cache.
    """
    nodes = attention_nodes(model)
    max_len = min([max_len, *(rows - 1 for rows in map(_table_rows, nodes) if rows is not None)])
    for node in nodes:
        _fix_shapes(node, head_dim)
    drop_identities(model.graph)
    lengths = Lengths(Builder(model.graph))
    try:
        lengths.replace_shapes([])
    except NoMatch as error:
        raise ExportError(f"the graph cannot run on a shared cache: {error}") from error
    lengths.replace_inputs(max_len)
    adapt_rows(model)
    clean(model)
    return max_len


def adapt_rows(model: ir.Model) -> bool:
    """Give the graph the input `keep`, or the one that it has for the same purpose another name; True if it has it."""
    own = next((v for v in model.graph.inputs if v.name in _ROWS), None)
    if own is None:
        return keep_rows(model)
    builder = Builder(model.graph)
    keep = builder.input("keep", [1])
    is_scalar = own.shape is None or len(own.shape) == 0
    own.replace_all_uses_with(builder.op("Squeeze", [keep], "keep.scalar") if is_scalar else keep)
    model.graph.inputs.remove(own)
    clean(model)
    return True


def require_known_inputs(model: ir.Model) -> None:
    """Raise ExportError for an input that a session does not feed."""
    for value in model.graph.inputs:
        name = value.name or ""
        if name not in (*_KNOWN, *_ROWS, "past_len") and not name.startswith("past_key_values."):
            raise ExportError(f"the graph has an input {name} that a decoder does not need; choose another variant")


def fix_cache_sizes(model: ir.Model, heads: int | None, head_dim: int | None) -> None:
    """Write the sizes of a growing cache into its inputs where the graph leaves them open."""
    for value in model.graph.inputs:
        if (value.name or "").startswith("past_key_values."):
            _fix_shape(value, heads, head_dim, "past")


def inspect_weights(model: ir.Model) -> Weights:
    """What most of the weights are: from the operators that use them, else from their types."""
    counts: dict[tuple[int, int], int] = {}
    rest: dict[ir.DataType, int] = {}
    packed: set[ir.Value] = set()
    for node in model.graph:
        if node.op_type in ("MatMulNBits", "MatMulBnb4") and "K" in node.attributes:
            found = {k: int(node.attributes[k].value) for k in ("K", "N")}
            bits = int(node.attributes["bits"].value) if "bits" in node.attributes else 4
            key = bits, int(node.attributes["block_size"].value)
            counts[key] = counts.get(key, 0) + found["K"] * found["N"]
            packed.update(v for v in node.inputs[1:4] if v is not None)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and value not in packed and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            rest[tensor.dtype] = rest.get(tensor.dtype, 0) + tensor.size
    count = sum(counts.values()) + sum(rest.values())
    if counts:
        bits, block = max(counts, key=lambda key: counts[key])
        return Weights("int8" if bits == 8 else "int4", block, count)
    halves = rest.get(ir.DataType.FLOAT16, 0) > rest.get(ir.DataType.FLOAT, 0)
    return Weights("fp16" if halves else "fp32", None, max(count, 1))


def cache_kind(model: ir.Model) -> CacheKind:
    return "shared" if any(value.name == "past_len" for value in model.graph.inputs) else "growing"


def _table_rows(node: ir.Node) -> int | None:
    """Positions of the operator's rope table; None where it has none."""
    table = node.inputs[7] if len(node.inputs) > 7 else None
    rows = table.shape[0] if table is not None and table.shape is not None and len(table.shape) == 2 else None
    return rows if isinstance(rows, int) else None


def _fix_shapes(node: ir.Node, head_dim: int | None) -> None:
    heads = int(node.attributes["kv_num_heads"].value)
    if len(node.inputs) < 5 or any(v is None or not v.is_graph_input() for v in node.inputs[3:5]):
        raise ExportError(f"{node.name} does not read its past from an input of the graph; export it again")
    if len(node.outputs) < 3 or not all(v.is_graph_output() for v in node.outputs[1:3]):
        raise ExportError(f"{node.name} does not write its cache to an output of the graph; export it again")
    for value in (*node.inputs[3:5], *node.outputs[1:3]):
        _fix_shape(value, heads, head_dim, "capacity")


def _fix_shape(value: ir.Value, heads: int | None, head_dim: int | None, length: str) -> None:
    known: list[Any] = list(value.shape) if value.shape is not None and len(value.shape) == 4 else [None] * 4
    sizes = [
        size if isinstance(known[axis], (str, type(None), ir.SymbolicDim)) else known[axis]
        for axis, size in ((1, heads), (3, head_dim))
    ]
    if any(size is None for size in sizes):
        raise ExportError(f"{value.name} leaves the size of a head open, and no configuration beside it says it")
    if heads is not None and sizes[0] != heads:
        raise ExportError(f"{value.name} has {sizes[0]} heads and its attention {heads}; export it again")
    value.shape = ir.Shape([1, sizes[0], length, sizes[1]])
