"""Writing the fused graph: GroupQueryAttention on a shared cache, lengths from `past_len`.

The operator is com.microsoft.GroupQueryAttention, version 1: query [1, S, H*D] (or q, k and v in one), past and
present [1, KV, capacity, D], seqlens_k = total - 1 (int32 [1]), total (int32, rank 0), tables of cosines and sines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgespec.export.fuse.build import MICROSOFT, Builder, clean
from edgespec.export.fuse.facts import Facts
from edgespec.export.fuse.layer import Heads, LayerMatch
from edgespec.export.fuse.lengths import Lengths
from edgespec.export.fuse.pack import joined_rows, pack_qkv
from edgespec.export.fuse.rope import Rotation, Tables, explains, make_tables


@dataclass(frozen=True)
class Emitted:
    """How a layer came out."""

    has_rotation: bool
    is_rotation_folded: bool
    is_packed: bool


class Emitter:
    """Replaces matched layers in the graph of `facts`."""

    def __init__(self, facts: Facts, max_len: int) -> None:
        self._facts = facts
        self._max_len = max_len
        self._builder = Builder(facts.graph)
        self._lengths = Lengths(self._builder)
        self._tables: list[tuple[Tables, ir.Value, ir.Value]] = []
        self._replaced: list[tuple[ir.Value, ir.Value]] = []

    def layer(self, match: LayerMatch) -> Emitted:
        """Emit the operator for one layer and put its result in place of the matched output."""
        tables = self._fold(match)
        is_folded = tables is not None
        sources = [_source(heads, is_folded) for heads in (match.q, match.k, match.v)]
        name = f"layers.{match.index}.attention"
        packed = pack_qkv(self._builder, self._facts, sources, f"{name}.qkv")
        if packed is None:
            inputs: list[ir.Value | None] = [self._join(s, name) for s in sources]
        else:
            inputs = [packed, None, None]
        self._attend(match, inputs, tables, name)
        has_rotation = match.q.rotation is not None or match.k.rotation is not None
        return Emitted(has_rotation, is_folded, packed is not None)

    def finish(self) -> bool:
        """Remove what is dead and derive every remaining length and position from `past_len`.

        Returns:
            Whether the graph has tables or positions that end at `max_len`.
        """
        graph = self._facts.graph
        for old, new in self._replaced:
            index = graph.outputs.index(old)
            new.name, old.name = old.name, f"{old.name}.unfused"
            graph.outputs[index] = new
        clean(self._facts.model)
        self._lengths.replace_shapes([old for old, _ in self._replaced])
        clean(self._facts.model)
        has_positions = self._lengths.replace_inputs(self._max_len)
        graph.opset_imports[MICROSOFT] = 1
        self._io("input_ids").shape = ir.Shape([1, "tokens"])
        clean(self._facts.model)
        return has_positions or bool(self._tables)

    def _fold(self, match: LayerMatch) -> tuple[Tables, ir.Value, ir.Value] | None:
        """Return the tables by which the operator itself can rotate, if it can."""
        q, k = match.q.rotation, match.k.rotation
        if q is None or k is None or q.width % 16 or (q.width, q.interleaved) != (k.width, k.interleaved):
            return None
        for known in self._tables:
            if self._explains(match.q, q, known[0]) and self._explains(match.k, k, known[0]):
                return known
        # One row more than tokens: a call may be padded by a row past the end, whose result is not read.
        tables = make_tables(self._facts, q, _shape(match.q), self._max_len + 1)
        if not self._explains(match.k, k, tables):
            return None
        name = f"rope.{len(self._tables)}" if self._tables else "rope"
        cos = self._builder.constant(tables.cos, f"{name}.cos")
        self._tables.append((tables, cos, self._builder.constant(tables.sin, f"{name}.sin")))
        return self._tables[-1]

    def _explains(self, heads: Heads, rotation: Rotation, tables: Tables) -> bool:
        return explains(self._facts, rotation, _shape(heads), tables)

    def _join(self, heads: ir.Value, name: str) -> ir.Value:
        """Return [1, tokens, heads * head_dim] made of [1, heads, tokens, head_dim]."""
        rows = joined_rows(self._facts, heads)
        if rows is not None:
            return rows
        shape = self._facts.shape(heads) or ()
        count, _, head_dim = shape[-3:]
        whole = self._builder.op("Reshape", [heads, self._ints([1, count, -1, head_dim])], f"{name}.heads")
        turned = self._builder.op("Transpose", [whole], f"{name}.tokens", perm=[0, 2, 1, 3])
        return self._builder.op("Reshape", [turned, self._ints([1, -1, count * head_dim])], f"{name}.rows")

    def _attend(
        self,
        match: LayerMatch,
        inputs: Sequence[ir.Value | None],
        tables: tuple[Tables, ir.Value, ir.Value] | None,
        name: str,
    ) -> None:
        key, value = (self._io(f"past_key_values.{match.index}.{kind}") for kind in ("key", "value"))
        lengths = [self._lengths.seqlens_k, self._lengths.total_int32]
        everything = [*inputs, key, value, *lengths, *(tables[1:] if tables else (None, None))]
        if match.scores.slopes is not None:
            everything += [None, self._lengths.alibi(match.scores.slopes)]
        while everything[-1] is None:
            everything.pop()
        node = self._builder.node(
            "GroupQueryAttention",
            everything,
            name,
            domain=MICROSOFT,
            num_outputs=3,
            num_heads=match.q.count,
            kv_num_heads=match.k.count,
            scale=float(match.scale),
            softcap=float(match.scores.softcap),
            local_window_size=match.scores.window or -1,
            do_rotary=int(tables is not None),
            rotary_interleaved=int(tables is not None and tables[0].interleaved),
        )
        match.output.replace_all_uses_with(node.outputs[0])
        self._present(match.index, node.outputs[1:])

    def _present(self, index: int, outputs: Sequence[ir.Value]) -> None:
        for kind, new in zip(("key", "value"), outputs, strict=True):
            old = next(v for v in self._facts.graph.outputs if v.name == f"present.{index}.{kind}")
            past = self._io(f"past_key_values.{index}.{kind}")
            shape = ir.Shape([1, past.shape[1], "capacity", past.shape[3]])
            past.shape, new.shape, new.type = shape, shape.copy(), ir.TensorType(past.dtype)
            self._replaced.append((old, new))

    def _io(self, name: str) -> ir.Value:
        value: ir.Value = next(v for v in self._facts.graph.inputs if v.name == name)
        return value

    def _ints(self, numbers: Sequence[int]) -> ir.Value:
        return self._builder.ints(numbers, "shape")


def _source(heads: Heads, is_folded: bool) -> ir.Value:
    return heads.rotation.source if is_folded and heads.rotation is not None else heads.value


def _shape(heads: Heads) -> tuple[int, ...]:
    return (1, heads.count, 1, heads.head_dim)
