"""`Shaper`: how the tokens of one answer are chosen, the same for the target's rows and the draft's.

Composed once per answer. Knows arrays; nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.params import SamplingParams
from edgespec.processors import Processor, Text, processors
from edgespec.sampling import shape

_NO_TOKENS = np.empty(0, np.int64)


class Constraint(Processor, Protocol):
    """A processor that makes tokens impossible by the answer alone, and can say which drafts are in vain."""

    def num_possible(self, answer: NDArray[np.int64], drafted: NDArray[np.int64]) -> int:
        """How many of the leading `drafted` tokens may follow `answer`; an end token is the last that may."""


class ShapedRows:
    """Distributions that are made when they are looked at: those behind a rejection never are.

    Args:
        logits: adjusted, shape (rows, vocab); overwritten.
        params: temperature above 0.
    """

    def __init__(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        self._rows, self._params = logits, params
        self._is_shaped = [False] * len(logits)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        if not self._is_shaped[index]:
            shape(self._rows[index : index + 1], self._params)
            self._is_shaped[index] = True
        row: NDArray[np.float32] = self._rows[index]
        return row


class Shaper:
    """Turns rows of logits into what tokens are chosen from.

    Row i of a call follows `context` and then `drafted[:i]`, so that whatever depends on the text sees the drafted
    prefix, too.

    Args:
        params: of the answer.
        prompt: the first tokens of every `context`, shape (n,); what comes behind them is the answer.
        eos_token_ids: tokens that end an answer.
        vocab_size: of the target; token ids in `params` are checked against it.
        constraint: applied last.

    Raises:
        ConfigError: a token id in `params` is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: NDArray[np.int64] = _NO_TOKENS,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._num_prompt = len(prompt)
        self._constraint = constraint
        self._processors = processors(params, prompt, np.array(sorted(eos_token_ids), np.int64), vocab_size)
        if constraint is not None:
            self._processors.append(constraint)

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    @property
    def changes_logits(self) -> bool:
        """Whether anything comes before temperature and cuts: only then do rows depend on the text or on token ids."""
        return bool(self._processors)

    def adjust(
        self, logits: NDArray[np.float32], context: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Logits that the arg max is taken of, or that are shaped next.

        Args:
            logits: shape (rows, columns); overwritten.
            context: committed tokens, shape (n,), beginning with the prompt.
            drafted: tokens after them that the later rows follow, shape (rows - 1,).
        """
        if self._processors:
            text = Text(np.concatenate([context, drafted]), len(context), self._num_prompt)
            for process in self._processors:
                process(logits, text)
        return logits

    def shape(
        self, logits: NDArray[np.float32], context: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The distributions that tokens are really sampled from, shape (rows, columns). Arguments as `adjust`."""
        return shape(self.adjust(logits, context, drafted), self.params)

    def distributions(
        self, logits: NDArray[np.float32], context: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> ShapedRows:
        """The rows of `shape`, each made when it is first asked for."""
        return ShapedRows(self.adjust(logits, context, drafted), self.params)

    def is_possible(self, row: NDArray[np.float32], token: int) -> bool:
        """Whether a token chosen from a row that was adjusted (greedy) or shaped has any probability.

        It has none only where nothing in the row has.
        """
        return row.item(token) > (-inf if self.is_greedy else 0)

    def num_possible(self, context: NDArray[np.int64], drafted: NDArray[np.int64]) -> int:
        """How many of the leading `drafted` tokens the constraint lets follow `context`."""
        if self._constraint is None:
            return len(drafted)
        return self._constraint.num_possible(context[self._num_prompt :], drafted)
