"""Rows of logits -> shaped distributions -> a token. Vectorised over rows; knows nothing of drafts.

Nothing here sorts a vocabulary. What survives a cut is found by a bound that costs one pass (the k-th largest of
the maxima of blocks; a floor under the most probable token; a bracket estimated from a sample), and only what is
above the bound, or inside the bracket, is sorted.
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
_FEW = 4096  # candidates a row that are cheaper to gather than the row is to mask
_LOWEST, _LARGEST = np.finfo(np.float32).min, float(np.finfo(np.float32).max)


def draw(weights: _Rows, uniform: float) -> int:
    """The token at quantile `uniform` of `weights`: inverse transform sampling, by blocks, then inside one.

    Args:
        weights: shape (vocab,), not negative (need not sum to 1). Without any weight the answer is 0.
        uniform: from [0, 1).
    """
    starts = np.arange(0, len(weights), _BLOCK)
    block, rest = _quantile(np.add.reduceat(weights, starts), uniform)
    start = int(starts[block])
    token, _ = _quantile(weights[start : start + _BLOCK], rest)
    return start + token


def _quantile(weights: _Rows, uniform: float) -> tuple[int, float]:
    """Index of the weight in which the quantile lies, and how far inside it, from [0, 1)."""
    heights = np.cumsum(weights, dtype=np.float64)
    if not heights[-1] > 0:
        return 0, 0.0
    # Strictly below the total even after rounding, so that the index found has a weight.
    target = min(uniform * heights[-1], np.nextafter(heights[-1], 0))
    index = int(np.searchsorted(heights, target, side="right"))
    below = heights[index - 1] if index else 0.0
    return index, float((target - below) / (heights[index] - below))


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
        possible is 0 throughout.
    """
    best = logits.max(axis=1, keepdims=True)
    best[best < _LOWEST] = 0
    floor = _floor(logits, best, params)
    if floor is not None:
        return _scatter(logits, *_gather(logits, logits >= floor, -np.inf), best, params)
    weights = _exponentials(logits, best, params.temperature)
    if params.top_p < 1:
        return _shape_nucleus(weights, params)
    return _normalised(_cut_late(weights, params))


def _floor(logits: _Rows, best: _Rows, params: SamplingParams) -> _Rows | None:
    """Logits that survivors are not below, one a row, where they are known without a softmax: shape (rows, 1)."""
    if 0 < params.top_k < logits.shape[1]:
        return np.maximum(_top_k_bound(logits, params.top_k), _LOWEST)
    if params.min_p > 0 and params.top_p == 1:
        # A little lower, for what rounding does to the exact comparison that follows.
        below = params.temperature * (math.log(params.min_p) - 1e-3)
        bound: _Rows = best + np.float32(max(below, -_LARGEST)) - 8 * np.spacing(np.abs(best))
        return np.maximum(bound, _LOWEST)
    return None


