"""The closed forms, against published figures, scipy and runs of the loop."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from edgespec import theory
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter
from edgespec.params import SamplingParams, Verifier
from edgespec.sampling import shape
from edgespec.stats import GenerationStats
from edgespec.testing import TableScorer

P, Q = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.3, 0.4, 0.1])


def softmax(logits: list[float], temperature: float) -> np.ndarray:
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    return shape(np.array([logits], np.float32), SamplingParams(temperature=temperature))[0]


@pytest.mark.parametrize(("temperature", "alpha"), [(0, 1.00), (0.5, 0.97), (1, 0.94)])
def test_acceptance_of_two_tokens(temperature: float, alpha: float) -> None:
    """Target logits 2, 0 and draft logits 1.5, 0: the common mass, which is 1 - TV."""
    p, q = softmax([2, 0], temperature), softmax([1.5, 0], temperature)
    assert theory.acceptance(p, q) == pytest.approx(alpha, abs=0.005)
    assert theory.acceptance(p, q) == pytest.approx(1 - theory.total_variation(p, q), abs=1e-6)


def test_acceptance_is_taken_row_by_row() -> None:
    """The last axis is the vocabulary."""
    rows = theory.acceptance(np.stack([P, P, Q]), np.stack([Q, P, Q]))
    assert rows == pytest.approx([0.7, 1, 1])


@pytest.mark.parametrize(("alpha", "gamma", "factor"), [(0.8, 6, 2.47), (0.6, 3, 1.67), (0.4, None, 1.30)])
def test_best_draft_length(alpha: float, gamma: int | None, factor: float) -> None:
    """At c = 0.1: six tokens at acceptance 0.8, three at 0.6."""
    best = theory.best_gamma(lambda n: theory.speedup(alpha, n, 0.1), 20)
    assert gamma in (best, None)
    assert theory.speedup(alpha, best, 0.1) == pytest.approx(factor, abs=0.005)


def test_the_optimum_is_flat() -> None:
    """At acceptance 0.8 and c = 0.1, four to eight tokens are within 3 % of the best; three and nine are not."""
    within = [n for n in range(1, 16) if theory.speedup(0.8, n, 0.1) > 0.97 * theory.speedup(0.8, 6, 0.1)]
    assert within == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.25])
def test_continuous_optimum(alpha: float, cost: float) -> None:
    """Where a numeric search finds the maximum."""
    found = optimize.minimize_scalar(lambda g: -theory.speedup(alpha, g, cost), bounds=(0, 200), method="bounded")
    assert theory.optimal_gamma(alpha, cost) == pytest.approx(found.x, abs=1e-3)


def test_continuous_optimum_at_the_edges() -> None:
    """5.76 tokens at acceptance 0.8 and c = 0.1; none where drafting costs more than it saves; no end if it is free."""
    assert theory.optimal_gamma(0.8, 0.1) == pytest.approx(5.76, abs=0.01)
    assert theory.optimal_gamma(0.2, 0.9) == 0
    assert theory.optimal_gamma(0, 0.1) == 0
    assert theory.optimal_gamma(0.5, 0) == theory.optimal_gamma(1, 0.3) == np.inf


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.8, 1])
def test_one_token_reaches_the_bound(alpha: float) -> None:
    """If alpha > c then some length, namely 1, gives (1 + alpha) / (1 + c), which is above 1."""
    for cost in (0.0, 0.04, 0.2, 0.7):
        bound = theory.guaranteed_speedup(alpha, cost)
        assert theory.speedup(alpha, 1, cost) == pytest.approx(bound)
        assert (bound > 1) == (alpha > cost)


def test_expected_tokens_is_the_mean_of_its_distribution() -> None:
    """Also at acceptance 0 and 1."""
    for alpha in (0, 0.35, 0.9, 1):
        chances = theory.num_tokens_distribution(alpha, 5)
        assert chances.sum() == pytest.approx(1)
        assert chances @ np.arange(1, 7) == pytest.approx(theory.expected_tokens(alpha, 5))


def test_extra_operations() -> None:
    """The paper's form; a perfect draft of no cost adds none."""
    for alpha, gamma, ratio in ((0.8, 5, 0.05), (0.6, 2, 0.3)):
        paper = (1 - alpha) * (gamma * ratio + gamma + 1) / (1 - alpha ** (gamma + 1))
        assert theory.extra_operations(alpha, gamma, ratio) == pytest.approx(paper)
    assert theory.extra_operations(1, 4, 0) == 1


