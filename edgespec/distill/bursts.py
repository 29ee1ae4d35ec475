"""Texts with drafted bursts: what the target says after tokens that the draft wrote.

The draft writes all bursts of a text at once, each token after what it wrote before, so a few runs of the draft and
one of the target make a text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.distill.store import DRAFTED, READ, TEMPLATE

_EVERY, _LENGTH = 16, 4  # a burst of so many tokens in a stretch of so many


def write_bursts(
    model: Any,
    head_ids: NDArray[np.int64],
    tokens: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    autocast: Any,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Replace tokens of texts, shape (n, length), by what the draft samples in their place.

    Tokens of the template are never replaced.
    """
    tokens, kinds = tokens.copy(), kinds.copy()
    count, length = tokens.shape
    starts = np.arange(1, length - _LENGTH, _EVERY)[None] + rng.integers(0, _EVERY - _LENGTH, (count, 1))
    device = str(next(model.parameters()).device)
    model.eval()
    for step in range(_LENGTH):
        at = starts + step
        rows, columns = np.nonzero(at < length)
        places = at[rows, columns]
        free = kinds[rows, places] != TEMPLATE
        rows, places = rows[free], places[free]
        with torch.no_grad(), autocast:
            logits = model(torch.from_numpy(tokens).to(device)).logits
        # Contiguous rows of the few positions that are wanted, at temperature 1, by Gumbel's way.
        scores = logits[torch.from_numpy(rows), torch.from_numpy(places - 1)].float().cpu().numpy()
        noise = -np.log(-np.log(rng.random(scores.shape, np.float32).clip(1e-7, 1 - 1e-6)))
        tokens[rows, places] = head_ids[(scores + noise).argmax(-1)]
        kinds[rows, places] = DRAFTED
    model.train()
    kinds[(kinds != DRAFTED) & (kinds != TEMPLATE)] = READ
    return tokens, kinds
