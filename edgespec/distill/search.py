"""Which of the target's layers a draft reads beside the head's input: a few choices, each trained for some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Layers = tuple[int, ...]


def candidates(count: int) -> list[Layers]:
    """Two layers of `count`, a lower and a higher one, in some ways; one where there are too few."""
    shares = ((1 / 3, 2 / 3), (1 / 2, 5 / 6), (1 / 6, 1 / 2), (2 / 3, 1))
    found = [(round(low * count), min(round(high * count), count - 1)) for low, high in shares]
    distinct: list[Layers] = [pair for pair in dict.fromkeys(found) if 0 < pair[0] < pair[1]]
    return distinct or [(count // 2,)]


def search(choices: Sequence[Layers], score: Callable[[Layers], float]) -> tuple[Layers, dict[Layers, float]]:
    """The best of the choices, and what each scored."""
    if len(choices) == 1:
        return choices[0], {}
    scores = {layers: score(layers) for layers in choices}
    return max(scores, key=scores.__getitem__), scores