def test_measured_costs() -> None:
    """With a pass as dear as any other it is the ideal; each row that costs lowers the best length."""
    ideal = [theory.measured_speedup(0.8, n, lambda rows: 2.0, 0.2) for n in range(12)]
    assert ideal == pytest.approx([theory.speedup(0.8, n, 0.1) for n in range(12)])
    by_rows = {1: 6.3, 2: 6.6, 3: 7.7, 5: 9.4}
    assert theory.measured_speedup(0.6, 2, by_rows.__getitem__, 4.3) == pytest.approx(1.96 * 6.3 / (7.7 + 8.6))
    best = [
        theory.best_gamma(lambda n, r=r: theory.measured_speedup(0.8, n, lambda m: 1 + r * (m - 1), 0.1), 20)
        for r in (0, 0.03, 0.1, 0.3)
    ]
    assert best == [6, 5, 4, 2]
    assert theory.best_gamma(lambda n: theory.speedup(0.1, n, 0.5), 12) == 0


def brute_force_overlap(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([1 / np.maximum(p / p[x], q / q[x]).sum() if p[x] and q[x] else 0 for x in range(len(p))])


def test_coupled_acceptance() -> None:
    """Against the definition, its bounds, and races that are really run."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(9, 0.4), 2) * (rng.random((2, 9)) > 0.2) + np.eye(9)[0] * 1e-3
        p, q = p / p.sum(), q / q.sum()
        assert theory.coupled_overlap(p, q) == pytest.approx(brute_force_overlap(p, q))
        alpha = theory.acceptance(p, q)
        assert alpha / (2 - alpha) - 1e-9 <= theory.coupled_acceptance(p, q) <= alpha + 1e-9
    exponentials = rng.exponential(size=(20000, 4))
    first, second = (exponentials / P).argmin(axis=1), (exponentials / Q).argmin(axis=1)
    counts = np.bincount(first[first == second], minlength=4)
    expected = theory.coupled_overlap(P, Q) * 20000
    observed = [*counts, 20000 - counts.sum()]
    assert stats.chisquare(observed, [*expected, 20000 - expected.sum()]).pvalue > 1e-4


@pytest.mark.parametrize("verifier", ["standard", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_the_loop_keeps_to_the_formulas(gamma: int, verifier: Verifier) -> None:
    """Tokens of a round and tokens per pass, where every drafted token is accepted with the same known probability."""
    alpha = float(theory.acceptance(P, Q)) if verifier == "standard" else theory.coupled_acceptance(P, Q)
    target, draft = (TableScorer(lambda context, row=row: np.log(row), 4) for row in (P, Q))
    loop = SpeculativeDecoder(
        target,
        ModelDrafter(draft, 4, is_coupled=verifier == "coupled"),
        num_draft_tokens=gamma,
        eos_token_ids=(),
        prefill_chunk=4,
        verifier=verifier,
    )
    counts = np.zeros(gamma + 1)
    for seed in range(12):
        params = SamplingParams(temperature=1, seed=seed, max_new_tokens=250)
        for step in loop.generate(np.zeros(1, np.int64), params, GenerationStats(), draft_first=True):
            if step.drafted == gamma and step.finish is None:
                counts[len(step.tokens) - 1] += 1
    expected = theory.num_tokens_distribution(alpha, gamma) * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    mean = counts @ np.arange(1, gamma + 2) / counts.sum()
    assert mean == pytest.approx(theory.expected_tokens(alpha, gamma), rel=0.05)
