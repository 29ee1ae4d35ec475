"""Rows of logits -> shaped distributions -> a token. Vectorised over rows; knows nothing of drafts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.params import SamplingParams

# Relative to the most probable token of a row: candidates for top-k and top-p are taken above the first of these
# floors that leaves enough of them, so that what is sorted is a few dozen tokens and not the vocabulary.
_FLOORS = (1e-3, 1e-6, 0.0)


def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """The token at quantile `uniform` of `weights`: inverse transform sampling.

    Args:
        weights: shape (vocab,), not negative, with a positive sum (need not be 1).
        uniform: from [0, 1).
    """
    heights = np.cumsum(weights, dtype=np.float64)
    # Strictly below the total even after rounding, so that the token found has a weight.
    target = min(uniform * heights[-1], np.nextafter(heights[-1], 0))
    return int(np.searchsorted(heights, target, side="right"))


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
        logits /= np.float32(params.temperature)
    weights = np.exp(logits, out=logits)  # the most probable token of each row weighs 1
    if params.top_k or params.top_p < 1 or params.min_p > 0:
        _cut(weights, params)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _cut(weights: NDArray[np.float32], params: SamplingParams) -> None:
    """Set to 0 what top-k, top-p and min-p remove."""
    totals = weights.sum(axis=1, dtype=np.float64)
    for floor in _FLOORS:
        cells = np.flatnonzero(weights > floor)
        kept = _kept_cells(cells, weights, totals, params, is_complete=floor == 0)
        if kept is not None:
            break
    assert kept is not None
    values = weights.ravel()[kept]
    weights.fill(0)
    weights.ravel()[kept] = values


def _kept_cells(
    cells: NDArray[np.intp],
    weights: NDArray[np.float32],
    totals: NDArray[np.float64],
    params: SamplingParams,
    is_complete: bool,
) -> NDArray[np.intp] | None:
    """Those of the candidate `cells` (flat indices, whole rows in order) that stay.

    `None` where more candidates are needed to tell, which cannot be when they are complete.
    """
    num_rows, vocab = weights.shape
    rows = cells // vocab
    values = weights.ravel()[cells]
    order = np.lexsort((-values, rows))
    cells, values = cells[order], values[order].astype(np.float64)
    starts = np.searchsorted(rows, np.arange(num_rows))  # rows are sorted before and after
    ends = np.append(starts[1:], len(cells))
    keep = values >= params.min_p
    if params.top_k:
        if not is_complete and (ends - starts < params.top_k).any():
            return None
        # Ties with the k-th stay, as in transformers.
        last = np.minimum(starts + params.top_k, ends) - 1
        keep &= values >= values[last][rows]
        totals = np.add.reduceat(np.where(values >= values[last][rows], values, 0), starts)
    if params.top_p < 1:
        heights = np.cumsum(values)
        heights -= (heights[starts] - values[starts])[rows]  # within the row
        if not is_complete and (heights[ends - 1] < params.top_p * totals).any():
            return None
        keep &= heights - values < params.top_p * totals[rows]
    return cells[keep]
