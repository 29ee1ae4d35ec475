"""Chi-square probabilities with the standard library and NumPy. Knows nothing of what is tested."""

from __future__ import annotations

import math

import numpy as np


def sf(x: float, df: float) -> float:
    """P(X > x) of a chi-square variable with `df` degrees of freedom: the regularised gamma function Q(df/2, x/2)."""
    return _upper_gamma(df / 2, x / 2)


def isf(probability: float, df: float) -> float:
    """The x with P(X > x) = `probability`, by bisection."""
    low, high = 0.0, df + 10.0
    while sf(high, df) > probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sf(middle, df) > probability else (low, middle)
    return high


def noncentral_sf(x: float, df: float, noncentrality: float) -> float:
    """P(X > x) where the tested hypothesis is wrong: central ones with df + 2j degrees, mixed by a Poisson law of j."""
    mean, y = noncentrality / 2, x / 2
    if mean == 0:
        return sf(x, df)
    count = int(mean + 12 * math.sqrt(mean) + 40)
    weights = [math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(count)]
    # Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1)
    steps = [math.exp((df / 2 + j) * math.log(y) - y - math.lgamma(df / 2 + j + 1)) for j in range(count - 1)]
    tails = np.minimum(sf(x, df) + np.concatenate([[0.0], np.cumsum(steps)]), 1)
    return float(np.dot(weights, tails))


def detectable_tv(n: int, df: int, level: float, power: float) -> float:
    """The total variation that a goodness-of-fit test of `n` samples finds with probability `power`.

    Of all distortions of a given total variation x, the hardest to find moves x from one half of the mass evenly to
    the other, which makes the statistic noncentral by n sum(d^2 / p) = 4 n x^2; any other is found more often.

    Args:
        n: samples.
        df: degrees of freedom, at least 1.
        level: p-value below which the test fails.
        power: probability of finding it.
    Returns:
        At most 1, where nothing smaller would do.
    """
    threshold = isf(level, df)
    low, high = 0.0, 4.0 * n
    if noncentral_sf(threshold, df, high) < power:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if noncentral_sf(threshold, df, middle) < power else (low, middle)
    return math.sqrt(high / (4 * n))


def _upper_gamma(a: float, x: float) -> float:
    """Q(a, x), from the series of 1 - Q below the mean and from the continued fraction above it."""
    if x <= 0:
        return 1.0
    factor = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1 - factor * _series(a, x) if x < a + 1 else factor * _fraction(a, x)


def _series(a: float, x: float) -> float:
    """sum x^n / (a (a+1) ... (a+n)), n from 0."""
    term = total = 1 / a
    while term > total * 1e-16:
        a += 1
        term *= x / a
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    """1/(x+1-a- 1(1-a)/(x+3-a- 2(2-a)/(x+5-a- ...))), by Lentz's method."""
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    value = d
    for i in range(1, 10**5):
        factor = -i * (i - a)
        b += 2
        d = 1 / _nonzero(factor * d + b, tiny)
        c = _nonzero(b + factor / c, tiny)
        value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _nonzero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
