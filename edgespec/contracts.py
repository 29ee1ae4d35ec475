"""The protocols that the loop is written against. Knows no implementation."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import Draft

Tokens: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = NDArray[np.float32]


class Scorer(Protocol):
    """A model with a cache: what the loop needs of it.

    Invariant, kept even when a call raises: the cache stands for exactly the tokens that were fed and not
    rewound.
    """

    @property
    def vocab_size(self) -> int:
        """Columns of a row of logits."""

    @property
    def context_length(self) -> int:
        """Most tokens that the cache may hold."""

    def sync(self, context: Tokens) -> Tokens:
        """Rewind to the longest common prefix of the cache and `context`, and return what is still to feed.

        At least the last token is returned (the logits that follow it are what the caller is after), so a fully
        cached context costs one token.

        Args:
            context: shape (n,), n >= 1.
        Returns:
            A view of the tail of `context`, shape (m,), 1 <= m <= n.
        """

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        """Feed `tokens` after what is cached and return the logits that follow each of the last `rows`.

        Args:
            tokens: shape (m,), m >= 1.
            rows: from 1 to m.
        Returns:
            Shape (rows, vocab_size), float32, valid until the next call (it may be a reused buffer; the caller
            may overwrite it).
        Raises:
            ContextOverflowError: more tokens than the context holds.
            SessionError: the runtime failed.
        """

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` cached tokens."""


class Drafter(Protocol):
    """Proposes a continuation. Never decides anything: what is emitted is up to `verify`."""

    def propose(self, context: Tokens, limit: int, shaper: Shaper, noise: Noise) -> Draft:
        """Return at most `limit` tokens (none is a legal answer) that may follow `context`.

        Args:
            context: every committed token, shape (n,).
            limit: at least 1.
            shaper: how tokens are chosen; a drafter that samples must shape its own distributions with it.
            noise: the randomness of this answer; draw with purpose `DRAFT` at position `len(context)`.
        """
