"""Running a piece of the graph between given values: `Region` on data, `Evaluator` on what depends on none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.cut import Array, Clone, Runner, ancestors
from edgespec.export.fuse.facts import Facts, Kind, Setting, free_feeds
from edgespec.export.fuse.report import NoMatch


class Evaluator:
    """Contents of FREE and CONST values at any setting, not only at those that the facts were taken at."""

    def __init__(self, facts: Facts, values: Sequence[ir.Value]) -> None:
        self._facts = facts
        self._measured: dict[str, ir.Value] = {}  # outputs of Shape on DATA: known without running
        clone = Clone()
        for value in facts.graph.inputs:
            if facts.kind(value) is Kind.FREE:
                clone.add_input(value, value.dtype, len(value.shape))
        for node in ancestors(values, self._is_measured, limit=2000):
            for value in node.inputs:
                self._add_measured(clone, value)
            clone.copy_node(node)
        for value in values:
            self._add_measured(clone, value)
        outputs = [clone.emit("Identity", [clone.copy_of(value)]) for value in values]
        self._run = Runner(clone.model(outputs, facts.graph.opset_imports)) if values else None

    def __call__(self, setting: Setting) -> list[Array]:
        """Return the contents in the order of the values."""
        if self._run is None:
            return []
        feeds = free_feeds(setting)
        for name, value in self._measured.items():
            feeds[name] = self._measure(value, setting)
        return self._run(feeds)

    def _is_measured(self, value: ir.Value) -> bool:
        node = value.producer()
        return node is not None and node.op_type in ("Shape", "Size") and self._facts.is_data(node.inputs[0])

    def _add_measured(self, clone: Clone, value: ir.Value | None) -> None:
        if value is not None and value not in clone.values and self._is_measured(value):
            rank = 0 if value.producer().op_type == "Size" else 1
            clone.add_input(value, ir.DataType.INT64, rank)
            self._measured[value.name] = value

    def _measure(self, value: ir.Value, setting: Setting) -> Array:
        node = value.producer()
        shape = np.array(self._facts.shape_at(node.inputs[0], setting), dtype=np.int64)
        if node.op_type == "Size":
            return np.array(shape.prod(), dtype=np.int64)
        start, end = node.attributes.get("start"), node.attributes.get("end")
        part: Array = shape[(start.value if start else None) : (end.value if end else None)]
        return part


class Region:
    """The nodes between `sources` and `output`, as a function that can be called.

    Attributes:
        leaves: the FREE values that it uses; whoever calls passes their contents.

    Raises:
        NoMatch: `output` depends on other data than `sources`, or on too many operators.
    """

    def __init__(self, facts: Facts, sources: Sequence[ir.Value], output: ir.Value, limit: int = 60) -> None:
        self._facts = facts
        self._sources = list(sources)
        self.leaves: list[ir.Value] = []
        clone = Clone()
        for source in sources:
            shape = facts.shape(source)
            if shape is None:
                raise NoMatch(f"the shape of {source.name} is not known")
            clone.add_input(source, ir.DataType.FLOAT, len(shape))
        for node in ancestors([output], lambda v: v in clone.values or not facts.is_data(v), limit):
            for value in node.inputs:
                self._add_leaf(clone, value)
            clone.copy_node(node)
        final = clone.emit("Cast", [clone.copy_of(output)], to=ir.DataType.FLOAT.value)
        self._run = Runner(clone.model([final], facts.graph.opset_imports))

    def __call__(self, *data: Array, setting: int = 0, leaves: Sequence[Array] | None = None) -> Array:
        """Run on `data` (one array a source), with the leaves' contents at a setting of the facts, or given."""
        feeds: dict[str, Array] = {}
        for source, array in zip(self._sources, data, strict=True):
            feeds[source.name] = np.asarray(array, dtype=np.float32)
        for i, leaf in enumerate(self.leaves):
            content = self._facts.content(leaf, setting) if leaves is None else leaves[i]
            if content is None:
                raise NoMatch(f"the contents of {leaf.name} are not known")
            feeds[leaf.name] = content
        return self._run(feeds)[0]

    def _add_leaf(self, clone: Clone, value: ir.Value | None) -> None:
        if value is None or value in clone.values or self._facts.is_data(value):
            return
        content = self._facts.content(value)
        if content is None:
            raise NoMatch(f"{value.name} is computed from a large weight")
        if self._facts.kind(value) is Kind.FREE:
            clone.add_input(value, ir.DataType.from_numpy(content.dtype), content.ndim)
            self.leaves.append(value)
        elif value.producer() is not None:
            clone.values[value] = clone.constant(content)
