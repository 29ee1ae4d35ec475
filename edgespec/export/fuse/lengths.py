"""The lengths of a call, in the graph: everything follows from `past_len` and the number of new tokens.

Unfused graphs read the past length off the cache's shape, which in a shared buffer is the capacity; every such use
is replaced here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.build import MICROSOFT, Builder
from edgespec.export.fuse.report import NoMatch


class Lengths:
    """Adds the input `past_len` (int64 [1]) and whatever is derived from it, once, on demand."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._graph = builder.graph
        self.past = builder.input("past_len", [1])

    @cached_property
    def total(self) -> ir.Value:
        """Tokens cached after the call, int64 [1]."""
        new = self._builder.op("Shape", [self._graph.inputs[0]], "length.new", start=1, end=2)
        return self._builder.op("Add", [self.past, new], "length.total")

    @cached_property
    def seqlens_k(self) -> ir.Value:
        """Total minus one, int32 [1]."""
        last = self._builder.op("Sub", [self.total, self._one], "length.last")
        return self._builder.op("Cast", [last], "length.seqlens_k", to=ir.DataType.INT32.value)

    @cached_property
    def total_int32(self) -> ir.Value:
        """Total, int32, a scalar."""
        scalar = self._scalar(self.total, "length.total.scalar")
        return self._builder.op("Cast", [scalar], "length.total.int32", to=ir.DataType.INT32.value)

    def alibi(self, slopes: Sequence[float]) -> ir.Value:
        """Return slope * key position, [1, heads, tokens, total]."""
        column = np.array(slopes, dtype=np.float32)[None, :, None, None]
        bias = self._builder.op("Mul", [self._builder.constant(column, "alibi.slopes"), self._key_positions], "alibi")
        new = self._builder.op("Shape", [self._graph.inputs[0]], "alibi.tokens", start=1, end=2)
        ones = self._builder.ints([1, 1], "alibi.ones")
        shape = self._builder.op("Concat", [ones, new, self._one], "alibi.shape", axis=0)
        return self._builder.op("Expand", [bias, shape], "alibi.bias")

    def replace_shapes(self, presents: Sequence[ir.Value]) -> None:
        """Replace `Shape` of the past, and of what `presents` used to be, by the true lengths.

        Raises:
            NoMatch: something else than the attention reads the cache.
        """
        pasts = [v for v in self._graph.inputs if (v.name or "").startswith("past_key_values.")]
        for value in pasts:
            self._replace_shape(value, value, self.past)
        for old in presents:
            if old.producer().graph is not None:
                self._replace_shape(old, old.producer().inputs[0], self.total)

    def replace_inputs(self, max_len: int) -> bool:
        """Compute `position_ids` and `attention_mask` where something still needs them, and drop the inputs.

        A position past the end, which only a padding row can have, is clamped to `max_len` - 1.

        Returns:
            Whether something needs the positions.
        """
        has_positions = False
        for value in list(self._graph.inputs):
            if value.name == "position_ids":
                has_positions = bool(value.uses())
                self._drop_input(value, self._positions(max_len) if value.uses() else None)
            elif value.name == "attention_mask":
                self._drop_input(value, self._mask() if value.uses() else None)
        return has_positions

    @cached_property
    def _one(self) -> ir.Value:
        return self._builder.ints([1], "length.one")

    @cached_property
    def _key_positions(self) -> ir.Value:
        start, step = (self._builder.constant(np.array(n, dtype=np.int64), "range") for n in (0, 1))
        end = self._scalar(self.total, "alibi.end")
        positions = self._builder.op("Range", [start, end, step], "alibi.range")
        return self._builder.op("Cast", [positions], "alibi.positions", to=ir.DataType.FLOAT.value)

    def _scalar(self, value: ir.Value, name: str) -> ir.Value:
        return self._builder.op("Squeeze", [value], name)

    def _positions(self, max_len: int) -> ir.Value:
        start, end = self._scalar(self.past, "position.start"), self._scalar(self.total, "position.end")
        step = self._builder.constant(np.array(1, dtype=np.int64), "position.step")
        positions = self._builder.op("Range", [start, end, step], "position.range")
        last = self._builder.constant(np.array(max_len - 1, dtype=np.int64), "position.last")
        clamped = self._builder.op("Min", [positions, last], "position.clamped")
        return self._builder.op("Unsqueeze", [clamped, self._builder.ints([0], "position.axis")], "positions")

    def _mask(self) -> ir.Value:
        shape = self._builder.op("Concat", [self._one, self.total], "mask.shape", axis=0)
        one = ir.tensor(np.ones(1, dtype=np.int64))
        return self._builder.op("ConstantOfShape", [shape], "mask", value=one)

    def _drop_input(self, value: ir.Value, replacement: ir.Value | None) -> None:
        if replacement is not None:
            value.replace_all_uses_with(replacement)
        self._graph.inputs.remove(value)

    def _replace_shape(self, value: ir.Value, past: ir.Value, length: ir.Value) -> None:
        heads, head_dim = (self._builder.ints([int(past.shape[i])], "cache.dimension") for i in (1, 3))
        for node in list(value.consumers()):
            if node.domain == MICROSOFT:
                continue
            if node.op_type != "Shape":
                raise NoMatch(f"{node.op_type} {node.name} reads {value.name} besides the attention")
            start, end = node.attributes.get("start"), node.attributes.get("end")
            part = slice(start.value if start else None, end.value if end else None)
            parts = [self._one, heads, length, head_dim][part]
            shape = self._builder.op("Concat", parts, "cache.shape", axis=0)
            node.outputs[0].replace_all_uses_with(shape)
