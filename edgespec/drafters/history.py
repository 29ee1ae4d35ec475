"""Lookup in the user's earlier answers, which an application may keep on disk. Off unless it is asked for.

Knows no model. The file holds token ids and nothing else; it is as private as the texts are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.drafters.ngram import look_up
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.state import write_atomically
from edgespec.verify import EMPTY_DRAFT, Draft

_SEPARATOR = -1  # between texts: no token, so that nothing matches across it


class HistoryDrafter(Drafter):
    """Proposes what followed the end of the text in earlier texts.

    Args:
        path: file that the texts are kept in; `None` keeps them in memory only. A file that is damaged, or of another
            vocabulary, is not used and is replaced at the next `save`.
        vocab_size: ids in the file must be below.
        capacity: most tokens that are kept; the oldest go first. Looking through 250,000 takes about 0.05 ms.
        max_ngram: longest suffix looked for, in tokens.
    """

    def __init__(self, path: Path | None, vocab_size: int, max_ngram: int, capacity: int = 250_000) -> None:
        self.path = path
        self.capacity = capacity
        self.max_ngram = max_ngram
        self._tokens = _read(path, vocab_size, capacity)

    def __len__(self) -> int:
        return len(self._tokens)

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        # A single token occurs everywhere in so much text and says little.
        draft = look_up(self._tokens, context, limit, self.max_ngram) if len(self._tokens) > 1 else EMPTY_DRAFT
        draft = _cut_at_separator(draft)
        return draft if draft.confidences and draft.confidences[0] > 0.5 else EMPTY_DRAFT

    def learn(self, text: Tokens) -> None:
        """Keep the text. Where the file cannot be written now it is tried again after the next answer."""
        self._tokens = np.concatenate([self._tokens, [_SEPARATOR], text])[-self.capacity :]
        with contextlib.suppress(OSError):
            self.save()

    def save(self) -> None:
        """Write the texts, all or nothing.

        Raises:
            OSError: the file cannot be written.
        """
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tokens = self._tokens.astype(np.int32)
        write_atomically(self.path, lambda file: np.save(file, tokens, allow_pickle=False))


def _read(path: Path | None, vocab_size: int, capacity: int) -> Tokens:
    nothing = np.empty(0, np.int64)
    # Checked before anything is allocated: 4 bytes a token and a short header.
    if path is None or not path.is_file() or path.stat().st_size > 4 * capacity + 4096:
        return nothing
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return nothing
    fits = tokens.ndim == 1 and tokens.dtype == np.int32
    if not fits or (len(tokens) and (tokens.min() < _SEPARATOR or tokens.max() >= vocab_size)):
        return nothing
    return np.asarray(tokens, np.int64)


def _cut_at_separator(draft: Draft) -> Draft:
    ends = np.flatnonzero(draft.tokens == _SEPARATOR)
    if not len(ends):
        return draft
    end = int(ends[0])
    return Draft(draft.tokens[:end], confidences=draft.confidences[:end])
