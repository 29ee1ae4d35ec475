"""`ReplayScorer`: remembers rows of logits, so that a budget of time buys many more samples. Knows `Scorer` only."""

from __future__ import annotations

import numpy as np

from edgespec.contracts import Rows, Scorer, Tokens
from edgespec.head import Head

_MEMORY = 128 * 2**20  # bytes of remembered rows


class ReplayScorer:
    """A `Scorer` that asks another one only for rows that it has not seen, and now and then for others.

    Where every row asked for followed the same text before, the model need not run. What the loop feeds is followed
    all the same, and the model's cache is led from text to text by `sync`, as in use, only more wildly.

    Args:
        scorer: of the model.
        recheck_every: of the calls that could be answered from memory, run one in so many and compare.

    Attributes:
        num_rechecked: rows that were scored again.
        num_changed: those of them that were not the same to the last bit.
        num_calls: calls of `scorer`.
    """

    def __init__(self, scorer: Scorer, recheck_every: int = 16) -> None:
        self.scorer = scorer
        self.recheck_every = recheck_every
        self.num_rechecked = self.num_changed = self.num_calls = 0
        self._tokens = np.empty(0, np.int64)
        self._rows: dict[bytes, Rows] = {}  # by the text before the row, least recently used first
        self._max_rows = max(64, _MEMORY // (4 * scorer.vocab_size))
        self._num_remembered = 0

    @property
    def vocab_size(self) -> int:
        return self.scorer.vocab_size

    @property
    def head(self) -> Head | None:
        return self.scorer.head

    @property
    def context_length(self) -> int:
        return self.scorer.context_length

    def sync(self, context: Tokens) -> Tokens:
        length = min(len(self._tokens), len(context) - 1)
        differs = self._tokens[:length] != context[:length]
        self.rewind(int(differs.argmax()) if differs.any() else length)
        return context[len(self._tokens) :]

    def rewind(self, length: int) -> None:
        self._tokens = self._tokens[:length]

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        text = np.concatenate([self._tokens, tokens])
        keys = [self._key(text[:end]) for end in range(len(text) - rows + 1, len(text) + 1)]
        known = [self._rows.pop(key, None) for key in keys]
        found = [row for row in known if row is not None]
        if len(found) < rows or self._is_due():
            scored = self._score(text, rows)
            for old, new in zip(known, scored, strict=True):
                if old is not None:
                    self.num_rechecked += 1
                    self.num_changed += not np.array_equal(old, new)
            found = list(scored)
        self._rows.update(zip(keys, found, strict=True))
        while len(self._rows) > self._max_rows:
            del self._rows[next(iter(self._rows))]
        self._tokens = text
        return np.stack(found)

    def _key(self, text: Tokens) -> bytes:
        """All that the row after `text` depends on."""
        return text.tobytes()

    def _is_due(self) -> bool:
        self._num_remembered += 1
        return self._num_remembered % self.recheck_every == 0

    def _score(self, text: Tokens, rows: int) -> Rows:
        """Rows of the model itself, a copy."""
        self.num_calls += 1
        last = len(text) - rows
        pending = self.scorer.sync(text[: last + 1])
        return self.scorer.forward(np.concatenate([pending, text[last + 1 :]]), rows).copy()


class RecurrentReplay(ReplayScorer):
    """A `ReplayScorer` of a draft without a cache, whose rows depend on where in the text it started as well."""

    _start = 1  # tokens of the text at the start, of which the last was fed first

    def sync(self, context: Tokens) -> Tokens:
        self._start, self._tokens = len(context), context[:-1]
        return context[-1:]

    def _key(self, text: Tokens) -> bytes:
        return self._start.to_bytes(8, "little") + text.tobytes()

    def _score(self, text: Tokens, rows: int) -> Rows:
        self.num_calls += 1
        self.scorer.sync(text[: self._start])
        return self.scorer.forward(text[self._start - 1 :], rows).copy()
