"""Fakes for tests, ours and those of applications that embed edgespec. No runtime, no files.

`TableScorer` is a model given by a function; `ScriptedDrafter` proposes what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edgespec.contracts import Drafter, GoesOn, Rows, Tokens
from edgespec.errors import ContextOverflowError
from edgespec.head import Head
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import Draft


class TableScorer:
    """A `Scorer` whose logits are a function of the whole text.

    Args:
        logits: context, shape (n,) -> row, shape (vocab_size,).
        vocab_size: columns of a row.
        context_length: most tokens that it accepts.
        head: tokens of the columns, where it has some of the vocabulary only.

    Attributes:
        calls: `(number of tokens fed, rows asked for)` of every `forward`.
    """

    def __init__(
        self,
        logits: Callable[[Tokens], np.ndarray],
        vocab_size: int,
        context_length: int = 4096,
        head: Head | None = None,
    ) -> None:
        self._logits = logits
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._head = head
        self._tokens = np.empty(0, np.int64)
        self.calls: list[tuple[int, int]] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def head(self) -> Head | None:
        return self._head

    @property
    def context_length(self) -> int:
        return self._context_length

    def sync(self, context: Tokens) -> Tokens:
        length = 0
        while length < min(len(self._tokens), len(context) - 1) and self._tokens[length] == context[length]:
            length += 1
        self.rewind(length)
        return context[length:]

    def rewind(self, length: int) -> None:
        self._tokens = self._tokens[:length]

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        if len(self._tokens) + len(tokens) > self._context_length:
            raise ContextOverflowError(f"more than {self._context_length} tokens: shorten the conversation")
        self.calls.append((len(tokens), rows))
        self._tokens = np.concatenate([self._tokens, tokens])
        ends = range(len(self._tokens) - rows + 1, len(self._tokens) + 1)
        return np.stack([self._logits(self._tokens[:end]) for end in ends]).astype(np.float32)


class ScriptedDrafter(Drafter):
    """Proposes the given drafts, one a round, then nothing.

    Args:
        drafts: the tokens of each round; a draft longer than the round's limit is cut.
    """

    def __init__(self, drafts: Iterable[Sequence[int]]) -> None:
        self._drafts = iter(drafts)

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        return Draft(np.array(next(self._drafts, ())[:limit], np.int64))
