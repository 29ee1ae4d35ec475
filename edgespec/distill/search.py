"""Which of the target's layers a draft reads beside the head's input: a few choices, each trained for some steps. And
which one it attends to: a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from edgespec.distill.student import target_rotation

Pair = tuple[int, ...]
_TEXTS, _LENGTH = 4, 64
_SHORT, _SHIFT = 32, 16  # tokens of a text, positions


def candidates(count: int) -> list[Pair]:
    """Two layers of `count`, a lower and a higher one, in some ways; one where there are too few."""
    shares = ((1 / 3, 2 / 3), (1 / 2, 5 / 6), (1 / 6, 1 / 2), (2 / 3, 1))
    found = [(round(low * count), min(round(high * count), count - 1)) for low, high in shares]
    distinct: list[Pair] = [pair for pair in dict.fromkeys(found) if 0 < pair[0] < pair[1]]
    return distinct or [(count // 2,)]


def search(choices: Sequence[Pair], score: Callable[[Pair], float]) -> tuple[Pair, dict[Pair, float]]:
    """The best of the choices, and what each scored."""
    if len(choices) == 1:
        return choices[0], {}
    scores = {layers: score(layers) for layers in choices}
    return max(scores, key=scores.__getitem__), scores


def attendable_layers(model: Any, vocab_size: int, longest: int, seed: int) -> list[int]:
    """Layers through whose cache a draft can look back, so that nothing is trained which no export can write.

    The cache keeps all of a text of `longest` tokens, heads and rotation are of widths that GroupQueryAttention has,
    and keys are rotated as `target_rotation` rotates the draft's: those of a text that begins some positions later are
    the same, rotated by so much more. Not so where a layer has no positions.

    Args:
        model: of `load_target`.
        vocab_size: tokens to choose from.
        seed: of the tokens.
    """
    length = min(_SHORT, longest)
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, vocab_size, (1, length))).to(model.device)
    starts = [torch.full_like(tokens, start) for start in (0, _SHIFT)]
    with torch.inference_mode():
        positions = (torch.arange(length, device=model.device) + start for start in starts)
        here, there = (model.model(tokens, position_ids=p, use_cache=True).past_key_values.layers for p in positions)
        return [
            layer
            for layer, (one, other) in enumerate(zip(here, there, strict=True))
            if (getattr(one, "sliding_window", None) or longest + 1) > longest
            and _is_rotated(model, one.keys.float(), other.keys.float(), starts)
        ]


def _is_rotated(model: Any, keys: Any, later: Any, starts: Sequence[Any]) -> bool:
    """Whether `later` are `keys`, rotated from the first of `starts` to the second."""
    try:
        width = model.model.rotary_emb(keys, starts[0])[0].shape[-1]
        rotate = target_rotation(model)
        before, expected = (rotate(keys, keys, start)[0] for start in starts)
        found, _ = rotate(later, later, starts[0])  # by nothing, but scaled as the others where a family does that
    except (AttributeError, TypeError, RuntimeError):  # it rotates in another way
        return False
    is_known = keys.shape[-1] % 8 == 0 and width % 16 == 0
    return is_known and bool((found - expected).norm() < (found - before).norm() / 2)


def induction_scores(model: Any, vocab_size: int, seed: int) -> dict[int, float]:
    """How well each layer's keys tell what stood before a token, which is what copying needs.

    Random tokens are said twice. A head that copies looks, at a token's second time, at what followed its first
    (Olsson et al. 2022, "In-context learning and induction heads"). Layers with a window are left out.

    Args:
        model: of `load_target`.
        vocab_size: tokens to choose from.
        seed: of the tokens.
    Returns:
        Layer -> share of the attention that goes there, of its best head.
    """
    once = np.random.default_rng(seed).integers(0, vocab_size, (_TEXTS, _LENGTH))
    tokens = torch.from_numpy(np.concatenate([once, once], 1)).to(model.device)
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the others keep no weights
    try:
        with torch.inference_mode():
            attentions = model(tokens, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(usual)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(attentions)
    second = torch.arange(_LENGTH, 2 * _LENGTH - 1)
    return {
        layer: float(weights[:, :, second, second - _LENGTH + 1].float().mean((0, 2)).max())
        for layer, (weights, kind) in enumerate(zip(attentions, kinds, strict=True))
        if kind == "full_attention"
    }
