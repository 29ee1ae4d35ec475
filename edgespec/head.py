"""Heads that have only some of the vocabulary's tokens: which column means which token, and rows over all of them.

Knows arrays; nothing of graphs or of what else is in a bundle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError

_HEADER = 4096  # bytes that an array's header may have


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The tokens of a head.

    Attributes:
        ids: token of each column of the graph's logits, ascending, shape (h,).
        vocab_size: of all tokens.
    """

    ids: NDArray[np.int64]
    vocab_size: int

    def column(self, token: int) -> int | None:
        """The column of a token, `None` where the head has none for it."""
        column = int(self.ids.searchsorted(token))
        return column if column < len(self.ids) and self.ids.item(column) == token else None

    def below(self, vocab_size: int) -> Head:
        """The head without the tokens that a smaller vocabulary does not have; they are its last columns."""
        return Head(self.ids[: np.searchsorted(self.ids, vocab_size)], vocab_size)


def read_head(file: Path, vocab_size: int) -> Head:
    """The tokens of a head from a .npy file of int32.

    Raises:
        BundleError: it is not such a file, or its tokens are not ascending and below `vocab_size`.
    """
    try:
        # Checked before anything is allocated.
        if file.stat().st_size > 4 * vocab_size + _HEADER:
            raise ValueError("it is larger than the vocabulary")
        # Mapped, so that what the header says is held against the file's size and not allocated.
        ids = np.array(np.lib.format.open_memmap(file, mode="r"))
        if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids):
            raise ValueError("it is no list of int32")
        if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"its tokens do not ascend from 0 to {vocab_size}")
    except Exception as error:  # a header is parsed as Python, and fails in as many ways
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise BundleError(f"{file} does not say which tokens a head has ({reason}); export the bundle again") from error
    return Head(ids.astype(np.int64), vocab_size)


class Spreader:
    """Spreads rows of a head's logits over the vocabulary. Tokens that it does not have are impossible."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._rows = np.empty((0, head.vocab_size), np.float32)

    def __call__(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows over the vocabulary: shape (rows, h) -> (rows, vocab_size), valid until the next call."""
        if len(logits) > len(self._rows):
            self._rows = np.empty((len(logits), self.head.vocab_size), np.float32)
        rows = self._rows[: len(logits)]
        rows.fill(-np.inf)  # callers overwrite what they got
        rows[:, self.head.ids] = logits
        return rows
