"""What a distilled draft computes: one step of it, as an ONNX graph and, for checking, in NumPy.

A step takes a token, and what the target computed when it chose that token (at the first step) or the state that the
step before left (at later ones): `x = fc(hidden) + state`, then `z = mix([norm(x), norm(embedding)])`, gated MLPs
beside it, and the head. `z` is the next state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.export.convert import OPSET
from edgespec.export.distilled import Distilled, Weights, other_target
from edgespec.export.fuse.build import Builder
from edgespec.export.quantize import find_embedding
from edgespec.export.write import save_graph

Floats = NDArray[np.float32]


def read_embedding(path: Path, made: Distilled, name: str) -> ir.TensorProtocol:
    """The embedding of a target, out of its float32 graph.

    Args:
        path: of the graph.
        made: the draft that will have it.
        name: of the target, for messages.
    Raises:
        IncompatibleDraftError: it is not the one that the draft was made for.
    """
    node = find_embedding(ir.load(path))
    table = None if node is None or node.inputs[0] is None else node.inputs[0].const_value
    if table is None or tuple(table.shape) != (made.vocab_size, made.hidden_size):
        raise other_target(made, name)
    return table


def build_draft(made: Distilled, weights: Weights, embedding: ir.TensorProtocol, folder: Path) -> Path:
    """Write the float32 graph of a step.

    Args:
        weights: by name.
        embedding: shape (vocab_size, hidden_size).
        folder: for the graph.
    Returns:
        The graph's path: inputs `input_ids` int64 [1, 1], `hidden` [1, 1, F], `state` [1, 1, H]; outputs `logits`
        [1, 1, head_size], `next_state` [1, 1, H].
    """
    size = made.hidden_size
    graph = ir.Graph(
        [
            _value("input_ids", ir.DataType.INT64, [1, 1]),
            _value("hidden", ir.DataType.FLOAT, [1, 1, made.num_features]),
            _value("state", ir.DataType.FLOAT, [1, 1, size]),
        ],
        [],
        nodes=[],
        name="draft",
        opset_imports={"": OPSET},
    )
    step = _Step(made, weights, graph)
    ids, hidden, state = graph.inputs
    table = _value("embedding", ir.DataType.FLOAT, [made.vocab_size, size])
    table.const_value = embedding
    graph.register_initializer(table)
    token = step.builder.op("Gather", [table, ids], "token")
    start = step.builder.op("Add", [step.product(hidden, "fc"), state], "start")
    both = step.builder.op("Concat", [step.norm(start, "norm_state"), step.norm(token, "norm_token")], "both", axis=-1)
    z = step.product(both, "mix")
    for i in range(made.num_blocks):
        z = step.block(z, f"blocks.{i}")
    logits = step.product(step.norm(z, "norm"), "head")
    for value, name, width in ((logits, "logits", made.head_size), (z, "next_state", size)):
        value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 1, width])
        graph.outputs.append(value)
    return save_graph(ir.Model(graph, ir_version=10, producer_name="edgespec"), folder)


class _Step:
    """The verbs of a step, on one graph."""

    def __init__(self, made: Distilled, weights: Weights, graph: ir.Graph) -> None:
        self.made, self.weights, self.builder = made, weights, Builder(graph)

    def product(self, value: ir.Value, name: str) -> ir.Value:
        weight = np.ascontiguousarray(self.weights[f"{name}.weight"].T)
        return self.builder.op("MatMul", [value, self.builder.constant(weight, f"{name}.weight")], name)

    def norm(self, value: ir.Value, name: str) -> ir.Value:
        weight = self.builder.constant(self.weights[f"{name}.weight"], f"{name}.weight")
        attributes: dict[str, Any] = {"axis": -1, "epsilon": self.made.rms_norm_eps, "stash_type": 1}
        return self.builder.op("SimplifiedLayerNormalization", [value, weight], name, **attributes)

    def block(self, value: ir.Value, name: str) -> ir.Value:
        inner = self.norm(value, f"{name}.norm")
        gate, up = self.product(inner, f"{name}.gate_proj"), self.product(inner, f"{name}.up_proj")
        gated = self.builder.op("Mul", [gate, self.builder.op("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
        product = self.product(self.builder.op("Mul", [gated, up], f"{name}.gated"), f"{name}.down_proj")
        return self.builder.op("Add", [value, product], f"{name}.sum")


def _value(name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def compute_step(
    made: Distilled, weights: Weights, token: Floats, hidden: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """The same in NumPy, for many rows at once.

    Args:
        token: embeddings of the tokens, shape (n, H).
        hidden: of the target, shape (n, F).
        state: shape (n, H).
    Returns:
        Logits (n, head_size) and next states (n, H).
    """

    def product(rows: Floats, name: str) -> Floats:
        found: Floats = rows @ weights[f"{name}.weight"].T
        return found

    def norm(rows: Floats, name: str) -> Floats:
        scale = np.sqrt((rows * rows).mean(-1, keepdims=True) + np.float32(made.rms_norm_eps))
        found: Floats = rows / scale * weights[f"{name}.weight"]
        return found

    start = product(hidden, "fc") + state
    z = product(np.concatenate([norm(start, "norm_state"), norm(token, "norm_token")], -1), "mix")
    for name in (f"blocks.{i}" for i in range(made.num_blocks)):
        inner = norm(z, f"{name}.norm")
        gate = product(inner, f"{name}.gate_proj")
        z = z + product(gate / (1 + np.exp(-gate)) * product(inner, f"{name}.up_proj"), f"{name}.down_proj")
    return product(norm(z, "norm"), "head"), z
