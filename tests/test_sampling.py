"""Shaping and drawing, against straightforward implementations and against transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from edgespec.params import SamplingParams
from edgespec.sampling import draw, shape
from tests.naive import naive_shape

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
    SamplingParams(temperature=1, top_k=2000, min_p=0.01, typical_p=0.7),
    SamplingParams(temperature=5, top_p=0.999),
    SamplingParams(temperature=1, typical_p=0.5),
    SamplingParams(temperature=0.7, top_p=0.9, typical_p=0.95),
]


def short(params: SamplingParams) -> str:
    """The settings that are not the default, for the names of tests."""
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    return ",".join(f"{n}={getattr(params, n)}" for n in names if getattr(params, n) != getattr(SamplingParams(), n))


def check(probs: np.ndarray, expected: np.ndarray, edges: int) -> None:
    """Equal but for rounding; tokens at the edge of a mass may fall on either side, at most `edges` a row."""
    differs = (probs == 0) != (expected == 0)
    assert (differs & (np.maximum(probs, expected) > 1e-20)).sum(axis=1).max() <= edges
    assert np.abs(probs - expected).max() < 2e-3 * expected.max()
    assert np.abs(probs.sum(axis=1) - 1).max() < 1e-5


def num_edges(params: SamplingParams) -> int:
    return (params.top_p < 1) + (params.typical_p < 1)


@pytest.mark.parametrize("params", SETTINGS, ids=short)
@pytest.mark.parametrize("scale", [0.01, 3, 40])
def test_shape_equals_the_definition(params: SamplingParams, scale: float) -> None:
    """Every row, flat or peaked, comes out as by sorting the whole vocabulary in double precision."""
    logits = (np.random.default_rng(0).standard_normal((5, 3000)) * scale).astype(np.float32)
    expected = np.stack([naive_shape(row, params) for row in logits])
    check(shape(logits.copy(), params), expected, num_edges(params))


@pytest.mark.parametrize("params", [p for p in SETTINGS if p.top_p < 1 or p.typical_p < 1], ids=short)
def test_large_vocabularies_take_the_same_cuts(params: SamplingParams) -> None:
    """Where edges are looked for in a bracket, flat rows next to peaked ones, and rows of few distinct values."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((5, 60_001)) * np.array([[0.01], [1], [3], [10], [0.3]])).astype(np.float32)
    logits[4] = np.round(logits[4])
    logits[2, rng.integers(0, 60_001, 20_000)] = -np.inf
    expected = np.stack([naive_shape(row, params) for row in logits])
    probs = shape(logits.copy(), params)
    # Rounding of sums moves the edge by a millionth of the mass: some tokens where each has a millionth.
    assert ((probs == 0) != (expected == 0))[[0, 2, 3, 4]].sum(axis=1).max() <= 30
    assert np.abs(probs - expected).sum(axis=1).max() < 1e-3


def test_shaping_rows_together_equals_one_by_one() -> None:
    """A row's distribution does not depend on its neighbours, peaked next to flat."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((6, 2000)) * np.array([[0.01], [1], [5], [20], [0.1], [3]])).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_k=300, top_p=0.9, min_p=0.001)
    together = shape(logits.copy(), params)
    for i in range(6):
        assert np.allclose(shape(logits[i : i + 1].copy(), params)[0], together[i], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("params", SETTINGS, ids=short)
def test_cuts_equal_those_of_transformers(params: SamplingParams) -> None:
    """Random rows without ties, some tokens impossible: the same survivors with the same probabilities."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((60, 700)) * rng.choice([0.3, 2, 8], (60, 1))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    if params.temperature < 1e-30:
        params = replace(params, temperature=1e-6)  # divided by less, their logits overflow
    expected = by_transformers(logits, params)
    check(shape(logits.copy(), params), expected, num_edges(params))


def by_transformers(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The same settings through transformers' own list of warpers, in double precision."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=float(params.min_p),
        typical_p=params.typical_p,
    )
    warpers = transformers.GenerationMixin()._get_logits_processor(config)
    scores = warpers(torch.zeros((len(logits), 1), dtype=torch.int64), torch.tensor(logits, dtype=torch.float64))
    return scores.softmax(dim=1).numpy()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=5),
        SamplingParams(temperature=1, min_p=0.3),
        SamplingParams(temperature=1, typical_p=0.6),
        SamplingParams(temperature=1, top_k=30, min_p=0.1, typical_p=0.8),
    ],
    ids=short,
)
def test_ties_are_kept_as_in_transformers(params: SamplingParams) -> None:
    """Rows of a few distinct logits: tokens tied with the last one kept are kept, too, in both."""
    rng = np.random.default_rng(6)
    logits = (rng.integers(-4, 5, (200, 80)) / 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    check(shape(logits.copy(), params), by_transformers(logits, params), 0)


def test_ties_at_the_edge_of_a_nucleus() -> None:
    """All of them stay; transformers keeps as many as the mass needs, whichever its sort puts first."""
    rng = np.random.default_rng(7)
    logits = (rng.integers(-4, 5, (200, 80)) / 2).astype(np.float32)
    params = SamplingParams(temperature=1, top_p=0.7)
    ours, theirs = shape(logits.copy(), params) > 0, by_transformers(logits, params) > 0
    last = np.where(theirs, logits, np.inf).min(axis=1, keepdims=True)
    assert (ours == (logits >= last)).all()
    assert (ours | ~theirs).all()
    assert (ours != theirs).any()


def test_ties_at_the_kth_place_stay() -> None:
    """Top-k keeps every token as probable as the k-th."""
    logits = np.array([[1, 3, 2, 2, 2, 0]], np.float32)
    assert (shape(logits, SamplingParams(temperature=1, top_k=2))[0] > 0).tolist() == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("params", SETTINGS, ids=short)
def test_banned_tokens_stay_banned(params: SamplingParams) -> None:
    """Minus infinity has probability 0 under every setting; a row of nothing else becomes 0, its neighbours not."""
    logits = np.array([[0, -np.inf, 0, -np.inf], [-np.inf] * 4, [-np.inf, -3e38, -np.inf, -np.inf]], np.float32)
    probs = shape(logits.copy(), params)
    assert probs[0].tolist() == [0.5, 0, 0.5, 0]
    assert probs[1].tolist() == [0] * 4
    assert probs[2].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("params", [p for p in SETTINGS if p.typical_p == 1 and p.top_k < 10**6], ids=short)
def test_no_vocabulary_is_sorted(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat or peaked: what is sorted or partitioned is a tenth of a row at most."""
    for name in ("sort", "argsort", "partition"):

        def checked(array: np.ndarray, *args: object, function: object = getattr(np, name), **kw: object) -> object:
            assert array.shape[-1] <= 15_000, function
            return function(array, *args, **kw)

        monkeypatch.setattr(np, name, checked)
    rng = np.random.default_rng(8)
    normal = rng.standard_normal((3, 151_936))
    for scale in ([[1.0]], [[4.0]], [[0.01], [1], [9]]):
        shape((normal * scale).astype(np.float32), params)


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
