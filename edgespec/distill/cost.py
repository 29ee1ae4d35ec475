"""What a draft step will cost beside a step of the target, from their sizes: a prediction, to be measured later.

A step of a small model reads every weight once, so its time is the bytes it reads plus what calls and operators cost
whatever their size. These two were measured with ONNX Runtime 1.32 on a CPU and are given as the bytes that could be
read meanwhile.
"""

from __future__ import annotations

from typing import Any

_CALL = 1.5e6  # bytes: a call from Python, its inputs and outputs, the choice of a token
_LAYER = 0.5e6  # bytes: the operators of a layer


def step_bytes(config: Any, layers: int, width: int, head_size: int) -> float:
    """Bytes that a step in 8 bits is worth."""
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = 2 * hidden * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    total: float = _CALL + layers * (_LAYER + attention + 3 * hidden * width) + head_size * hidden
    return total


def predict_cost_ratio(config: Any, layers: int, width: int, head_size: int) -> float:
    """c: seconds of a draft step over those of a one-row target step, both in 8 bits."""
    target = step_bytes(config, config.num_hidden_layers, config.intermediate_size, config.vocab_size)
    return step_bytes(config, layers, width, head_size) / target
