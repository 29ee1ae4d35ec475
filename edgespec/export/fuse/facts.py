"""What a decoder graph computes apart from its text: shapes, masks, positions, scalars, found by running it.

A value is `DATA` if it depends on what the tokens or the cache are, `FREE` if only on how many there are (masks,
rope angles, shapes), `CONST` if on nothing that is fed. The graph is run at a few settings (new tokens, past
tokens) with its large weights left out, which gives the contents of every FREE value and the shape of every DATA
value; shapes are affine in the setting, so they are known for any other. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.cut import Array, Clone, Runner
from edgespec.export.fuse.report import NoMatch

#: Initializers above this are not needed to find shapes, and left out.
BIG_BYTES = 1 << 17
_FREE_INPUTS = ("attention_mask", "position_ids")


class Kind(IntEnum):
    CONST = 0
    FREE = 1
    DATA = 2


@dataclass(frozen=True)
class Setting:
    """A call of the decoder: `new` tokens after `past` cached ones."""

    new: int
    past: int

    @property
    def total(self) -> int:
        return self.new + self.past


class Facts:
    """Kinds, contents and shapes of the values of `model`, whose nodes are in topological order.

    Raises:
        NoMatch: the graph has inputs or control flow that no decoder export should have, or does not run.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        #: Together they determine every affine shape.
        self.settings = (Setting(5, 40), Setting(7, 5), Setting(3, 16))
        self.order = {node: i for i, node in enumerate(self.graph)}
        self._kinds = _kinds(self.graph)
        self._contents: list[dict[ir.Value, Array]] = [{} for _ in self.settings]
        self._shapes: dict[ir.Value, list[tuple[int, ...]]] = {}
        matrix = np.array([[1, s.new, s.past] for s in self.settings], dtype=np.float64)
        self._affine = np.linalg.inv(matrix)
        self._run()

    def kind(self, value: ir.Value | None) -> Kind:
        return Kind.CONST if value is None else self._kinds.get(value, Kind.CONST)

    def is_data(self, value: ir.Value | None) -> bool:
        return self.kind(value) is Kind.DATA

    def data_inputs(self, node: ir.Node) -> list[ir.Value]:
        """Return the different DATA inputs of a node."""
        return list(dict.fromkeys(v for v in node.inputs if v is not None and self.is_data(v)))

    def content(self, value: ir.Value, setting: int = 0) -> Array | None:
        """Return what a FREE or CONST value holds at a setting, or None where it is a large weight or DATA."""
        if value.const_value is not None:
            array: Array = value.const_value.numpy()
            return array
        return self._contents[setting].get(value)

    def scalar(self, value: ir.Value) -> float | None:
        """Return the number that every element of a FREE or CONST value is, at every setting; None if none."""
        if self.is_data(value) or (value.const_value is not None and value.const_value.size > 1):
            return None
        contents = [self.content(value, i) for i in range(len(self.settings))]
        flat = [c.ravel() for c in contents if c is not None and c.size]
        if len(flat) < len(contents) or any((c != flat[0][0]).any() for c in flat):
            return None
        return float(flat[0][0])

    def shape(self, value: ir.Value, setting: int = 0) -> tuple[int, ...] | None:
        """Return the shape of a DATA value at a setting, or None if it could not be found."""
        shapes = self._shapes.get(value)
        return None if shapes is None else shapes[setting]

    def has_shape(self, value: ir.Value, wanted: Sequence[tuple[int, ...]]) -> bool:
        """Whether a DATA value has these shapes (one for each setting), not counting leading ones."""
        shapes = self._shapes.get(value)
        return shapes is not None and [strip(s) for s in shapes] == [strip(w) for w in wanted]

    def shape_at(self, value: ir.Value, setting: Setting) -> tuple[int, ...]:
        """Return the shape of a DATA value at any setting."""
        if value not in self._shapes:
            raise NoMatch(f"the shape of {value.name} is not known")
        known = np.array(self._shapes[value], dtype=np.float64)
        rows = np.array([1, setting.new, setting.past]) @ (self._affine @ known)
        return tuple(int(n) for n in np.rint(rows))

    def _run(self) -> None:
        clone = Clone(rewrite=_LeaveOutWeights(self))
        for value in self.graph.inputs:
            clone.add_input(value, value.dtype, len(value.shape))
        for node in self.graph:
            clone.copy_node(node)
        free, data = self._wanted()
        outputs = [clone.emit("Identity", [clone.values[v]]) for v in free]
        outputs += [clone.emit("Shape", [clone.values[v]]) for v in data]
        run = Runner(clone.model(outputs, self.graph.opset_imports))
        for i, setting in enumerate(self.settings):
            results = run(self._feeds(setting))
            self._contents[i] = dict(zip(free, results, strict=False))
            for value, shape in zip(data, results[len(free) :], strict=True):
                self._shapes.setdefault(value, []).append(tuple(int(n) for n in shape))
        self._shapes = {v: s for v, s in self._shapes.items() if len({len(x) for x in s}) == 1}

    def _wanted(self) -> tuple[list[ir.Value], list[ir.Value]]:
        made = [v for node in self.graph for v in node.outputs if v.name]
        weights = _from_big_weights(self.graph)
        free = [v for v in made if not self.is_data(v) and v not in weights]
        inputs = [v for v in self.graph.inputs if self.is_data(v)]
        return free, inputs + [v for v in made if self.is_data(v)]

    def _feeds(self, setting: Setting) -> dict[str, Array]:
        feeds = free_feeds(setting)
        feeds["input_ids"] = np.zeros((1, setting.new), dtype=np.int64)
        zeros: dict[tuple[int, ...], Array] = {}  # all layers share one buffer
        for value in self.graph.inputs:
            if value.name not in feeds:
                shape = (1, int(value.shape[1]), setting.past, int(value.shape[3]))
                feeds[value.name] = zeros.setdefault(shape, np.zeros(shape, dtype=value.dtype.numpy()))
        return feeds


