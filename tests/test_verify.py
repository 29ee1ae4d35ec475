"""The rule, against exact enumeration and by statistics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from edgespec.noise import Noise
from edgespec.verify import Draft, residual, verify_greedy, verify_rejection


def distributions(seed: int, rows: int, vocab: int = 4) -> np.ndarray:
    """Random distributions with some zeros."""
    rng = np.random.default_rng(seed)
    weights = rng.random((rows, vocab)) * (rng.random((rows, vocab)) > 0.3)
    weights[:, 0] += 0.05
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def emitted_distribution(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What one checked token is distributed as, exactly: accepted, or drawn from `residual` after a rejection."""
    emitted = np.zeros(len(p))
    for x in np.flatnonzero(q):
        accept = min(1.0, float(p[x]) / float(q[x]))
        emitted[x] += q[x] * accept
        rest = residual(p, Draft(np.array([x]), q[None]), 0).astype(np.float64)
        emitted += q[x] * (1 - accept) * rest / rest.sum()
    return emitted


@pytest.mark.parametrize("seed", range(50))
def test_accepting_and_correcting_together_give_p(seed: int) -> None:
    """Summed over every draft and both routes, the emitted token is distributed as p to 1e-6."""
    p, q = distributions(seed, 1, 7)[0], distributions(seed + 1000, 1, 7)[0]
    assert np.abs(emitted_distribution(p, q) - p).max() < 1e-6


def test_a_deterministic_draft_is_a_one_hot_q() -> None:
    """Without distributions the rule equals the one with q one-hot, draw for draw."""
    probs = distributions(3, 4)
    tokens = np.array([0, 1, 2])
    one_hot = np.eye(4, dtype=np.float32)[tokens]
    for seed in range(300):
        verdict = verify_rejection(probs, Draft(tokens), Noise(seed), 10)
        assert verdict == verify_rejection(probs, Draft(tokens, one_hot), Noise(seed), 10)


def test_whole_rounds_are_distributed_as_the_target() -> None:
    """Over many rounds the emitted pair of tokens follows p, although the draft disagrees with it.

    The model is Markov: the row after token t is `p[t]`, the draft's is `q[t]`. A round of two drafted tokens, and
    a second where the first emitted only one token, must give pairs with probability p[s, a] * p[a, b].
    """
    vocab, start, trials = 3, 0, 6000
    p, q = distributions(5, vocab, vocab), distributions(6, vocab, vocab)
    rng = np.random.default_rng(0)
    counts = np.zeros((vocab, vocab))
    for trial in range(trials):
        noise, tokens = Noise(trial), [start]
        while len(tokens) < 3:
            counts_from = len(tokens)
            a = rng.choice(vocab, p=exact(q[tokens[-1]]))
            b = rng.choice(vocab, p=exact(q[a]))
            draft = Draft(np.array([a, b]), np.stack([q[tokens[-1]], q[a]]))
            verdict = verify_rejection(np.stack([p[tokens[-1]], p[a], p[b]]), draft, noise, counts_from)
            tokens += [*draft.tokens[: verdict.accepted].tolist(), verdict.token]
        counts[tokens[1], tokens[2]] += 1
    expected = np.array([exact(p[start])[a] * exact(p[a])[b] for a, b in itertools.product(range(vocab), repeat=2)])
    possible = expected > 0
    assert counts.ravel()[~possible].sum() == 0
    assert stats.chisquare(counts.ravel()[possible], expected[possible] * trials).pvalue > 1e-4


def exact(row: np.ndarray) -> np.ndarray:
    """float64, summing to 1."""
    return row.astype(np.float64) / row.astype(np.float64).sum()


def test_acceptance_rate_is_the_common_mass() -> None:
    """The first drafted token is accepted with probability sum(min(p, q)) (Leviathan et al., corollary 3.6)."""
    p, q = distributions(8, 2, 6), distributions(9, 1, 6)
    rng = np.random.default_rng(1)
    draws = rng.choice(6, size=8000, p=exact(q[0]))
    accepted = sum(verify_rejection(p, Draft(np.array([x]), q), Noise(i), 4).accepted for i, x in enumerate(draws))
    alpha = np.minimum(p[0], q[0]).sum()
    assert stats.binomtest(accepted, 8000, float(alpha)).pvalue > 1e-4


def test_certain_outcomes() -> None:
    """p == q accepts everything; disjoint p and q accept nothing and emit from p."""
    p = distributions(2, 3)
    draft = Draft(np.array([int(p[0].argmax()), int(p[1].argmax())]), p[:2])
    far = np.array([[0, 0, 0.5, 0.5]] * 3, np.float32)
    near = Draft(np.array([0, 1]), np.array([[0.5, 0.5, 0, 0]] * 2, np.float32))
    for seed in range(200):
        assert verify_rejection(p, draft, Noise(seed), 0).accepted == 2
        verdict = verify_rejection(far, near, Noise(seed), 0)
        assert verdict.accepted == 0
        assert verdict.token in (2, 3)


def test_a_q_over_some_tokens_is_one_with_zeros() -> None:
    """Columns that are not there count as 0: the same verdicts, draw for draw, and the same residual."""
    rng = np.random.default_rng(4)
    for seed in range(300):
        probs, ids = distributions(seed, 4, 9), np.array([1, 2, 4, 7])
        short = rng.dirichlet(np.ones(4), 3).astype(np.float32)
        wide = np.zeros((3, 9), np.float32)
        wide[:, ids] = short
        tokens = rng.choice(ids, 3)
        few, all_of_it = Draft(tokens, short, ids=ids), Draft(tokens, wide)
        assert verify_rejection(probs, few, Noise(seed), 5) == verify_rejection(probs, all_of_it, Noise(seed), 5)
        assert np.array_equal(residual(probs[1], few, 1), residual(probs[1], all_of_it, 1))


def test_rows_behind_a_rejection_are_not_looked_at() -> None:
    """Neither by the greedy rule nor by the sampled one: they may not even be there."""
    p = np.array([[0.5, 0.5, 0.0, 0.0]], np.float32)
    draft = Draft(np.array([2, 1, 0]))
    assert verify_rejection(p, draft, Noise(0), 3).accepted == 0
    assert verify_greedy(p, draft).accepted == 0


def test_an_empty_draft_samples_from_p() -> None:
    """Draft length 0 is plain sampling."""
    p = distributions(4, 1, 5)
    empty = Draft(np.empty(0, np.int64))
    counts = np.bincount([verify_rejection(p, empty, Noise(s), 1).token for s in range(5000)], minlength=5)
    support = p[0] > 0
    assert counts[~support].sum() == 0
    assert stats.chisquare(counts[support], exact(p[0])[support] * 5000).pvalue > 1e-4


@pytest.mark.parametrize(
    ("draft", "accepted", "token"),
    [([], 0, 3), ([3, 1, 0], 3, 2), ([3, 1, 1], 2, 0), ([0, 1, 0], 0, 3), ([3, 2, 0], 1, 1)],
)
def test_greedy_accepts_the_leading_run_of_arg_maxes(draft: list[int], accepted: int, token: int) -> None:
    """The first difference ends the run, later agreements do not count, and the target's token takes its place."""
    best = [3, 1, 0, 2][: len(draft) + 1]
    logits = np.eye(4, dtype=np.float32)[best]
    verdict = verify_greedy(logits, Draft(np.array(draft, np.int64)))
    assert (verdict.accepted, verdict.token) == (accepted, token)
