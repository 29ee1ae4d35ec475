"""What a distilled draft computes: one step of it, as an ONNX graph and, for checking, in NumPy.

A step takes a token, and what the target computed when it chose that token (at the first step) or the state that the
step before left (at later ones): `x = fc(hidden) + state`, then `z = mix([norm(x), norm(embedding)])`, perhaps
attention beside it, gated MLPs beside that, and the head. `z` is the next state. What prompt lookup would propose is
worth `hints[kind] . norm(z)` more, by the kind of its match.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.export.convert import OPSET
from edgespec.export.distilled import Distilled, Weights, other_target
from edgespec.export.draft_attention import Rotary, Seen, attend
from edgespec.export.fuse.build import MICROSOFT, Builder
from edgespec.export.quantize import find_embedding
from edgespec.export.write import save_graph

Floats = NDArray[np.float32]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


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


def build_draft(
    made: Distilled, weights: Weights, embedding: ir.TensorProtocol, folder: Path, rotary: Rotary | None = None
) -> Path:
    """Write the float32 graph of a step.

    Args:
        weights: by name.
        embedding: shape (vocab_size, hidden_size).
        folder: for the graph.
        rotary: of the attended layer, where there is attention.
    Returns:
        The graph's path: inputs `input_ids` int64 [1, 1], `hidden` [1, 1, F], `state` [1, 1, H], `hint` int64 [1, 2],
        column and kind; outputs `logits` [1, 1, head_size], `next_state` [1, 1, H]. With attention to layer L also
        inputs `past_len` int64 [1], `past_key_values.L.key` and `.value` [1, kv, capacity, head_dim]; outputs
        `present.L.key` and `.value`, to be bound to the same buffers.
    """
    size = made.hidden_size
    graph = ir.Graph(
        [
            _value("input_ids", ir.DataType.INT64, [1, 1]),
            _value("hidden", ir.DataType.FLOAT, [1, 1, made.num_features]),
            _value("state", ir.DataType.FLOAT, [1, 1, size]),
            _value("hint", ir.DataType.INT64, [1, 2]),
        ],
        [],
        nodes=[],
        name="draft",
        opset_imports={"": OPSET, MICROSOFT: 1},
    )
    step = _Step(made, weights, graph)
    ids, hidden, state, hint = graph.inputs
    table = _value("embedding", ir.DataType.FLOAT, [made.vocab_size, size])
    table.const_value = embedding
    graph.register_initializer(table)
    token = step.builder.op("Gather", [table, ids], "token")
    start = step.builder.op("Add", [step.product(hidden, "fc"), state], "start")
    both = step.builder.op("Concat", [step.norm(start, "norm_state"), step.norm(token, "norm_token")], "both", axis=-1)
    z = step.product(both, "mix")
    presents: list[ir.Value] = []
    if rotary is not None:
        z, presents = step.attention(z, rotary)
    for i in range(made.num_blocks):
        z = step.block(z, f"blocks.{i}")
    last = step.norm(z, "norm")
    logits = step.hinted(step.product(last, "head"), last, hint)
    for value, name, width in ((logits, "logits", made.head_size), (z, "next_state", size)):
        value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 1, width])
        graph.outputs.append(value)
    graph.outputs.extend(presents)
    return save_graph(ir.Model(graph, ir_version=10, producer_name="edgespec"), folder)


class _Step:
    """The verbs of a step, on one graph."""

    def __init__(self, made: Distilled, weights: Weights, graph: ir.Graph) -> None:
        self.made, self.weights, self.graph, self.builder = made, weights, graph, Builder(graph)

    def product(self, value: ir.Value, name: str, *parts: str) -> ir.Value:
        """With the weight `name`, or with all of `parts`, side by side."""
        stacked = np.concatenate([self.weights[f"{part}.weight"] for part in parts or (name,)])
        weight = np.ascontiguousarray(stacked.T)
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

    def hinted(self, logits: ir.Value, last: ir.Value, hint: ir.Value) -> ir.Value:
        """Logits with what the hint adds in its column; kind 0 adds 0.

        ScatterElements could add by itself, but not in float16 on processors.
        """
        builder, weight = self.builder, self.weights["hints.weight"][..., None].copy()
        weight[0] = 0
        kind = builder.op("Gather", [hint, builder.constant(np.array(1), "hint.second")], "hint.kind", axis=1)
        row = builder.op("Gather", [builder.constant(weight, "hints.weight"), kind], "hint.row")
        column = builder.op("Gather", [hint, builder.constant(np.array([[0]]), "hint.first")], "hint.column", axis=1)
        old = builder.op("GatherElements", [logits, column], "hint.old", axis=2)
        new = builder.op("Add", [old, builder.op("MatMul", [last, row], "hint.worth")], "hint.new")
        return builder.op("ScatterElements", [logits, column, new], "hinted", axis=2)

    def attention(self, value: ir.Value, rotary: Rotary) -> tuple[ir.Value, list[ir.Value]]:
        """The operator that the target has, on the cache of one of its layers; the new value and the presents.

        A call has one token, so the number of tokens before it is the operator's `seqlens_k`, total - 1.
        """
        made, builder = self.made, self.builder
        names = [f"{made.attended_layer}.{kind}" for kind in ("key", "value")]
        shape: list[int | str] = [1, made.num_kv_heads, "capacity", made.head_dim]
        past_len = _value("past_len", ir.DataType.INT64, [1])
        pasts = [_value(f"past_key_values.{name}", ir.DataType.FLOAT, shape) for name in names]
        self.graph.inputs.extend([past_len, *pasts])
        parts = [f"attention.{name}" for name in _PROJECTIONS]
        qkv = self.product(self.norm(value, "attention.norm"), "attention.qkv", *parts)
        last = builder.op("Cast", [past_len], "attention.last", to=ir.DataType.INT32.value)
        total = builder.op("Add", [last, builder.constant(np.ones(1, np.int32), "one")], "attention.total")
        tables = [builder.constant(rotary.cos, "rope.cos"), builder.constant(rotary.sin, "rope.sin")]
        node = builder.node(
            "GroupQueryAttention",
            [qkv, None, None, *pasts, last, total, *tables],
            "attention",
            domain=MICROSOFT,
            num_outputs=3,
            num_heads=made.num_heads,
            kv_num_heads=made.num_kv_heads,
            scale=float(made.head_dim**-0.5),
            do_rotary=1,
            rotary_interleaved=int(rotary.interleaved),
        )
        for name, present in zip(names, node.outputs[1:], strict=True):
            present.name, present.type = f"present.{name}", ir.TensorType(ir.DataType.FLOAT)
            present.shape = ir.Shape(shape)
        product = self.product(node.outputs[0], "attention.o_proj")
        return builder.op("Add", [value, product], "attention.sum"), list(node.outputs[1:])


def _value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def compute_step(
    made: Distilled,
    weights: Weights,
    token: Floats,
    hidden: Floats,
    state: Floats,
    hints: NDArray[np.int64],
    seen: Seen | None = None,
) -> tuple[Floats, Floats, Seen | None]:
    """The same in NumPy, for many rows at once.

    Args:
        token: embeddings of the tokens, shape (n, H).
        hidden: of the target, shape (n, F).
        state: shape (n, H).
        hints: columns and kinds, shape (n, 2); kind 0 where there is none.
        seen: by attention, where there is any.
    Returns:
        Logits (n, head_size), next states (n, H), and what attention sees at the next step.
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
    if seen is not None:
        inner = norm(z, "attention.norm")
        q, k, v = (product(inner, f"attention.{name}").reshape(len(z), -1, made.head_dim) for name in _PROJECTIONS)
        found, seen = attend(seen, q, k, v)
        z = z + product(found, "attention.o_proj")
    for name in (f"blocks.{i}" for i in range(made.num_blocks)):
        inner = norm(z, f"{name}.norm")
        gate = product(inner, f"{name}.gate_proj")
        z = z + product(gate / (1 + np.exp(-gate)) * product(inner, f"{name}.up_proj"), f"{name}.down_proj")
    last = norm(z, "norm")
    logits, (columns, kinds) = product(last, "head"), hints.T
    worth = (last * weights["hints.weight"][kinds]).sum(-1)
    logits[np.arange(len(z)), columns] += np.where(kinds > 0, worth, 0)
    return logits, z, seen
