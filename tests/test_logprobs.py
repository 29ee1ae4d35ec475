"""Log-probabilities against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from edgespec.logprobs import token_logprobs


@pytest.mark.parametrize("count", [0, 1, 5, 40])
@pytest.mark.parametrize("scale", [1, 100, 1e4])
def test_they_are_the_log_softmax(count: int, scale: float) -> None:
    """Of the token and of the most probable ones, best first; never more than there are."""
    logits = (np.random.default_rng(0).standard_normal((6, 30)) * scale).astype(np.float32)
    before = logits.copy()
    tokens = [0, 29, 3, 3, 7, 11]
    found = token_logprobs(logits, tokens, count)
    expected = log_softmax(logits.astype(np.float64), axis=1)
    assert [f.token for f in found] == tokens
    np.testing.assert_allclose([f.logprob for f in found], expected[range(6), tokens], rtol=1e-5, atol=1e-5)
    for f, row in zip(found, expected, strict=True):
        best = np.argsort(-row)[:count]
        assert [token for token, _ in f.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in f.top], row[best], rtol=1e-5, atol=1e-5)
    assert np.array_equal(logits, before)


def test_ties_are_listed_by_token() -> None:
    """Equal tokens have one order."""
    (found,) = token_logprobs(np.zeros((1, 4), np.float32), [2], 4)
    assert [token for token, _ in found.top] == [0, 1, 2, 3]
    assert found.logprob == pytest.approx(-np.log(4))
