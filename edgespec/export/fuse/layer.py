"""Finding one layer's attention, from its cache inputs and outputs to the heads' results, by what it computes.

Structure only says where the two matrix products and the softmax are. What lies between them (scale, soft cap, mask,
position bias, repeated heads) is run on test data, so how an exporter spells it does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.cut import Array
from edgespec.export.fuse.facts import Facts
from edgespec.export.fuse.region import Region
from edgespec.export.fuse.report import NoMatch
from edgespec.export.fuse.rope import Rotation, find_rotation
from edgespec.export.fuse.scores import Scores, classify_scores
from edgespec.export.fuse.trace import forward, peel


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values on their way into the attention.

    Attributes:
        value: shape [1, heads, tokens, head_dim] (without the one, perhaps), after any rotation.
        scale: what the attention sees is `value` times this.
        rotation: what made `value`, if positions are rotated into it.
    """

    value: ir.Value
    scale: float
    rotation: Rotation | None
    count: int
    head_dim: int


@dataclass(frozen=True)
class LayerMatch:
    """A layer's attention: `output` [1, tokens, heads * head_dim] from q, k, v and the cache."""

    index: int
    q: Heads
    k: Heads
    v: Heads
    scores: Scores
    scale: float
    output: ir.Value


def find_layer(facts: Facts, index: int, max_len: int) -> LayerMatch:
    """Find the attention of layer `index`, for texts of up to `max_len` tokens.

    Raises:
        NoMatch: something is not as attention over a growing cache should be.
    """
    try:
        return _find_layer(facts, index, max_len)
    except NoMatch as error:
        raise NoMatch(error.reason, index) from error


def _find_layer(facts: Facts, index: int, max_len: int) -> LayerMatch:
    key, new_key = _cache(facts, index, "key")
    value, new_value = _cache(facts, index, "value")
    score_product = _product(facts, key, "the keys")
    result_product = _product(facts, value, "the values")
    scores = score_product.outputs[0]
    count, head_dim = _num_heads(facts, scores), _heads_of(facts, key)[1]
    kv_count = _heads_of(facts, key)[0]
    if count % kv_count or _heads_of(facts, value) != (kv_count, head_dim):
        raise NoMatch(f"{count} query heads do not fit {kv_count} cached heads of {head_dim} channels")
    q = _heads(facts, score_product.inputs[0], count, head_dim, rotated=True)
    k = _heads(facts, new_key, kv_count, head_dim, rotated=True)
    v = _heads(facts, new_value, kv_count, head_dim, rotated=False)
    softmax = _softmax(facts, scores)
    found = classify_scores(facts, scores, softmax.inputs[0], count, max_len)
    _check_probabilities(facts, softmax.outputs[0], result_product.inputs[0])
    key_scale = _repeat_scale(facts, key, score_product.inputs[1], count, is_transposed=True)
    value_scale = _repeat_scale(facts, value, result_product.inputs[1], count, is_transposed=False)
    if abs(value_scale * v.scale - 1) > 1e-6:
        raise NoMatch("the values are scaled on their way into the attention")
    scale = _snap(q.scale * k.scale * key_scale * found.scale, head_dim)
    output = _result(facts, result_product.outputs[0], count, head_dim)
    return LayerMatch(index, q, k, v, found, scale, output)


def _cache(facts: Facts, index: int, kind: str) -> tuple[ir.Value, ir.Value]:
    """Return the present value, and what is appended to the past to make it."""
    past_name, present_name = f"past_key_values.{index}.{kind}", f"present.{index}.{kind}"
    past = next((v for v in facts.graph.inputs if v.name == past_name), None)
    present = next((v for v in facts.graph.outputs if v.name == present_name), None)
    node = present.producer() if present is not None else None
    if past is None or node is None:
        raise NoMatch(f"{past_name} or {present_name} is missing")
    axis = node.attributes["axis"].value if node.op_type == "Concat" else None
    if axis not in (2, -2) or len(node.inputs) != 2 or node.inputs[0] is not past:
        raise NoMatch(f"{present_name} is not new tokens appended to {past_name}")
    return present, node.inputs[1]


def _product(facts: Facts, start: ir.Value, what: str) -> ir.Node:
    found = forward(facts, start, lambda node, i: node.op_type == "MatMul" and i == 1)
    if found is None:
        raise NoMatch(f"no matrix product uses {what} of the cache")
    return found[0]


