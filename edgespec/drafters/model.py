"""A smaller model as drafter. Knows the `Scorer` protocol, not what is behind it."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Drafter, GoesOn, Rows, Scorer, Tokens
from edgespec.noise import Noise, Purpose
from edgespec.sampling import draw
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft


class ModelDrafter(Drafter):
    """Drafts with a model of its own, token by token.

    Its cache follows the committed text by `sync`: rejected tokens are rewound, tokens that it has not read (the
    prompt, the last of a draft that was accepted whole) are read when it is next asked.

    Args:
        scorer: the draft model.
        vocab_size: columns of the target's logits. A draft may have more or fewer padding columns; distributions
            are cut or filled with zeros to this width.
        is_coupled: choose with the noise of each position, which `verify_coupled` shares, instead of drawing. The
            noise known, nothing is left to chance, so such a draft has no distributions.
    """

    is_lookup = False

    def __init__(self, scorer: Scorer, vocab_size: int, *, is_coupled: bool = False) -> None:
        self.scorer = scorer
        self.vocab_size = vocab_size
        self.is_coupled = is_coupled
        self._dists = np.zeros((0, vocab_size), np.float32)

    def backlog(self, context: Tokens) -> int:
        return len(self.scorer.sync(context))

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        limit = min(limit, self.scorer.context_length - len(context))
        if limit < 1:
            return EMPTY_DRAFT
        tokens = np.empty(limit, np.int64)
        draws = not (shaper.is_greedy or self.is_coupled)
        dists = self._room_for(limit) if draws else None
        text = np.concatenate([context, tokens])  # what each drafted token follows
        uniforms = noise.uniforms(len(context), Purpose.DRAFT, limit) if draws else np.zeros(limit)
        confidences: list[float] = []
        pending = self.scorer.sync(context)
        for i in range(limit):
            # Columns that the target does not have are padding: they must not be drafted.
            logits = self.scorer.forward(pending, 1)[:, : self.vocab_size]
            before = text[: len(context) + i]
            row, tokens[i] = self._choose(logits, before, shaper, noise, uniforms[i])
            if not shaper.is_possible(row, tokens[i]):
                return _first(i, tokens, dists, confidences)
            confidences.append(_confidence(row, tokens[i], shaper.is_greedy))
            if dists is not None:
                dists[i, : len(row)] = row
            if tokens[i] in shaper.eos_token_ids or (goes_on is not None and not goes_on(confidences)):
                return _first(i + 1, tokens, dists, confidences)
            text[len(before)] = tokens[i]
            pending = tokens[i : i + 1]
        return Draft(tokens, dists, tuple(confidences))

    def _room_for(self, limit: int) -> Rows:
        """Rows for the distributions of a draft, used again by the next one. Padding columns are 0 for good."""
        if limit > len(self._dists):
            self._dists = np.zeros((limit, self.vocab_size), np.float32)
        return self._dists[:limit]

    def _choose(
        self, logits: Rows, before: Tokens, shaper: Shaper, noise: Noise, uniform: float
    ) -> tuple[NDArray[np.float32], int]:
        """The row that a token is chosen from, and the token."""
        if shaper.is_greedy:
            row = shaper.adjust(logits, before, before[:0])[0]
            return row, int(row.argmax())
        row = shaper.shape(logits, before, before[:0])[0]
        return row, noise.choose(row, len(before)) if self.is_coupled else draw(row, uniform)


def _first(count: int, tokens: Tokens, dists: Rows | None, confidences: list[float]) -> Draft:
    return Draft(tokens[:count], None if dists is None else dists[:count], tuple(confidences))


def _confidence(row: NDArray[np.float32], token: int, is_logits: bool) -> float:
    """How certain the draft model is: the probability of its first choice, or what the margin of two logits says."""
    if not is_logits:
        return float(row.max())
    best, row[token] = row[token], -np.inf
    second, row[token] = row.max(), best
    return 1 / (1 + exp(min(float(second - best), 0.0)))
