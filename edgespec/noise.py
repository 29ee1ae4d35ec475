"""Randomness as a function of (seed, position, purpose). Knows no models and keeps no state.

A draw is addressed, not consumed: which drafter ran, or how often something was retried, cannot shift the numbers
that another decision sees. Philox is a counter-based generator (Salmon et al. 2011), so an address is a counter.
"""

from __future__ import annotations

import secrets
from copy import copy
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent."""

    DRAFT = 1  # drawing the drafted tokens of a round
    ACCEPT = 2  # accepting or rejecting them
    EMIT = 3  # the corrected or bonus token that ends the round
    CHOOSE = 4  # the token at a position, the same for target and draft


class Noise:
    """The uniforms of one answer.

    A round starts at the number of committed tokens, which grows by at least one each round: numbers addressed by
    the start of the round are therefore never seen twice, even when the depth of a round is chosen after looking
    at the drafts of the last one. Numbers that belong to a position (`choose`) are seen by the target and the draft,
    and by a later round that comes back to the position.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self._outer = 0  # the round that these numbers are for rounds inside of, plus 1
        # One generator that is led from address to address: making one takes several times as long.
        self._bits = np.random.Philox(key=self.seed)
        self._state: Any = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def uniforms(self, start: int, purpose: Purpose, count: int) -> NDArray[np.float64]:
        """`count` independent draws from [0, 1) for the round that starts at position `start`."""
        return self._draw(self._outer, start, purpose, count)

    def inside(self, start: int) -> Noise:
        """The uniforms for rounds inside the round that starts at position `start`: a draft model's own.

        They go back to a position as often as the outer rounds do, so that their own start is no address.
        Numbers that belong to a position stay the same.
        """
        assert self._outer == 0, "there is one address for rounds inside rounds, and none for rounds inside those"
        inner = copy(self)
        inner._outer = start + 1
        return inner

    def choose(self, weights: NDArray[np.float32], position: int) -> int:
        """The token that wins the race of `weights` at a position: arg max of log weight + Gumbel noise.

        Distributed as the weights. Every token has its noise from (seed, position) alone, whatever the weights are,
        so that two similar distributions mostly choose the same token.

        Args:
            weights: shape (vocab,), not negative (need not sum to 1). Without any weight the answer is 0.
            position: of the token in the text.
        """
        (alive,) = np.nonzero(weights)
        if not len(alive):
            return 0
        uniforms = self._draw(0, position, Purpose.CHOOSE, int(alive[-1]) + 1)[alive]
        # Gumbel noise is -log(E) with E exponential: the smallest E / weight wins, and only E needs a logarithm.
        return int(alive[np.argmin(-np.log1p(-uniforms) / weights[alive])])

    def _draw(self, outer: int, start: int, purpose: Purpose, count: int) -> NDArray[np.float64]:
        self._state["state"]["counter"][1:] = outer, start, purpose
        self._bits.state = self._state  # the state at the beginning of a counter: nothing left over from another
        return self._generator.random(count)
