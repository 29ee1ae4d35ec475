"""Lookup in the user's earlier answers, which an application may keep on disk. Off unless it is asked for.

Knows no model. The file holds token ids and nothing else; it is as private as the texts are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.drafters.ngram import look_up
from edgespec.errors import ConfigError
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.state import write_atomically
from edgespec.verify import EMPTY_DRAFT, Draft

_MAGIC = b"edgespec history 1\n\0"  # a multiple of 4 bytes; then ids as little-endian int32
_SEPARATOR = -1  # between texts: no token, so that nothing matches across it


class HistoryDrafter(Drafter):
    """Proposes what followed the end of the text in earlier texts.

    Args:
        path: file that the texts are kept in; `None` keeps them in memory only. A file that is there and is not one of
            ours is left alone.
        vocab_size: ids in the file must be below.
        capacity: most tokens that are kept; the oldest go first. Looking through 250,000 takes about 0.05 ms.
        max_ngram: longest suffix looked for, in tokens.
    Raises:
        ConfigError: `path` is something else, or of another vocabulary, or cannot be read or written.
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
        if self.path is not None:
            content = _MAGIC + self._tokens.astype("<i4").tobytes()
            write_atomically(self.path, lambda file: file.write(content))


def _read(path: Path | None, vocab_size: int, capacity: int) -> Tokens:
    """The texts of a file, none where there is no file yet."""
    if path is None:
        return np.empty(0, np.int64)
    try:
        if not path.exists():
            write_atomically(path, lambda file: file.write(_MAGIC))  # found out now, not after the first answer
        # Checked before anything is read: 4 bytes a token.
        is_ours = path.is_file() and path.stat().st_size <= len(_MAGIC) + 4 * capacity
        content = path.read_bytes() if is_ours else b""
    except OSError as error:
        raise ConfigError(f"history {path}: {error.strerror or error}; choose another file") from error
    if not content.startswith(_MAGIC) or len(content) % 4:
        raise ConfigError(f"history {path} is there and is no history of edgespec: choose another name")
    tokens = np.frombuffer(content, "<i4", offset=len(_MAGIC)).astype(np.int64)
    if len(tokens) and (tokens.min() < _SEPARATOR or tokens.max() >= vocab_size):
        raise ConfigError(f"history {path} belongs to another vocabulary: choose one file for each model")
    return tokens


def _cut_at_separator(draft: Draft) -> Draft:
    ends = np.flatnonzero(draft.tokens == _SEPARATOR)
    if not len(ends):
        return draft
    end = int(ends[0])
    return Draft(draft.tokens[:end], confidences=draft.confidences[:end])
