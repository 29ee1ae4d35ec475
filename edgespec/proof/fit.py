"""Goodness of fit: observed counts against exact expectations. Knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.proof import chi2

LEAST_EXPECTED = 5.0

_Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of one or several G-tests together.

    Attributes:
        samples: that took part.
        statistic: G, with Williams' correction; chi-square distributed if the expectations are right.
        df: degrees of freedom; 0 where there was nothing to test.
        expected, observed: counts of the pooled cells, shape (cells,).
    """

    samples: int = 0
    statistic: float = 0.0
    df: int = 0
    expected: _Counts = field(default_factory=lambda: np.empty(0), repr=False)
    observed: _Counts = field(default_factory=lambda: np.empty(0), repr=False)

    def __add__(self, other: Fit) -> Fit:
        """Both, as one test: sums of independent chi-square variables are chi-square distributed."""
        return Fit(
            self.samples + other.samples,
            self.statistic + other.statistic,
            self.df + other.df,
            np.concatenate([self.expected, other.expected]),
            np.concatenate([self.observed, other.observed]),
        )

    @property
    def p_value(self) -> float | None:
        """Probability of a statistic this large if the expectations are right."""
        return chi2.sf(self.statistic, self.df) if self.df else None

    @property
    def distance(self) -> float | None:
        """Total variation between observed and expected frequencies; chance alone makes it positive."""
        return float(np.abs(self.observed - self.expected).sum() / 2 / self.samples) if self.df else None


def g_test(probabilities: NDArray[np.floating], counts: NDArray[np.integer]) -> Fit:
    """Test counts against one multinomial law.

    Args:
        probabilities: of the cells, shape (cells,), summing to 1.
        counts: shape (cells,).
    Returns:
        An empty fit if fewer than two cells are expected often enough.
    """
    samples = int(counts.sum())
    expected, observed = _pool(probabilities.astype(np.float64) * samples, counts.astype(np.float64))
    if len(expected) < 2:
        return Fit()
    happened = observed > 0
    g = 2 * (observed[happened] * np.log(observed[happened] / expected[happened])).sum()
    df = len(expected) - 1
    williams = 1 + ((samples / expected).sum() - 1) / (6 * samples * df)
    return Fit(samples, max(float(g / williams), 0.0), df, expected, observed)


def _pool(expected: _Counts, observed: _Counts) -> tuple[_Counts, _Counts]:
    """Join the cells that are expected too rarely, if need be with the smallest of the others."""
    often = expected >= LEAST_EXPECTED
    rarely_expected, rarely_observed = expected[~often].sum(), observed[~often].sum()
    expected, observed = expected[often], observed[often]
    if rarely_expected >= LEAST_EXPECTED:
        return np.append(expected, rarely_expected), np.append(observed, rarely_observed)
    if len(expected):
        smallest = expected.argmin()
        expected[smallest] += rarely_expected
        observed[smallest] += rarely_observed
    return expected, observed


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance that any true hypothesis falls below x is x."""
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(p) for p in adjusted]
