"""Shaping and drawing, against straightforward implementations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from edgespec.params import SamplingParams
from edgespec.sampling import draw, shape


def naive_shape(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row by the definitions: sort everything, float64."""
    probs = special.softmax(logits.astype(np.float64) / params.temperature)
    if params.top_k:
        probs[probs < np.sort(probs)[::-1][min(params.top_k, len(probs)) - 1]] = 0
        probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


SETTINGS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-300),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_k=50),
    SamplingParams(temperature=1, top_k=10**6),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1, top_p=1e-9),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1, min_p=0.2),
    SamplingParams(temperature=1, min_p=1),
    SamplingParams(temperature=5, top_p=0.999),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 3, 40])
def test_shape_equals_the_definition(params: SamplingParams, scale: float) -> None:
    """Every row, flat or peaked, comes out as by sorting the whole vocabulary in double precision."""
    logits = (np.random.default_rng(0).standard_normal((5, 3000)) * scale).astype(np.float32)
    expected = np.stack([naive_shape(row, params) for row in logits])
    probs = shape(logits.copy(), params)
    # A token at the edge of the nucleus may fall on either side by rounding: at most one a row.
    differs = (probs == 0) != (expected == 0)
    assert (differs & (expected > 1e-20)).sum(axis=1).max() <= (1 if params.top_p < 1 else 0)
    assert np.abs(probs - expected).max() < 2e-3 * expected.max()
    assert np.abs(probs.sum(axis=1) - 1).max() < 1e-5


def test_shaping_rows_together_equals_one_by_one() -> None:
    """A row's distribution does not depend on its neighbours, peaked next to flat."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((6, 2000)) * np.array([[0.01], [1], [5], [20], [0.1], [3]])).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_k=300, top_p=0.9, min_p=0.001)
    together = shape(logits.copy(), params)
    for i in range(6):
        assert np.allclose(shape(logits[i : i + 1].copy(), params)[0], together[i], rtol=1e-5, atol=1e-9)


def test_ties_at_the_kth_place_stay() -> None:
    """Top-k keeps every token as probable as the k-th."""
    logits = np.array([[1, 3, 2, 2, 2, 0]], np.float32)
    assert (shape(logits, SamplingParams(temperature=1, top_k=2))[0] > 0).tolist() == [0, 1, 1, 1, 1, 0]


def test_banned_tokens_stay_banned() -> None:
    """Minus infinity has probability 0 under every setting."""
    logits = np.array([[0, -np.inf, 0, -np.inf]], np.float32)
    for params in SETTINGS:
        probs = shape(logits.copy(), params)[0]
        assert probs[[1, 3]].tolist() == [0, 0]
        assert probs.sum() == pytest.approx(1)


def test_draw_follows_the_weights() -> None:
    """Evenly spread quantiles give each token its share, unnormalised weights included."""
    weights = np.array([0, 2, 0, 1, 5, 0], np.float32)
    uniforms = (np.arange(8000) + 0.5) / 8000
    counts = np.bincount([draw(weights, u) for u in uniforms], minlength=6)
    assert counts.tolist() == [0, 2000, 0, 1000, 5000, 0]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_draw_never_gives_a_token_without_weight(uniform: float) -> None:
    """The ends of the unit interval fall on tokens that can be drawn."""
    for weights in ([0, 0, 1e-30, 0], [0, 1, 0], [1e-8, 1, 1e-8, 0], [0, 3e38, 1e-38, 0, 0]):
        array = np.array(weights, np.float32)
        assert array[draw(array, uniform)] > 0


def test_sampled_tokens_are_distributed_as_shaped() -> None:
    """Softmax at temperature 0.7 with top-p 0.8, by chi-square over 20,000 draws."""
    logits = np.random.default_rng(2).standard_normal((1, 30)).astype(np.float32) * 2
    params = SamplingParams(temperature=0.7, top_p=0.8)
    expected = naive_shape(logits[0], params)
    probs = shape(logits.copy(), params)[0]
    draws = [draw(probs, u) for u in np.random.default_rng(3).random(20_000)]
    counts = np.bincount(draws, minlength=30)
    support = expected > 0
    assert counts[~support].sum() == 0
    assert stats.chisquare(counts[support], expected[support] * 20_000).pvalue > 1e-4
