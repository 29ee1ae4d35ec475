"""How likely drafted tokens are to be accepted, learnt while running. Knows no models and no clocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

# Memories of an estimate, in rounds: each forgets at its own pace, and they are weighted by how well each has
# predicted. The shortest follows a change within a sentence, the longest is the average of a long answer.
_HORIZONS = (4, 16, 64, 256)
_KEEP = tuple(1 - 1 / horizon for horizon in _HORIZONS)
_SHARE = 1 / _HORIZONS[-1]  # of the weight that is dealt out anew with each observation (fixed share)
# Observations that a cell needs to count as much as what is known without it.
_PARENT_WEIGHT = 4.0
_MAX_LEVEL = 7
_MAX_DEPTH = 4


class DriftingRate:
    """A probability of success that may change: a mixture of averages with different memories.

    What was observed fades with the rounds that pass, whether anything is observed in them or not, so that a rate
    nobody has looked at for long is what the prior says. Weights of the memories follow the likelihood of what was
    observed, with a fixed share dealt out anew so that none is ever lost (Herbster and Warmuth 1998).

    Args:
        prior_weight: of the prior, in observations.
    """

    def __init__(self, prior_weight: float) -> None:
        self._prior_weight = prior_weight
        self._successes = [0.0] * len(_HORIZONS)
        self._trials = [0.0] * len(_HORIZONS)
        self._weights = [1 / len(_HORIZONS)] * len(_HORIZONS)
        self._now = 0

    def value(self, prior: float, now: int) -> float:
        """The probability that a trial in round `now` succeeds, where `prior` is what is known from elsewhere."""
        if now != self._now:
            self._fade(now)
        # Written out, as this runs several times for every drafted token.
        trials, found = self._prior_weight, 0.0
        successes = trials * prior
        for w, s, n in zip(self._weights, self._successes, self._trials, strict=True):
            found += w * (s + successes) / (n + trials)
        return found

    def observe(self, success: bool, prior: float, now: int) -> None:
        if now != self._now:
            self._fade(now)
        trials = self._prior_weight
        successes, total, weights = trials * prior, 0.0, []
        for w, s, n in zip(self._weights, self._successes, self._trials, strict=True):
            rate = (s + successes) / (n + trials)
            # Away from 0 and 1: one surprise must not condemn a memory for ever.
            rate = 0.01 if rate < 0.01 else 0.99 if rate > 0.99 else rate
            weights.append(w * (rate if success else 1 - rate))
            total += weights[-1]
        scale = (1 - _SHARE) / total
        self._weights = [scale * w + _SHARE / len(_HORIZONS) for w in weights]
        self._trials = [n + 1 for n in self._trials]
        if success:
            self._successes = [s + 1 for s in self._successes]

    def _fade(self, now: int) -> None:
        gap, self._now = now - self._now, now
        self._successes = [s * keep**gap for s, keep in zip(self._successes, _KEEP, strict=True)]
        self._trials = [n * keep**gap for n, keep in zip(self._trials, _KEEP, strict=True)]


class AcceptanceModel:
    """Acceptance of one drafter's tokens, by depth and by the drafter's own confidence.

    The level of a token is its confidence c in steps of a halved doubt 1 - c; its cell is that and its depth (the
    first few apart, the rest together). A cell starts from its level, a level and a depth start from the drafter's
    overall rate, and that from `prior`.

    Args:
        prior: acceptance to start from.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._now = 0
        self._overall = DriftingRate(1.0)
        self._depths = [DriftingRate(_PARENT_WEIGHT) for _ in range(_MAX_DEPTH + 1)]
        self._levels = [DriftingRate(_PARENT_WEIGHT) for _ in range(_MAX_LEVEL + 1)]
        self._cells = [[DriftingRate(_PARENT_WEIGHT) for _ in self._levels] for _ in self._depths]

    @property
    def overall(self) -> float:
        return self._overall.value(self._prior, self._now)

    def at_depths(self, count: int) -> list[float]:
        """Probabilities that each of the first `count` tokens is accepted, given that those before it are."""
        overall = self.overall
        apart = [rate.value(overall, self._now) for rate in self._depths[:count]]
        return apart + apart[-1:] * (count - len(apart))

    def at(self, depth: int, confidence: float) -> float:
        """The same of the token at `depth` (0 is the first), knowing the drafter's confidence in it."""
        level = _level(confidence)
        return self._cells[min(depth, _MAX_DEPTH)][level].value(self._at_level(level), self._now)

    def at_each(self, confidences: Sequence[float]) -> list[float]:
        """`at` of the tokens of a draft."""
        # Long matches are of few kinds: most of their tokens share a cell.
        cells = [(min(depth, _MAX_DEPTH), _level(confidence)) for depth, confidence in enumerate(confidences)]
        overall = self.overall
        levels = {level: self._levels[level].value(overall, self._now) for level in {level for _, level in cells}}
        values = {cell: self._cells[cell[0]][cell[1]].value(levels[cell[1]], self._now) for cell in set(cells)}
        return [values[cell] for cell in cells]

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """The first `num_accepted` drafted tokens were accepted, and the next, if there is one, was not.

        Args:
            confidences: of the tokens that were drafted.
        """
        self._now += 1
        for depth, confidence in enumerate(confidences[: num_accepted + 1]):
            success, level, line = depth < num_accepted, _level(confidence), min(depth, _MAX_DEPTH)
            overall = self.overall
            at_level = self._levels[level].value(overall, self._now)
            self._cells[line][level].observe(success, at_level, self._now)
            self._levels[level].observe(success, overall, self._now)
            self._depths[line].observe(success, overall, self._now)
            self._overall.observe(success, self._prior, self._now)

    def _at_level(self, level: int) -> float:
        return self._levels[level].value(self.overall, self._now)


def _level(confidence: float) -> int:
    return min(int(-log2(max(1 - confidence, 2.0**-_MAX_LEVEL))), _MAX_LEVEL)
