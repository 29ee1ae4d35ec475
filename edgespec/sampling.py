"""Rows of logits -> shaped distributions -> a token. Vectorised over rows; knows nothing of drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.params import SamplingParams

# Nucleus candidates are taken above the first of these floors (relative to the most probable token of the row)
# that leaves enough mass, so that what is sorted is a few dozen values and not the vocabulary.
_FLOORS = (1e-4, 1e-6, 0.0)
_BLOCK = 64
_LARGEST = float(np.finfo(np.float32).max)


def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """The token at quantile `uniform` of `weights`: inverse transform sampling, by blocks, then inside one.

    Args:
        weights: shape (vocab,), not negative, with a positive sum (need not be 1).
        uniform: from [0, 1).
    """
    starts = np.arange(0, len(weights), _BLOCK)
    block, rest = _quantile(np.add.reduceat(weights, starts), uniform)
    start = int(starts[block])
    token, _ = _quantile(weights[start : start + _BLOCK], rest)
    return start + token


def _quantile(weights: NDArray[np.float32], uniform: float) -> tuple[int, float]:
    """Index of the weight in which the quantile lies, and how far inside it, from [0, 1)."""
    heights = np.cumsum(weights, dtype=np.float64)
    # Strictly below the total even after rounding, so that the index found has a weight.
    target = min(uniform * heights[-1], np.nextafter(heights[-1], 0))
    index = int(np.searchsorted(heights, target, side="right"))
    below = heights[index - 1] if index else 0.0
    return index, float((target - below) / (heights[index] - below))


def shape(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float32]:
    """The distributions that tokens are really sampled from: temperature, then top-k, top-p, min-p.

    Args:
        logits: shape (rows, vocab); overwritten.
        params: temperature above 0 (greedy decoding never computes a softmax).
    Returns:
        `logits`, now holding distributions: rows sum to 1, tokens that were cut are 0.
    """
    logits -= logits.max(axis=1, keepdims=True)
    if params.temperature != 1:
        with np.errstate(over="ignore"):  # far below the maximum is as good as minus infinity
            logits *= np.float32(min(1 / params.temperature, _LARGEST))
    weights = np.exp(logits, out=logits)  # the most probable token of each row weighs 1
    if params.top_k or params.top_p < 1 or params.min_p > 0:
        _keep_only(weights, *_survivors(weights, params))
    else:
        weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _keep_only(weights: NDArray[np.float32], cells: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
    """Set all but `cells` (flat indices, of these rows) to 0 and normalise."""
    values = weights.ravel()[cells]
    totals = np.bincount(rows, values, len(weights))
    weights.fill(0)
    weights.ravel()[cells] = values / totals[rows]


def _survivors(weights: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """What top-k, top-p and min-p leave: flat indices and their rows."""
    if params.top_k:
        found = _Candidates(weights, _top_k_floor(weights, params.top_k))
        cut = found.descending[:, min(params.top_k, found.descending.shape[1]) - 1]
        if params.top_p < 1:
            found.descending *= found.descending >= cut[:, None]
            cut = np.maximum(cut, _nucleus(found.descending, found.masses() * params.top_p))
    elif params.top_p < 1:
        wanted = weights.sum(axis=1).astype(np.float64) * params.top_p
        for floor in _FLOORS:
            found = _Candidates(weights, np.full(len(weights), floor, np.float32))
            if floor == 0 or (found.masses() >= wanted).all():
                break
        cut = _nucleus(found.descending, wanted)
    else:
        cut = np.full(len(weights), params.min_p, np.float32)
        found = _Candidates(weights, cut)
    keep = found.values >= np.maximum(cut, np.float32(params.min_p))[found.rows]
    return found.cells[keep], found.rows[keep]


def _top_k_floor(weights: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """A bound that the k-th largest weight of a row is not below: shape (rows,).

    It is the k-th largest of the maxima of blocks: k blocks have a weight of at least that.
    """
    starts = np.arange(0, weights.shape[1], _BLOCK)
    if k > len(starts):
        return np.zeros(len(weights), np.float32)
    maxima = np.maximum.reduceat(weights, starts, axis=1)
    floor: NDArray[np.float32] = np.partition(maxima, -k, axis=1)[:, -k]
    return floor


class _Candidates:
    """The weights from `floor` (one a row) up.

    Attributes:
        cells, rows, values: flat indices, their rows and weights, each of shape (n,), in order.
        descending: the values row by row, largest first, filled with zeros: shape (rows, most in a row).
    """

    def __init__(self, weights: NDArray[np.float32], floor: NDArray[np.float32]) -> None:
        num_rows, vocab = weights.shape
        self.cells = np.flatnonzero(weights >= floor[:, None])
        self.rows = self.cells // vocab
        self.values = weights.ravel()[self.cells]
        starts = np.searchsorted(self.rows, np.arange(num_rows))
        places = np.arange(len(self.cells)) - starts[self.rows]
        descending = np.zeros((num_rows, int(places.max()) + 1), np.float32)
        descending[self.rows, places] = -self.values
        descending.sort(axis=1)
        self.descending = np.negative(descending, out=descending)

    def masses(self) -> NDArray[np.float64]:
        """Sum of each row of `descending`."""
        masses: NDArray[np.float32] = self.descending.sum(axis=1)
        return masses.astype(np.float64)


def _nucleus(descending: NDArray[np.float32], wanted: NDArray[np.float64]) -> NDArray[np.float32]:
    """Weight of the last token that stays, where the mass of the more probable ones is still below `wanted`."""
    before = np.cumsum(descending, axis=1, dtype=np.float64) - descending
    num_kept = np.maximum((before < wanted[:, None]).sum(axis=1), 1)
    last: NDArray[np.float32] = descending[np.arange(len(descending)), num_kept - 1]
    return last
