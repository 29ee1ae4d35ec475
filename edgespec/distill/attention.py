"""Attention for writing many texts at once: queries that share keys are multiplied with them together.

transformers copies keys and values for every query head of a group, each step all of the cache: for 64 texts of a small
model that takes longer than all the rest. Registered under a name of its own; knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = "edgespec_grouped"


def grouped_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
    """One new token's attention, each group of heads as so many queries; anything else as transformers does it.

    Args:
        query: shape (batch, heads, length, width).
        key, value: shape (batch, kv_heads, past + length, width).
        mask: None where every query sees all keys, as a single one does without a window.
    Returns:
        Shape (batch, length, heads, width).
    """
    batch, heads, length, width = query.shape
    if length > 1 or mask is not None:
        found, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return found, None
    groups = query.reshape(batch, key.shape[1], -1, width)
    made = torch.nn.functional.scaled_dot_product_attention(groups, key, value, scale=options.get("scaling"))
    return made.reshape(batch, 1, heads, width), None


def register() -> str:
    """Make it known to transformers, and return its name."""
    ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return GROUPED
