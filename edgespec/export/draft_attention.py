"""What a distilled draft's attention takes of its target, and, for checking, what it computes, in NumPy.

It looks at the keys and values that one layer of the target has cached, with queries that are rotated as that layer's
are, and at those that the draft wrote itself in the steps before. Source of the idea: GLIDE (Du et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.errors import ExportError, IncompatibleDraftError
from edgespec.export.distilled import Distilled
from edgespec.export.fuse.build import constant_value

Floats = NDArray[np.float32]
_COS, _SIN, _KEY = 7, 8, 3  # inputs of GroupQueryAttention
_PLAIN_INPUTS = 9  # what comes after those is a bias, or something that the draft does not have


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer rotates queries and keys by their position.

    Attributes:
        cos, sin: shape (positions, width / 2), of the first `width` channels.
        interleaved: whether neighbours are a pair; otherwise channel i is paired with i + width / 2.
    """

    cos: Floats
    sin: Floats
    interleaved: bool


def read_rotary(path: Path, made: Distilled, name: str) -> Rotary | None:
    """The tables of the layer that a draft looks at, out of its target's float32 graph; None without attention.

    Args:
        path: of the graph.
        made: the draft.
        name: of the target, for messages.
    Raises:
        ExportError: the layer's attention is not of the kind that a draft can join in.
        IncompatibleDraftError: the layer's cache has other sizes than the draft's attention.
    """
    layer = made.attended_layer
    if layer is None:
        return None
    node = _find_attention(ir.load(path).graph, layer)
    if node is None:
        raise _refusal(made, name, "has no attention on a shared cache there")
    cos, sin = (constant_value(node.inputs[i]) if i < len(node.inputs) else None for i in (_COS, _SIN))
    rotates = "do_rotary" in node.attributes and node.attributes["do_rotary"].as_int() == 1
    if not rotates or cos is None or sin is None or any(value is not None for value in node.inputs[_PLAIN_INPUTS:]):
        raise _refusal(made, name, "does not tell positions apart by rotating alone there")
    key = node.inputs[_KEY]
    shape = tuple(key.shape)[1::2] if key is not None and key.shape is not None else ()
    if shape != (made.num_kv_heads, made.head_dim):
        raise IncompatibleDraftError(
            f"{made.folder} needs a target whose layer {layer} caches {made.num_kv_heads} heads of {made.head_dim} "
            f"channels; distil a draft from {name}"
        )
    interleaved = node.attributes.get("rotary_interleaved")
    return Rotary(cos.numpy(), sin.numpy(), interleaved is not None and interleaved.as_int() == 1)


def _find_attention(graph: ir.Graph, layer: int) -> ir.Node | None:
    name = f"past_key_values.{layer}.key"
    past = next((value for value in graph.inputs if value.name == name), None)
    uses = [] if past is None else [node for node, _ in past.uses()]
    return next((node for node in uses if node.op_type == "GroupQueryAttention"), None)


def _refusal(made: Distilled, name: str, reason: str) -> ExportError:
    return ExportError(
        f"{made.name} looks back through layer {made.attended_layer} of {name}, which {reason}; distil a draft without "
        "attention (`edgespec distill --no-attention`)"
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What attention sees at each of n places of one text.

    Attributes:
        rotary: of the layer.
        keys, values: that the target has cached, shape (num_kv_heads, tokens, head_dim).
        lengths: how many of these tokens each place sees, from the first on, shape (n,).
        own: keys and values of the draft's steps before, oldest first, each of shape (n, num_kv_heads, head_dim).
    """

    rotary: Rotary
    keys: Floats
    values: Floats
    lengths: NDArray[np.int64]
    own: tuple[tuple[Floats, Floats], ...] = field(default=())


def attend(seen: Seen, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Seen]:
    """Attention of one step at every place.

    Args:
        q: shape (n, num_heads, head_dim); query heads share key heads in groups of neighbours.
        k, v: of the same token, shape (n, num_kv_heads, head_dim).
    Returns:
        Shape (n, num_heads * head_dim), and what the step after this one sees.
    """
    places, num_heads, head_dim = q.shape
    positions = seen.lengths + len(seen.own)
    queries = _rotated(q, positions, seen.rotary).reshape(places, k.shape[1], -1, head_dim)
    after = replace(seen, own=(*seen.own, (_rotated(k, positions, seen.rotary), v)))
    own_keys, own_values = (np.stack(parts, 2) for parts in zip(*after.own, strict=True))
    cached = np.einsum("nghd,gtd->nght", queries, seen.keys)
    is_seen = np.arange(cached.shape[-1]) < seen.lengths[:, None]
    cached = np.where(is_seen[:, None, None], cached, -np.inf)
    scores = np.concatenate([cached, np.einsum("nghd,ngtd->nght", queries, own_keys)], -1) / np.sqrt(head_dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_cached, of_own = np.split(weights, [cached.shape[-1]], -1)
    found = np.einsum("nght,gtd->nghd", of_cached, seen.values) + np.einsum("nght,ngtd->nghd", of_own, own_values)
    return found.reshape(places, num_heads * head_dim).astype(np.float32), after


def _rotated(heads: Floats, positions: NDArray[np.int64], rotary: Rotary) -> Floats:
    """Heads of shape (n, heads, head_dim), each place's by its own position."""
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    half = cos.shape[-1]
    channels = np.arange(2 * half)
    first, second = (channels[::2], channels[1::2]) if rotary.interleaved else (channels[:half], channels[half:])
    found = heads.copy()
    found[..., first] = heads[..., first] * cos - heads[..., second] * sin
    found[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return found
