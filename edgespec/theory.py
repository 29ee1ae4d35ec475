"""The arithmetic of speculative decoding: what acceptance and cost make of a draft length, in closed form.

Knows arrays and numbers; nothing of models. gamma is the number of drafted tokens a round, alpha the probability that
one is accepted, all alike and independent (the paper's assumption), c the cost of a draft pass over a target pass.
Source: Leviathan et al. 2023; Daliri et al. 2025 for shared noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


def total_variation(p: ArrayLike, q: ArrayLike) -> Floats:
    """Half the summed difference of distributions along the last axis: shape (...,)."""
    difference: Floats = np.abs(np.asarray(p, np.float64) - np.asarray(q, np.float64))
    return np.asarray(difference.sum(axis=-1) / 2)


def acceptance(p: ArrayLike, q: ArrayLike) -> Floats:
    """Probability that a token drawn from q is accepted, sum(min(p, q)) = 1 - TV(p, q): corollary 3.6.

    Args:
        p, q: the target's and the draft's distributions, shape (..., vocab).
    Returns:
        Shape (...,).
    """
    return np.asarray(np.minimum(np.asarray(p, np.float64), np.asarray(q, np.float64)).sum(axis=-1))


def coupled_overlap(p: ArrayLike, q: ArrayLike) -> Floats:
    """Probability that target and draft both choose x when they share Gumbel noise, for every x.

    x wins both races exactly if it wins the one run at each rival's better relative weight, so it is
    1 / sum_y max(p(y) / p(x), q(y) / q(x)). Sorted by p / q, the sum is one of p above x and one of q below.

    Args:
        p, q: distributions, shape (vocab,).
    Returns:
        Shape (vocab,); its sum is the acceptance, at least alpha / (2 - alpha).
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    overlap = np.zeros(len(p))
    (both,) = np.nonzero((p > 0) & (q > 0))
    order = both[np.argsort(-p[both] / q[both], kind="stable")]
    above = p[q == 0].sum() + np.cumsum(p[order])  # at least as much on p's side as x, x included
    below = q[p == 0].sum() + np.cumsum(q[order][::-1])[::-1] - q[order]
    overlap[order] = 1 / (above / p[order] + below / q[order])
    return overlap


def coupled_acceptance(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that a drafted token is accepted when target and draft share Gumbel noise."""
    return float(coupled_overlap(p, q).sum())


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens that a target pass emits on average, (1 - alpha^(gamma+1)) / (1 - alpha): equation 1.

    Also the factor by which reads of the target's weights and cache become fewer.
    """
    if alpha == 1:
        return gamma + 1.0
    return (1 - math.pow(alpha, gamma + 1)) / (1 - alpha)


def num_tokens_distribution(alpha: float, gamma: int) -> Floats:
    """Probabilities of 1, 2, ..., gamma + 1 emitted tokens: shape (gamma + 1,). A capped geometric distribution."""
    runs = alpha ** np.arange(gamma + 1, dtype=np.float64)
    runs[:-1] *= 1 - alpha
    return runs


def speedup(alpha: float, gamma: float, cost_ratio: float) -> float:
    """Tokens per second over plain decoding, where a pass over gamma + 1 rows costs as much as one: theorem 3.8."""
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + 1)


def measured_speedup(alpha: float, gamma: int, pass_seconds: Callable[[int], float], draft_seconds: float) -> float:
    """Tokens per second over plain decoding, where a pass costs what it costs.

    Args:
        alpha: acceptance.
        gamma: tokens drafted a round.
        pass_seconds: seconds of a target pass over so many rows, v(m).
        draft_seconds: seconds per drafted token, d.
    """
    round_seconds = pass_seconds(gamma + 1) + gamma * draft_seconds
    return expected_tokens(alpha, gamma) * pass_seconds(1) / round_seconds


def best_gamma(gain: Callable[[int], float], max_gamma: int) -> int:
    """The draft length from 0 to `max_gamma` at which `gain` (a speed-up) is largest; the shortest of equals."""
    return max(range(max_gamma + 1), key=gain)


def optimal_gamma(alpha: float, cost_ratio: float) -> float:
    """The draft length at which `speedup` is largest if it need not be whole; 0 where drafting never pays.

    The derivative vanishes where alpha^(gamma+1) (c - ln(alpha) (gamma c + 1)) = c. The left side falls with gamma.
    """
    if alpha >= 1 or (cost_ratio == 0 and alpha > 0):
        return math.inf

    def slope(gamma: float) -> float:
        return math.pow(alpha, gamma + 1) * (cost_ratio - math.log(alpha) * (gamma * cost_ratio + 1)) - cost_ratio

    if alpha <= 0 or slope(0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while slope(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low


def guaranteed_speedup(alpha: float, cost_ratio: float) -> float:
    """What some draft length reaches if alpha > c, (1 + alpha) / (1 + c), namely one token: corollary 3.9."""
    return (1 + alpha) / (1 + cost_ratio)


def extra_operations(alpha: float, gamma: float, operations_ratio: float) -> float:
    """Arithmetic operations per token over plain decoding: theorem 3.11.

    Args:
        alpha: acceptance.
        gamma: tokens drafted a round.
        operations_ratio: operations of the draft over those of the target for a token.
    """
    return (gamma * operations_ratio + gamma + 1) / expected_tokens(alpha, gamma)
