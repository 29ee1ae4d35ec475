"""What a draft step will cost beside a step of the target, from their sizes: a prediction, to be measured later.

A step of a small model reads every weight once, so its time is the bytes it reads plus what calls and operators cost
whatever their size. These two were measured with ONNX Runtime 1.32 on a CPU and are given as the bytes that could be
read meanwhile.
"""

from __future__ import annotations

from typing import Any

from edgespec.distill.student import DraftShape

_CALL = 1.5e6  # bytes: a call from Python, its inputs and outputs, the choice of a token
_LAYER = 0.5e6  # bytes: the operators of a layer of the target
_BLOCK = 0.2e6  # bytes: those of a block of the draft


def draft_bytes(shape: DraftShape) -> float:
    """Bytes that a step of the draft in 8 bits is worth."""
    hidden = shape.hidden_size
    block = _BLOCK + 3 * hidden * shape.intermediate_size
    products = hidden * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    attention = 0.0 if shape.attended_layer is None else _BLOCK + products
    return _CALL + attention + hidden * (shape.num_features + 2 * hidden + shape.head_size) + shape.num_blocks * block


def target_bytes(config: Any) -> float:
    """Bytes that a step of the target in 8 bits is worth."""
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = 2 * hidden * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    layer = _LAYER + attention + 3 * hidden * config.intermediate_size
    return float(_CALL + config.num_hidden_layers * layer + config.vocab_size * hidden)


def predict_cost_ratio(config: Any, shape: DraftShape) -> float:
    """c: seconds of a draft step over those of a one-row target step, both in 8 bits."""
    return draft_bytes(shape) / target_bytes(config)
