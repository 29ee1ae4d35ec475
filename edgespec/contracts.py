"""The protocols that the loop is written against. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.head import Head
from edgespec.noise import Noise
from edgespec.policy import Choice, Offer, Outcome
from edgespec.shaper import Shaper
from edgespec.verify import Draft

Tokens: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = NDArray[np.float32]


class Interrupted(Exception):
    """A call of a model was ended from another thread because its answer is not wanted any more. No error."""


class Scorer(Protocol):
    """A model with a cache: what the loop needs of it.

    Invariant, kept even when a call raises: the cache stands for exactly the tokens that were fed and not
    rewound.
    """

    @property
    def vocab_size(self) -> int:
        """Columns of a row of logits."""

    @property
    def head(self) -> Head | None:
        """Which token each column is, for a draft model that has some of them only. `None`: column t is token t."""

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
            Interrupted: the call was ended from another thread.
        """

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` cached tokens."""


GoesOn: TypeAlias = Callable[[Sequence[float]], bool]


class Drafter(Protocol):
    """Proposes a continuation. Never decides anything: what is emitted is up to `verify`.

    Subclass it to bring one of your own; only `propose` must be written.

    Attributes:
        is_lookup: whether it proposes all at once and at no cost worth measuring. It is then asked every round, and
            learnt about even where its proposal is not checked.
    """

    is_lookup: bool = True

    def backlog(self, context: Tokens) -> int:
        """How many tokens of `context` it would have to read before it could propose: 1 or less is up to date."""
        return 0

    def learn(self, text: Tokens) -> None:
        """Told the whole text when an answer has ended."""
        return

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        """Return at most `limit` tokens (none is a legal answer) that may follow `context`.

        Args:
            context: every committed token, shape (n,).
            limit: at least 1.
            shaper: how tokens are chosen; a drafter that samples must shape its own distributions with it.
            noise: the randomness of this answer; draw with purpose `DRAFT` at position `len(context)`.
            goes_on: asked after each token, or each few that come at once, with the confidences of those drafted so
                far, whether another one is worth its cost. It must not lead to a drawn token being left out. Lookups
                need not ask.
        """


class DraftPolicy(Protocol):
    """Decides who drafts in a round, and how much. `policy.AdaptivePolicy` and `policy.FixedPolicy` are two."""

    @property
    def max_depth(self) -> int:
        """Most tokens that it will ever ask for."""

    def choose(self, offers: Sequence[Offer], past: int, room: int) -> Choice:
        """Pick a drafter and the most tokens it may draft, at most `room`."""

    def goes_on(self, name: str, confidences: Sequence[float], past: int) -> bool:
        """Whether one more token is worth drafting after those with these confidences."""

    def learn(self, outcome: Outcome) -> None:
        """Take in what a round did."""

    def learn_shadow(self, name: str, confidences: Sequence[float], num_accepted: int) -> None:
        """Take in what would have become of a lookup's proposal that was not checked."""