def strip(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop leading ones."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return shape[first:]


def free_feeds(setting: Setting) -> dict[str, Array]:
    """Return what the inputs that do not depend on the text hold at a setting."""
    return {
        "attention_mask": np.ones((1, setting.total), dtype=np.int64),
        "position_ids": np.arange(setting.past, setting.total, dtype=np.int64)[None],
    }


def _kinds(graph: ir.Graph) -> dict[ir.Value, Kind]:
    kinds: dict[ir.Value, Kind] = {}
    for value in graph.inputs:
        name = value.name or ""
        if name not in (*_FREE_INPUTS, "input_ids") and not name.startswith("past_key_values."):
            raise NoMatch(f"the graph has an input {name} that is not known")
        kinds[value] = Kind.FREE if name in _FREE_INPUTS else Kind.DATA
    for node in graph:
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise NoMatch(f"the graph has control flow ({node.op_type} {node.name})")
        kind = max((kinds.get(v, Kind.CONST) for v in node.inputs if v is not None), default=Kind.CONST)
        if node.op_type in ("Shape", "Size"):
            kind = min(kind, Kind.FREE)
        kinds.update((v, kind) for v in node.outputs)
    return kinds


def _is_big(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.nbytes > BIG_BYTES


def _from_big_weights(graph: ir.Graph) -> set[ir.Value]:
    """Return what is computed of large initializers alone (a transposed embedding, say)."""
    found: set[ir.Value] = set()
    for node in graph:
        inputs = [v for v in node.inputs if v is not None]
        is_constant = all(v.const_value is not None or v in found for v in inputs)
        if is_constant and any(_is_big(v) or v in found for v in inputs):
            found.update(node.outputs)
    return found


class _LeaveOutWeights:
    """Rewrites nodes with a large weight to ones that give the same shape without it."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        used = [v for node in facts.graph for v in node.inputs if facts.kind(node.outputs[0]) is Kind.FREE]
        self._needed = {v for v in used if v is not None}

    def __call__(self, clone: Clone, node: ir.Node) -> bool:
        if node.op_type == "MatMul" and self._is_left_out(node.inputs[1]) and len(node.inputs[1].shape) == 2:
            # Zeros of the weight's shape would take its memory; the product's shape needs less.
            clone.values[node.outputs[0]] = _widened(clone, node.inputs[0], int(node.inputs[1].shape[1]))
            return True
        for value in node.inputs:
            if self._is_left_out(value) and value not in clone.values:
                shape = clone.constant(np.array(value.const_value.shape, dtype=np.int64))
                zero = ir.tensor(np.zeros(1, dtype=value.const_value.dtype.numpy()))
                clone.values[value] = clone.emit("ConstantOfShape", [shape], value=zero)
        return False

    def _is_left_out(self, value: ir.Value | None) -> bool:
        return _is_big(value) and value not in self._needed


def _widened(clone: Clone, data: ir.Value, width: int) -> ir.Value:
    """Emit something of the shape of `data` with another last dimension."""
    last = clone.constant(np.array([-1], dtype=np.int64))
    column = clone.emit("ReduceMax", [clone.copy_of(data), last], keepdims=1)
    return clone.emit("Expand", [column, clone.constant(np.array([width], dtype=np.int64))])
