"""The statistics of the losslessness test, against scipy and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edgespec.proof import chi2
from edgespec.proof.fit import g_test, holm

DEGREES = (1, 2, 7, 30, 400, 3000)


@pytest.mark.parametrize("df", DEGREES)
def test_chi_square_tail(df: int) -> None:
    """Against scipy, from far below the mean to far above it; and its inverse."""
    for x in (0, 0.01, 0.5, df * 0.5, df, df * 1.5, df * 3 + 20):
        assert chi2.sf(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-8, abs=1e-300)
    for probability in (0.9, 0.05, 1e-6):
        assert chi2.isf(probability, df) == pytest.approx(stats.chi2.isf(probability, df))


@pytest.mark.parametrize("df", DEGREES)
@pytest.mark.parametrize("noncentrality", [0, 0.3, 5, 60, 500])
def test_noncentral_chi_square_tail(df: int, noncentrality: float) -> None:
    """Against scipy."""
    for x in (df * 0.5, df + noncentrality, df + 3 * noncentrality + 5):
        expected = stats.ncx2.sf(x, df, noncentrality) if noncentrality else stats.chi2.sf(x, df)
        assert chi2.noncentral_sf(x, df, noncentrality) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "cells"), [(200, 4), (1000, 12), (5000, 60)])
def test_the_stated_power_is_true(n: int, cells: int) -> None:
    """A distortion of the stated size, of the kind hardest to find, is found in 99 of 100 runs; half of it is not."""
    level, runs = 1e-4, 2000
    p = np.full(cells, 1 / cells)
    size = chi2.detectable_tv(n, cells - 1, level, 0.99)
    rng = np.random.default_rng(n)

    def found(tv: float) -> float:
        wrong = p * (1 + 2 * tv * np.where(np.arange(cells) % 2 == 0, 1, -1))
        assert np.abs(wrong - p).sum() / 2 == pytest.approx(tv)
        fits = [g_test(p, counts) for counts in rng.multinomial(n, wrong, runs)]
        return float(np.mean([fit.p_value < level for fit in fits]))

    assert found(size) > 0.98
    assert found(size / 2) < 0.7


def test_other_distortions_of_that_size_are_found_more_often() -> None:
    """Moving the mass of one rare token is easier to see than shifting everything a little."""
    n, level = 1000, 1e-4
    p = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    size = min(chi2.detectable_tv(n, 4, level, 0.99), 0.04)
    wrong = p + np.array([size, 0, 0, 0, -size])
    fits = [g_test(p, counts) for counts in np.random.default_rng(0).multinomial(n, wrong, 500)]
    assert np.mean([fit.p_value < level for fit in fits]) > 0.99


def test_p_values_of_right_counts_are_uniform() -> None:
    """Also where many cells are rare and are pooled: no more small p-values than there should be."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(80, 0.3))
    p_values = np.array([g_test(p, counts).p_value for counts in rng.multinomial(600, p, 3000)])
    for level in (0.5, 0.05, 0.01):
        assert stats.binomtest(int((p_values < level).sum()), 3000, level).pvalue > 1e-4
    assert (p_values < 0.001).mean() < 0.003


def test_cells_are_pooled_until_each_is_expected_five_times() -> None:
    """Rare cells become one; if that is still rare, it joins the smallest of the others. Totals stay."""
    fit = g_test(np.array([0.5, 0.02, 0.3, 0.15, 0.03]), np.array([50, 3, 31, 14, 2]))
    assert fit.expected.tolist() == pytest.approx([50, 30, 15, 5])
    assert fit.observed.tolist() == [50, 31, 14, 5]
    assert fit.df == 3
    fit = g_test(np.array([0.5, 0.01, 0.3, 0.19]), np.array([50, 3, 31, 16]))
    assert fit.expected.tolist() == pytest.approx([50, 30, 20])
    assert fit.observed.tolist() == [50, 31, 19]


def test_too_few_samples_test_nothing() -> None:
    """No cell, or only one, is expected often enough: no p-value, and adding it changes nothing."""
    empty = g_test(np.array([0.99, 0.01]), np.array([20, 0]))
    assert (empty.p_value, empty.df, empty.samples, empty.distance) == (None, 0, 0, None)
    assert g_test(np.array([0.5, 0.5]), np.array([0, 0])).p_value is None
    fit = g_test(np.array([0.5, 0.5]), np.array([60, 40]))
    assert (fit + empty).p_value == fit.p_value


def test_the_statistic() -> None:
    """G with Williams' correction (Sokal and Rohlf's example form), and the distance."""
    counts, p = np.array([60, 40]), np.array([0.5, 0.5])
    fit = g_test(p, counts)
    g = 2 * (60 * np.log(1.2) + 40 * np.log(0.8))
    assert fit.statistic == pytest.approx(g / (1 + (4 - 1) / (6 * 100)))
    assert stats.power_divergence(counts, p * 100, lambda_="log-likelihood").statistic == pytest.approx(g)
    assert fit.distance == pytest.approx(0.1)


def test_fits_add_up() -> None:
    """Two tests together have the sum of the statistics and of the degrees of freedom."""
    one, other = g_test(np.array([0.5, 0.5]), np.array([60, 40])), g_test(np.full(3, 1 / 3), np.array([10, 20, 30]))
    both = one + other
    assert (both.samples, both.df) == (160, 3)
    assert both.p_value == pytest.approx(stats.chi2.sf(one.statistic + other.statistic, 3))
    assert both.distance == pytest.approx((10 * 2 / 2 + 10 * 2 / 2) / 160)


def test_holm() -> None:
    """By hand: the smallest times the number of tests, the next times one less, never falling, at most 1."""
    assert holm([0.04, 0.01, 0.03, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []
