"""Rows of logits -> shaped distributions -> a token. Vectorised over the vocabulary; knows nothing of drafts.

Nothing here sorts a vocabulary. What survives a cut is found by a bound that costs one pass (the k-th largest of
the maxima of blocks; a floor under the most probable token; a bracket estimated from a sample), and only what is
above the bound, or inside the bracket, is sorted.

After each call of a model the caches are cold, and code costs more than arithmetic: so the few functions that all of
this needs are ufuncs and methods in C, `np.add.reduce(x)` and not `x.sum()`, which goes through Python.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.params import SamplingParams

_Rows: TypeAlias = NDArray[np.float32]

_BLOCK = 64
_SAMPLE = 8192  # tokens of a row that a bracket is estimated from
_SMALL = 4 * _SAMPLE  # a row of fewer values is sorted whole
_WIDTHS = (2, 8)  # of a bracket, in standard deviations or so; beyond the last, everything is sorted
_FLOOR = np.float32(1e-4)  # of the weight of the most probable token: most nuclei end above it
_FEW = 4096  # candidates that are cheaper to gather than the row is to mask
_LOWEST, _LARGEST = np.finfo(np.float32).min, float(np.finfo(np.float32).max)
_TINY = np.finfo(np.float32).tiny


def draw(weights: _Rows, uniform: float) -> int:
    """The token at quantile `uniform` of `weights`: inverse transform sampling, by blocks, then inside one.

    Args:
        weights: shape (vocab,), not negative (need not sum to 1). Without any weight the answer is 0.
        uniform: from [0, 1).
    """
    starts = np.arange(0, len(weights), _BLOCK)
    block, rest = _quantile(np.add.reduceat(weights, starts), uniform)
    start = block * _BLOCK
    token, _ = _quantile(weights[start : start + _BLOCK], rest)
    return start + token


def _quantile(weights: _Rows, uniform: float) -> tuple[int, float]:
    """Index of the weight in which the quantile lies, and how far inside it, from [0, 1)."""
    heights = np.add.accumulate(weights, dtype=np.float64)
    total: float = heights.item(-1)
    if not total > 0:
        return 0, 0.0
    # Strictly below the total even after rounding, so that the index found has a weight.
    target = min(uniform * total, math.nextafter(total, 0))
    index = int(heights.searchsorted(target, side="right"))
    below: float = heights.item(index - 1) if index else 0.0
    return index, (target - below) / (heights.item(index) - below)


def shape(logits: _Rows, params: SamplingParams) -> _Rows:
    """The distributions that tokens are really sampled from: temperature, then top-k, top-p, min-p, typical-p.

    Each step works on what the one before left, renormalised, as in transformers. Tokens that are exactly as
    probable as the last one that a step keeps are kept, too: which of them stay can then not depend on the order
    in which a sort happens to put them. (transformers does the same in top-k, min-p and typical-p; in top-p it
    cuts through such a tie where its sort leaves it.)

    Args:
        logits: shape (rows, vocab); overwritten. Minus infinity stays impossible.
        params: temperature above 0 (greedy decoding never computes a softmax).
    Returns:
        `logits`, now holding distributions: rows sum to 1, tokens that were cut are 0. A row in which nothing is
        possible is 0 throughout. None depends on which others share the call.
    """
    for row in logits:  # a row has tens of thousands of columns, and fits a core's cache where all of them do not
        cells, weights = _survivors(row, params)
        if cells is not None:
            row.fill(0)
            row[cells] = weights
    return logits


def _survivors(row: _Rows, params: SamplingParams) -> tuple[NDArray[np.intp] | None, _Rows]:
    """Tokens that are left of a row, ascending, and their distribution; `None` for all, with `row` overwritten."""
    best = row[row.argmax()]
    if best < _LOWEST:
        best = np.float32(0)
    floor = _floor(row, best, params)
    if floor is not None:
        return _few_survivors(row, best, floor, params)
    weights = _exponentials(row, best, params.temperature)
    if params.top_p < 1:
        wanted = np.add.reduce(weights) * np.float32(params.top_p)
        (cells,) = (weights >= _FLOOR).nonzero()
        few = weights[cells]
        if len(cells) <= _FEW and np.add.reduce(few) >= wanted > 0:
            few *= few >= _edge(few, few, wanted)
            return cells, _normalised(_cut_late(few, params))
        _cut(weights, weights, params.top_p)
    return None, _normalised(_cut_late(weights, params))


def _few_survivors(
    row: _Rows, best: np.float32, floor: np.float32, params: SamplingParams
) -> tuple[NDArray[np.intp], _Rows]:
    """As `_survivors`, where it is known from which logit on."""
    (cells,) = (row >= floor).nonzero()
    few = row[cells]
    if 0 < params.top_k < len(few):
        few[few < np.partition(few, -params.top_k)[-params.top_k]] = -np.inf
    _exponentials(few, best, params.temperature)
    if params.top_p < 1 and len(few):
        _cut(few, few, params.top_p)
    return cells, _normalised(_cut_late(few, params))


def _floor(row: _Rows, best: np.float32, params: SamplingParams) -> np.float32 | None:
    """The logit that survivors are not below, where it is known without a softmax."""
    if 0 < params.top_k < len(row):
        return max(_top_k_bound(row, params.top_k), _LOWEST)
    if params.min_p > 0 and params.top_p == 1:
        # A little lower, for what rounding does to the exact comparison that follows.
        below = params.temperature * (math.log(params.min_p) - 1e-3)
        bound: np.float32 = best + np.float32(max(below, -_LARGEST)) - 8 * np.spacing(np.abs(best))
        return max(bound, _LOWEST)
    return None


def _top_k_bound(row: _Rows, k: int) -> np.float32:
    """A bound that the k-th largest logit is not below.

    It is the k-th largest of the maxima of blocks, as k blocks have a logit of at least that. Members of a block
    are far apart, so that the maxima are taken between whole stretches of memory.
    """
    size = max(1, min(_BLOCK, len(row) // (4 * k)))
    num_blocks = len(row) // size
    maxima = row[: size * num_blocks].reshape(size, num_blocks).max(axis=0)
    bound: np.float32 = np.partition(maxima, -k)[-k]
    return bound


def _exponentials(logits: _Rows, best: np.float32, temperature: float) -> _Rows:
    """In place: weights, relative to that of the logit `best`."""
    logits -= best
    if temperature != 1:
        with np.errstate(over="ignore"):  # far below the maximum is as good as minus infinity
            logits *= np.float32(min(1 / temperature, _LARGEST))
    return np.exp(logits, out=logits)


def _cut_late(weights: _Rows, params: SamplingParams) -> _Rows:
    """min-p and typical-p, in place."""
    if params.min_p > 0:
        weights *= weights >= np.float32(params.min_p)
    if params.typical_p < 1 and len(weights):
        _cut(weights, _typicality(weights), params.typical_p)
    return weights


def _typicality(weights: _Rows) -> _Rows:
    """Minus the distance of each token's surprise from the entropy; impossible ones: minus infinity.

    Source: locally typical sampling (Meister et al. 2022).
    """
    with np.errstate(divide="ignore"):
        logs = np.log(weights)
    mean = (weights * np.where(weights > 0, logs, 0)).sum() / np.maximum(weights.sum(), _TINY)
    logs -= mean
    typicality: _Rows = np.negative(np.abs(logs, out=logs), out=logs)
    return typicality


def _cut(weights: _Rows, scores: _Rows, mass: float) -> None:
    """Keep, in place, the tokens of the best scores that together have this share of the weight."""
    weights *= scores >= _edge(scores, weights, np.add.reduce(weights) * np.float32(mass))


def _edge(scores: _Rows, weights: _Rows, wanted: np.float32) -> np.float32:
    """Score of the last token that stays, where the weight of those of better scores is still below `wanted`.

    Args:
        scores, weights: shape (n,), n >= 1.
        wanted: weight.
    """
    for width in _WIDTHS if len(scores) > _SMALL else ():
        low, high = _bracket(scores, weights, wanted, width)
        above = scores > high
        rest = wanted - np.multiply(weights, above).sum()
        inside = (scores >= low) ^ above
        few = weights[inside]
        if rest > 0 and few.sum() >= rest:
            return _sorted_edge(few if scores is weights else scores[inside], few, rest)
    return _sorted_edge(scores, weights, wanted)


def _sorted_edge(scores: _Rows, weights: _Rows, wanted: np.float32) -> np.float32:
    if scores is weights:  # sorting values is several times faster than sorting places
        ascending = weights.copy()
        ascending.sort()
        ordered = descending = ascending[::-1]
    else:
        order = np.argsort(-scores)
        ordered, descending = scores[order], weights[order]
    edge: np.float32 = ordered[np.add.accumulate(descending, dtype=np.float64)[:-1].searchsorted(wanted)]
    return edge


def _bracket(scores: _Rows, weights: _Rows, wanted: np.float32, width: int) -> tuple[np.float32, np.float32]:
    """Scores between which the edge most probably lies, from every so many-th token.

    Estimated from the weight beyond the edge, as that is spread over many tokens even where a few dominate.
    """
    step = len(scores) // _SAMPLE
    sample, sampled = scores[::step], weights[::step]
    order = np.argsort(sample)
    beyond = np.cumsum(sampled[order]) * np.float32(step)
    place = np.count_nonzero(beyond < weights.sum() - wanted)
    margin = width * math.isqrt(len(sample))
    ends = np.full(margin + 1, np.inf, np.float32)
    padded = np.concatenate([-ends, sample[order], ends])
    place += margin + 1
    return padded[place - margin], padded[place + margin]


def _normalised(weights: _Rows) -> _Rows:
    """In place; where nothing has weight it stays so."""
    weights /= max(np.add.reduce(weights), _TINY)
    return weights
