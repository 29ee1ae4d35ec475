"""Which of the target's layers a draft starts from: a few candidates, each trained for some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Layers = tuple[int, ...]


def candidates(count: int, wanted: int) -> list[Layers]:
    """Ways to choose `wanted` of `count` layers: spread evenly, and the first ones with more or fewer of the last."""
    even = tuple(int(i) for i in np.linspace(0, count - 1, wanted).round())
    found = [even] if wanted > 1 else [(0,), (count - 1,)]
    for first in range(wanted, 0, -1):
        last = wanted - first
        found.append((*range(first), *range(count - last, count)))
    ascending = [layers for layers in found if len(set(layers)) == wanted and list(layers) == sorted(layers)]
    return list(dict.fromkeys(ascending))[:4]


def search(choices: Sequence[Layers], score: Callable[[Layers], float]) -> tuple[Layers, dict[Layers, float]]:
    """The best of the choices, and what each scored."""
    if len(choices) == 1:
        return choices[0], {}
    scores = {layers: score(layers) for layers in choices}
    return max(scores, key=scores.__getitem__), scores
