"""Randomness as a function of its address."""

from __future__ import annotations

import numpy as np
from scipy import stats

from edgespec.noise import Noise, Purpose


def test_a_draw_depends_on_its_address_alone() -> None:
    """The same seed, position and purpose give the same numbers, whatever was drawn before."""
    noise, other = Noise(5), Noise(5)
    other.uniforms(3, Purpose.DRAFT, 100)
    assert np.array_equal(noise.uniforms(10, Purpose.ACCEPT, 4), other.uniforms(10, Purpose.ACCEPT, 4))


def test_an_address_is_a_counter_of_philox() -> None:
    """In any order, and whatever was left over from the draw before, the numbers are those of a fresh generator."""
    noise = Noise(9)
    for start, purpose, count in ((4, 1, 3), (0, 3, 1), (2**40, 2, 5), (4, 1, 7), (0, 3, 2)):
        fresh = np.random.Generator(np.random.Philox(key=9, counter=[0, 0, start, purpose])).random(count)
        assert np.array_equal(noise.uniforms(start, Purpose(purpose), count), fresh)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    """Asking for more numbers does not change the first ones."""
    assert np.array_equal(Noise(1).uniforms(7, Purpose.DRAFT, 9)[:4], Noise(1).uniforms(7, Purpose.DRAFT, 4))


def test_seed_position_and_purpose_all_matter() -> None:
    """No two addresses share a number."""
    draws = [
        Noise(seed).uniforms(start, purpose, 8)
        for seed in (0, 1, 2**64 - 1)
        for start in (0, 1, 2)
        for purpose in Purpose
    ]
    assert len(np.unique(np.concatenate(draws))) == 8 * len(draws)


def test_neighbouring_addresses_look_independent() -> None:
    """Numbers over positions and purposes are uniform and uncorrelated."""
    noise = Noise(11)
    draft = np.array([noise.uniforms(i, Purpose.DRAFT, 1)[0] for i in range(4000)])
    accept = np.array([noise.uniforms(i, Purpose.ACCEPT, 1)[0] for i in range(4000)])
    assert stats.kstest(draft, "uniform").pvalue > 1e-4
    assert stats.pearsonr(draft, accept).pvalue > 1e-4
    assert stats.pearsonr(draft[1:], draft[:-1]).pvalue > 1e-4


def test_without_a_seed_answers_differ() -> None:
    """A fresh seed comes from the operating system."""
    assert Noise().seed != Noise().seed