def _top_k_bound(logits: _Rows, k: int) -> _Rows:
    """A bound that the k-th largest logit of a row is not below: shape (rows, 1).

    It is the k-th largest of the maxima of blocks, as k blocks have a logit of at least that. Members of a block
    are far apart, so that the maxima are taken between whole stretches of memory.
    """
    num_rows, vocab = logits.shape
    size = max(1, min(_BLOCK, vocab // (4 * k)))
    num_blocks = vocab // size
    maxima = logits[:, : size * num_blocks].reshape(num_rows, size, num_blocks).max(axis=1)
    bound: _Rows = np.partition(maxima, -k, axis=1)[:, -k, None]
    return bound


def _gather(values: _Rows, mask: NDArray[np.bool_], fill: float) -> tuple[NDArray[np.intp], NDArray[np.intp], _Rows]:
    """Values where `mask` holds, moved to the left of each row: flat cells, their new flat cells, the new rows."""
    num_rows, width = values.shape
    cells = np.flatnonzero(mask)
    if num_rows == 1 and len(cells):  # a draft step: nothing to align
        return cells, np.arange(len(cells)), values[:, cells]
    starts = np.searchsorted(cells, np.arange(num_rows + 1) * width)
    counts = np.diff(starts)
    most = max(int(counts.max()), 1)
    places = np.arange(len(cells)) + np.repeat(np.arange(num_rows) * most - starts[:-1], counts)
    gathered = np.full((num_rows, most), fill, np.float32)
    gathered.ravel()[places] = values.ravel()[cells]
    return cells, places, gathered


def _scatter(
    logits: _Rows,
    cells: NDArray[np.intp],
    places: NDArray[np.intp],
    gathered: _Rows,
    best: _Rows,
    params: SamplingParams,
) -> _Rows:
    """Shape the gathered logits and write them back over the whole rows."""
    if 0 < params.top_k < gathered.shape[1]:
        last = np.partition(gathered, -params.top_k, axis=1)[:, -params.top_k, None]
        gathered[gathered < last] = -np.inf
    weights = _exponentials(gathered, best, params.temperature)
    if params.top_p < 1:
        _cut(weights, weights, params.top_p)
    _normalised(_cut_late(weights, params))
    return _put(logits, cells, places, weights)


def _put(rows: _Rows, cells: NDArray[np.intp], places: NDArray[np.intp], weights: _Rows) -> _Rows:
    rows.fill(0)
    rows.ravel()[cells] = weights.ravel()[places]
    return rows


def _exponentials(logits: _Rows, best: _Rows, temperature: float) -> _Rows:
    """In place: weights of which the largest of a row is 1."""
    logits -= best
    if temperature != 1:
        with np.errstate(over="ignore"):  # far below the maximum is as good as minus infinity
            logits *= np.float32(min(1 / temperature, _LARGEST))
    return np.exp(logits, out=logits)


def _shape_nucleus(weights: _Rows, params: SamplingParams) -> _Rows:
    """top-p and what follows, on whole rows of weights."""
    high = weights >= _FLOOR
    if np.count_nonzero(high) <= _FEW * len(weights):
        cells, places, few = _gather(weights, high, 0)
        wanted = weights.sum(axis=1) * np.float32(params.top_p)
        if (few.sum(axis=1) >= wanted).all():
            few *= few >= _edge(few, few, wanted)
            return _put(weights, cells, places, _normalised(_cut_late(few, params)))
    _cut(weights, weights, params.top_p)
    return _normalised(_cut_late(weights, params))


def _cut_late(weights: _Rows, params: SamplingParams) -> _Rows:
    """min-p and typical-p, in place."""
    if params.min_p > 0:
        weights *= weights >= np.float32(params.min_p)
    if params.typical_p < 1:
        _cut(weights, _typicality(weights), params.typical_p)
    return weights


def _typicality(weights: _Rows) -> _Rows:
    """Minus the distance of each token's surprise from the entropy of its row; impossible ones: minus infinity.

    Source: locally typical sampling (Meister et al. 2022).
    """
    with np.errstate(divide="ignore"):
        logs = np.log(weights)
    totals = np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    mean = (weights * np.where(weights > 0, logs, 0)).sum(axis=1, keepdims=True) / totals
    logs -= mean
    typicality: _Rows = np.negative(np.abs(logs, out=logs), out=logs)
    return typicality


def _cut(weights: _Rows, scores: _Rows, mass: float) -> None:
    """Keep, in place, the tokens of the best scores that together have this share of a row's weight."""
    wanted = weights.sum(axis=1) * np.float32(mass)
    weights *= scores >= _edge(scores, weights, wanted)


def _edge(scores: _Rows, weights: _Rows, wanted: _Rows) -> _Rows:
    """Score of the last token that stays, where the weight of those of better scores is still below `wanted`.

    Args:
        scores, weights: shape (rows, n).
        wanted: weight, shape (rows,).
    Returns:
        Shape (rows, 1).
    """
    for width in _WIDTHS if scores.shape[1] > _SMALL else ():
        low, high = _bracket(scores, weights, wanted, width)
        above = scores > high
        rest = wanted - np.multiply(weights, above).sum(axis=1)
        inside = (scores >= low) ^ above
        _, _, few = _gather(weights, inside, 0)
        if ((rest > 0) & (few.sum(axis=1) >= rest)).all():
            few_scores = few if scores is weights else _gather(scores, inside, -np.inf)[2]
            return _sorted_edge(few_scores, few, rest)
    return _sorted_edge(scores, weights, wanted)


def _sorted_edge(scores: _Rows, weights: _Rows, wanted: _Rows) -> _Rows:
    if scores is weights:  # sorting values is several times faster than sorting places
        descending = np.sort(weights, axis=1)[:, ::-1]
        last = _num_before(descending, wanted)
        edge: _Rows = descending[np.arange(len(last)), last][:, None]
        return edge
    order = np.argsort(-scores, axis=1)
    last = _num_before(np.take_along_axis(weights, order, axis=1), wanted)
    return np.take_along_axis(scores, np.take_along_axis(order, last[:, None], axis=1), axis=1)


def _num_before(descending: _Rows, wanted: _Rows) -> NDArray[np.intp]:
    """Place of the last token that stays, best first: shape (rows,)."""
    before = np.cumsum(descending, axis=1, dtype=np.float64) - descending
    places: NDArray[np.intp] = np.maximum((before < wanted[:, None]).sum(axis=1), 1) - 1
    return places


def _bracket(scores: _Rows, weights: _Rows, wanted: _Rows, width: int) -> tuple[_Rows, _Rows]:
    """Scores between which the edge most probably lies, from every so many-th token: two of shape (rows, 1).

    Estimated from the weight beyond the edge, as that is spread over many tokens even where a few dominate.
    """
    step = scores.shape[1] // _SAMPLE
    sample, sampled = scores[:, ::step], weights[:, ::step]
    order = np.argsort(sample, axis=1)
    beyond = np.cumsum(np.take_along_axis(sampled, order, axis=1), axis=1) * np.float32(step)
    place = (beyond < (weights.sum(axis=1) - wanted)[:, None]).sum(axis=1, keepdims=True)
    margin = width * math.isqrt(sample.shape[1])
    ends = np.full((len(scores), margin + 1), np.inf, np.float32)
    padded = np.concatenate([-ends, np.take_along_axis(sample, order, axis=1), ends], axis=1)
    place += margin + 1
    return np.take_along_axis(padded, place - margin, axis=1), np.take_along_axis(padded, place + margin, axis=1)


def _normalised(weights: _Rows) -> _Rows:
    """In place; rows without weight stay as they are."""
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return weights