def _softmax(facts: Facts, scores: ir.Value) -> ir.Node:
    found = forward(facts, scores, lambda node, i: node.op_type == "Softmax")
    if found is None:
        raise NoMatch("no softmax follows the scores")
    rank = len(facts.shape(found[0].inputs[0]) or ())
    axis = found[0].attributes.get("axis")
    if axis is not None and axis.value not in (-1, rank - 1):
        raise NoMatch("the softmax does not run over the cached tokens")
    return found[0]


def _shape(facts: Facts, value: ir.Value, setting: int = 0) -> tuple[int, ...]:
    shape = facts.shape(value, setting)
    if shape is None:
        raise NoMatch(f"the shape of {value.name} is not known")
    return shape


def _num_heads(facts: Facts, scores: ir.Value) -> int:
    count = _shape(facts, scores)[-3] if len(_shape(facts, scores)) > 2 else 0
    if not facts.has_shape(scores, [(count, s.new, s.total) for s in facts.settings]):
        raise NoMatch("the scores are not one number for each head, new token and cached token")
    return count


def _heads_of(facts: Facts, present: ir.Value) -> tuple[int, int]:
    shape = _shape(facts, present)
    return shape[1], shape[3]


def _heads(facts: Facts, value: ir.Value, count: int, head_dim: int, rotated: bool) -> Heads:
    shapes = [(1, count, s.new, head_dim) for s in facts.settings]
    peeled = peel(facts, value)
    if not facts.has_shape(peeled.value, shapes):
        raise NoMatch(f"{peeled.value.name} is not laid out as heads, tokens, channels")
    rotation = find_rotation(facts, peeled.value, shapes) if rotated else None
    return Heads(peeled.value, peeled.scale, rotation, count, head_dim)


def _random(shape: Sequence[int]) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _repeat_scale(facts: Facts, present: ir.Value, operand: ir.Value, count: int, is_transposed: bool) -> float:
    """Return c, where `operand` is c times `present` with each head repeated for its group of queries."""
    if operand is present and not is_transposed and _heads_of(facts, present)[0] == count:
        return 1.0
    region = Region(facts, [present], operand)
    scales = []
    for i in range(len(facts.settings)):
        data = _random(_shape(facts, present, i))
        found = region(data, setting=i)
        expected = data[0]
        if found.size != data.size or data.shape[1] > 1:  # one head for all may be left to broadcasting
            expected = np.repeat(expected, count // data.shape[1], axis=0)
        expected = expected.swapaxes(1, 2) if is_transposed else expected
        if found.size != expected.size:
            raise NoMatch("the cached heads are not repeated for the query heads")
        found = found.reshape(expected.shape)
        scale = float((found * expected).sum() / (expected * expected).sum())
        if not np.allclose(found, scale * expected, rtol=1e-5, atol=1e-5):
            raise NoMatch("the cache is changed on its way into the attention")
        scales.append(scale)
    return scales[0]


def _check_probabilities(facts: Facts, start: ir.Value, end: ir.Value) -> None:
    """Require that the weights of the values are the softmax's results."""
    if start is end:
        return
    region = Region(facts, [start], end)
    for i in range(len(facts.settings)):
        data = np.abs(_random(_shape(facts, start, i)))
        if not np.array_equal(region(data, setting=i).ravel(), data.ravel()):
            raise NoMatch("the attention's weights are changed after the softmax")


def _result(facts: Facts, start: ir.Value, count: int, head_dim: int) -> ir.Value:
    """Return the value [1, tokens, heads * head_dim] that the heads' results are joined to."""
    wanted = [(1, s.new, count * head_dim) for s in facts.settings]
    found = forward(
        facts, start, lambda node, i: all(facts.shape(node.outputs[0], j) == w for j, w in enumerate(wanted))
    )
    if found is None:
        raise NoMatch("the heads' results are not joined to one row for each token")
    output = found[0].outputs[0]
    region = Region(facts, [start], output)
    for i, shape in enumerate(wanted):
        data = _random(_shape(facts, start, i))
        joined = data.reshape(count, shape[1], head_dim).swapaxes(0, 1).reshape(shape)
        if not np.array_equal(region(data, setting=i), joined):
            raise NoMatch("the heads' results are changed while they are joined")
    return output


def _snap(scale: float, head_dim: int) -> float:
    """Exports split 1/sqrt(head_dim) over queries and keys in float32; undo that rounding."""
    usual = head_dim**-0.5
    return usual if abs(scale / usual - 1) < 1e-5 else scale
