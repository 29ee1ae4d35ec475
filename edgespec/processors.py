"""Changes to logits that come before temperature: penalties, biases and bans, the caller's own.

Each changes rows in place. Row i follows the committed context and the first i drafted tokens, and sees exactly
that text, so that a token means the same whether it was drafted or not. Costs grow with the text, not with the
vocabulary. Knows nothing of models. No processor keeps state that depends on earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.params import LogitsProcessor, SamplingParams

_Tokens: TypeAlias = NDArray[np.int64]
_Rows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What the rows of a call follow.

    Attributes:
        tokens: the committed context and then the drafted tokens, shape (n,).
        num_committed: those of the context; row i follows `tokens[: num_committed + i]`.
        num_prompt: those of the prompt.
    """

    tokens: _Tokens
    num_committed: int
    num_prompt: int

    @property
    def answer(self) -> _Tokens:
        """Without the prompt; drafted tokens included."""
        return self.tokens[self.num_prompt :]

    @property
    def num_answered(self) -> int:
        """Committed tokens of the answer."""
        return self.num_committed - self.num_prompt


class Processor(Protocol):
    """A change of logits."""

    def __call__(self, logits: _Rows, text: Text) -> None:
        """Change `logits`, shape (rows, columns), in place. There is at most one row more than drafted tokens.

        A draft model may have fewer columns than the text has ids.
        """


class LogitBias:
    """Adds a number to the logits of given tokens. As `SequenceBiasLogitsProcessor` for single tokens.

    Args:
        tokens: ids, each once, shape (n,).
        bias: shape (n,).
    """

    def __init__(self, tokens: _Tokens, bias: _Rows) -> None:
        self.tokens = tokens
        self.bias = bias

    def __call__(self, logits: _Rows, text: Text) -> None:
        known = self.tokens < logits.shape[1]
        logits[:, self.tokens[known]] += self.bias[known]


class RepetitionPenalty:
    """Divides positive logits of tokens in the prompt or the answer, multiplies negative ones.

    Source: CTRL (Keskar et al. 2019), as in `RepetitionPenaltyLogitsProcessor`.

    Args:
        penalty: above 0.
        prompt: shape (n,).
    """

    def __init__(self, penalty: float, prompt: _Tokens) -> None:
        self.penalty = np.float32(penalty)
        self.prompt = np.unique(prompt)

    def __call__(self, logits: _Rows, text: Text) -> None:
        tokens, first = np.unique(np.concatenate([self.prompt, text.answer]), return_index=True)
        # Each token is seen from the row on that follows its first occurrence.
        row = first + 1 - len(self.prompt) - text.num_answered
        known = np.searchsorted(tokens, logits.shape[1])
        tokens, row = tokens[:known], row[:known]
        seen = np.arange(len(logits))[:, None] >= row
        before = logits[:, tokens]
        after = np.where(before < 0, before * self.penalty, before / self.penalty)
        logits[:, tokens] = np.where(seen, after, before)


class CountPenalty:
    """Subtracts `frequency` for each time that a token occurs in the answer, and `presence` if it does at all.

    Source: OpenAI's API reference: logit[t] - count[t] * frequency - (count[t] > 0) * presence.
    """

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency = np.float32(frequency)
        self.presence = np.float32(presence)

    def __call__(self, logits: _Rows, text: Text) -> None:
        tokens, index = np.unique(text.answer, return_inverse=True)
        counts = np.zeros((len(logits), len(tokens)), np.float32)
        counts[0] = np.bincount(index[: text.num_answered], minlength=len(tokens))
        drafted = index[text.num_answered :][: len(logits) - 1]
        counts[np.arange(1, len(drafted) + 1), drafted] = 1
        np.cumsum(counts, axis=0, out=counts)
        known = np.searchsorted(tokens, logits.shape[1])
        penalty = counts * self.frequency + (counts > 0) * self.presence
        logits[:, tokens[:known]] -= penalty[:, :known]


