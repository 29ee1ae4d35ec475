"""A smaller model as drafter. Knows the `Scorer` protocol, not what is behind it."""

from __future__ import annotations

from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Drafter, GoesOn, Rows, Scorer, Tokens
from edgespec.head import Spreader
from edgespec.noise import Noise, Purpose
from edgespec.sampling import draw
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft


class ModelDrafter(Drafter):
    """Drafts with a model of its own, token by token.

    Its cache follows the committed text by `sync`: rejected tokens are rewound, tokens that it has not read (the
    prompt, the last of a draft that was accepted whole) are read when it is next asked.

    Rows of a head with few tokens stay as short as they are where that gives the same distribution: temperature and
    cuts do not care which tokens there are. What goes by token ids (penalties, bans, grammars, shared noise) gets
    rows over the whole vocabulary.

    Args:
        scorer: the draft model.
        vocab_size: columns of the target's logits. A draft may have more or fewer padding columns; its missing
            columns have probability 0.
        is_coupled: choose with the noise of each position, which `verify_coupled` shares, instead of drawing. The
            noise known, nothing is left to chance, so such a draft has no distributions.
    """

    is_lookup = False

    def __init__(self, scorer: Scorer, vocab_size: int, *, is_coupled: bool = False) -> None:
        self.scorer = scorer
        self.vocab_size = vocab_size
        self.is_coupled = is_coupled
        # Columns that the target does not have are padding: they must not be drafted.
        head = None if scorer.head is None else scorer.head.below(vocab_size)
        self._width = vocab_size if head is None else len(head.ids)
        self._spread = None if head is None else Spreader(head)
        self._dists = np.zeros((0, vocab_size), np.float32)

    def backlog(self, context: Tokens) -> int:
        return len(self.scorer.sync(context))

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        limit = min(limit, self.scorer.context_length - len(context))
        if limit < 1:
            return EMPTY_DRAFT
        draws = not (shaper.is_greedy or self.is_coupled)
        ids = self._short_ids(shaper)
        if draws:
            self._dists = enough_rows(self._dists, limit, self.vocab_size if ids is None else len(ids))
        dists = self._dists if draws else None
        uniforms = noise.uniforms(len(context), Purpose.DRAFT, limit).tolist() if draws else [0.0] * limit
        text = np.concatenate([context, np.empty(limit, np.int64)])  # what each drafted token follows
        confidences: list[float] = []
        start = end = len(context)
        pending = self.scorer.sync(context)
        for uniform in uniforms:
            logits = self.scorer.forward(pending, 1)[:, : self._width]
            if ids is None and self._spread is not None:
                logits = self._spread(logits)
            row, column = self._choose(logits, text[:end], shaper, noise, uniform)
            if not shaper.is_possible(row, column):
                break
            confidences.append(confidence(row, column, shaper.is_greedy))
            if dists is not None:
                dists[end - start, : len(row)] = row
            token = column if ids is None else ids.item(column)
            text[end] = token
            pending = text[end : end + 1]
            end += 1
            if token in shaper.eos_token_ids or (goes_on is not None and not goes_on(confidences)):
                break
        return Draft(text[start:end], None if dists is None else dists[: end - start], tuple(confidences), ids)

    def _short_ids(self, shaper: Shaper) -> NDArray[np.int64] | None:
        """Tokens of the head's columns if rows can stay as they are, `None` if they are over the vocabulary."""
        is_by_id = shaper.changes_logits or (self.is_coupled and not shaper.is_greedy)
        return None if self._spread is None or is_by_id else self._spread.head.ids

    def _choose(
        self, logits: Rows, before: Tokens, shaper: Shaper, noise: Noise, uniform: float
    ) -> tuple[NDArray[np.float32], int]:
        """The row that a token is chosen from, and the token's column."""
        if shaper.is_greedy:
            row = shaper.adjust(logits, before, before[:0])[0]
            return row, int(row.argmax())
        row = shaper.shape(logits, before, before[:0])[0]
        return row, noise.choose(row, len(before)) if self.is_coupled else draw(row, uniform)


def enough_rows(rows: Rows, count: int, width: int) -> Rows:
    """`rows` for one more draft's distributions, or others where they are too few. Padding columns are 0 for good."""
    return rows if len(rows) >= count and rows.shape[1] == width else np.zeros((count, width), np.float32)


def confidence(row: NDArray[np.float32], token: int, is_logits: bool) -> float:
    """How certain the draft model is: the probability of its first choice, or what the margin of two logits says."""
    if not is_logits:
        return float(row.max())
    best, row[token] = row.item(token), -inf  # nobody reads the row again
    second = row.item(row.argmax())
    return 1 / (1 + exp(min(second - best, 0.0)))
