"""Comparing the pass with the model's configuration: what must be refused, before and after matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.export.fuse.layer import LayerMatch
from edgespec.export.fuse.report import NoMatch

_FROZEN_ROPE = ("longrope", "dynamic")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part about the language model, where a configuration has several."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def check_config(config: Mapping[str, Any], max_len: int) -> None:
    """Refuse a rope whose frequencies depend on the length of the text: an export freezes them.

    Raises:
        NoMatch: such a rope is used beyond the length up to which it is constant.
    """
    text = text_config(config)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = (
        rope.get("original_max_position_embeddings")
        or text.get("original_max_position_embeddings")
        or text.get("max_position_embeddings")
    )
    if kind in _FROZEN_ROPE and (original is None or max_len > original):
        raise NoMatch(
            f"rope type {kind} changes with the length beyond {original} tokens, and an export freezes it; "
            f"export with a context of at most {original}"
        )


def check_layers(config: Mapping[str, Any], layers: Sequence[LayerMatch], max_len: int) -> None:
    """Compare what was found with what the configuration promises.

    Raises:
        NoMatch: the export lost or changed the soft cap or a window.
    """
    text = text_config(config)
    softcap = float(text.get("attn_logit_softcapping") or 0)
    for layer in layers:
        if abs(layer.scores.softcap - softcap) > 1e-3 * max(1.0, softcap):
            raise NoMatch(f"the export lost the attention soft cap of {softcap:g}", layer.index)
    _check_windows(text, [layer.scores.window for layer in layers], max_len)


def _check_windows(text: Mapping[str, Any], found: Sequence[int | None], max_len: int) -> None:
    if "sliding_window" not in text and "layer_types" not in text:
        return  # the configuration does not speak of windows, at least not in the usual words
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False or (window is not None and window >= max_len):
        window = None
    kinds = text.get("layer_types")
    for i, probed in enumerate(found):
        actual = probed if probed is not None and probed < max_len else None
        slides = kinds is None or kinds[i] == "sliding_attention"
        # Without a list of layer types the configuration doesn't say which layers slide.
        allowed = (window, None) if kinds is None else (window if slides else None,)
        if actual not in allowed:
            raise NoMatch(f"the export has a window of {actual}, the configuration {allowed[0]}", i)
    if kinds is None and window is not None and window not in found:
        raise NoMatch(f"the export lost the sliding window of {window} tokens")