class NoRepeatNgram:
    """Bans tokens that would complete a sequence of `size` tokens that prompt and answer already have.

    As `NoRepeatNGramLogitsProcessor`.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, logits: _Rows, text: Text) -> None:
        tokens, size = text.tokens, self.size
        num_starts = len(tokens) - size + 1
        if num_starts < 1:
            return
        ends = text.num_committed + np.arange(len(logits))[:, None]
        # One that starts here lies wholly before the row.
        match = np.arange(num_starts) + size <= ends
        for k in range(size - 1):
            match &= tokens[k : k + num_starts] == tokens[np.maximum(ends - size + 1 + k, 0)]
        rows, starts = np.nonzero(match)
        last = tokens[starts + size - 1]
        known = last < logits.shape[1]
        logits[rows[known], last[known]] = -np.inf


class MinNewTokens:
    """Bans end tokens until the answer has `count` tokens. As `MinNewTokensLengthLogitsProcessor`.

    Args:
        count: tokens.
        eos_token_ids: shape (n,).
    """

    def __init__(self, count: int, eos_token_ids: _Tokens) -> None:
        self.count = count
        self.eos_token_ids = eos_token_ids

    def __call__(self, logits: _Rows, text: Text) -> None:
        num_rows = max(self.count - text.num_answered, 0)
        logits[:num_rows, self.eos_token_ids[self.eos_token_ids < logits.shape[1]]] = -np.inf


class BannedTokens:
    """Makes tokens impossible, end tokens included. As `SuppressTokensLogitsProcessor`.

    Args:
        tokens: ids, shape (n,).
    """

    def __init__(self, tokens: _Tokens) -> None:
        self.tokens = tokens

    def __call__(self, logits: _Rows, text: Text) -> None:
        logits[:, self.tokens[self.tokens < logits.shape[1]]] = -np.inf


class Hook:
    """The caller's own: `function(context, row) -> row` for each row.

    Raises:
        ConfigError: it returned something else than a row of logits.
    """

    def __init__(self, function: LogitsProcessor) -> None:
        self.function = function

    def __call__(self, logits: _Rows, text: Text) -> None:
        tokens = text.tokens.copy()
        tokens.flags.writeable = False
        for i, row in enumerate(logits):
            given = np.asarray(self.function(tokens[: text.num_committed + i], row))
            if given.shape != row.shape or given.dtype.kind not in "fiu":
                raise ConfigError(
                    f"logits_processor returned shape {given.shape} of {given.dtype}; it must return the row of "
                    f"logits, shape {row.shape}"
                )
            row[:] = given
            if not row.max() < np.inf:  # NaN, too, is not below
                raise ConfigError("logits_processor returned NaN or +inf; use finite logits, or -inf to ban a token")


def processors(
    params: SamplingParams, prompt: _Tokens, eos_token_ids: _Tokens, vocab_size: int | None
) -> list[Processor]:
    """The processors that `params` ask for, in the order that `SamplingParams` documents.

    Args:
        prompt: shape (n,).
        eos_token_ids: shape (m,).
        vocab_size: of the target; `None` leaves token ids unchecked.
    Raises:
        ConfigError: a token id is outside the vocabulary.
    """
    bias_tokens = _ids("logit_bias", params.logit_bias, vocab_size)
    banned = _ids("banned_tokens", params.banned_tokens, vocab_size)
    chosen: list[Processor] = []
    if len(bias_tokens):
        chosen.append(LogitBias(bias_tokens, np.array(list(params.logit_bias.values()), np.float32)))
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenalty(params.repetition_penalty, prompt))
    if params.frequency_penalty or params.presence_penalty:
        chosen.append(CountPenalty(params.frequency_penalty, params.presence_penalty))
    if params.no_repeat_ngram_size:
        chosen.append(NoRepeatNgram(params.no_repeat_ngram_size))
    if params.min_new_tokens:
        chosen.append(MinNewTokens(params.min_new_tokens, eos_token_ids))
    if len(banned):
        chosen.append(BannedTokens(banned))
    if params.logits_processor is not None:
        chosen.append(Hook(params.logits_processor))
    return chosen


def _ids(name: str, tokens: Iterable[int], vocab_size: int | None) -> _Tokens:
    ids = np.array(list(tokens), np.int64)
    if vocab_size is not None and len(ids) and ids.max() >= vocab_size:
        raise ConfigError(f"{name} has the token id {ids.max()}, outside the vocabulary of {vocab_size}")
    return ids
