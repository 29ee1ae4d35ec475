"""Randomness as a function of (seed, position, purpose). Knows no models and keeps no state.

A draw is addressed, not consumed: which drafter ran, or how often something was retried, cannot shift the numbers
that another decision sees. Philox is a counter-based generator (Salmon et al. 2011), so an address is a counter.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent."""

    DRAFT = 1  # drawing the drafted tokens of a round
    ACCEPT = 2  # accepting or rejecting them
    EMIT = 3  # the corrected or bonus token that ends the round


class Noise:
    """The uniforms of one answer.

    A round starts at the number of committed tokens, which grows by at least one each round: numbers addressed by
    the start of the round are therefore never seen twice, even when the depth of a round is chosen after looking
    at the drafts of the last one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed

    def uniforms(self, start: int, purpose: Purpose, count: int) -> NDArray[np.float64]:
        """`count` independent draws from [0, 1) for the round that starts at position `start`."""
        bits = np.random.Philox(key=self.seed, counter=[0, 0, start, int(purpose)])
        return np.random.Generator(bits).random(count)
