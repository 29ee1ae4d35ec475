"""Grammars -> the tokens that may come next: the adapter of `llguidance`, and the only file that imports it.

Knows tokens; nothing of models or of how a token is chosen among those that may come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, MissingExtraError
from edgespec.params import Grammar
from edgespec.processors import Text

# Masks of the last positions are kept: a draft model and then the target ask for the same ones.
_NUM_MASKS = 80
_CEILING = np.array([-np.inf, np.inf], np.float32)  # of a logit, by the bit of its token


class GrammarCompiler:
    """Makes grammars ready for one tokenizer.

    The tokens are read when a grammar is first compiled (a fraction of a second), so an engine without grammars
    pays nothing for it.

    Args:
        tokenizer: a `tokenizer.json`.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Path, eos_token_ids: Iterable[int]) -> None:
        self._path = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: Any = None

    def compile(self, grammar: Grammar) -> GrammarConstraint:
        """What one answer must keep to.

        Raises:
            MissingExtraError: llguidance is not installed.
            ConfigError: the grammar is not valid or not supported, or the tokenizer cannot be used.
        """
        llguidance = _import_llguidance()
        if self._tokenizer is None:
            try:
                self._tokenizer = llguidance.LLTokenizer(str(self._path), eos_token=self._eos_token_ids)
            except Exception as error:  # the library raises several kinds
                raise ConfigError(f"{self._path} cannot be used with a grammar: {_reason(str(error))}") from error
        try:
            source = _translate(llguidance.LLMatcher, grammar)
        except ValueError as error:
            raise ConfigError(_refusal(grammar, str(error))) from error
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ConfigError(_refusal(grammar, matcher.get_error()))
        return GrammarConstraint(matcher, self._eos_token_ids)


class GrammarConstraint:
    """The `Constraint` of one answer: only tokens that can still become a match, and its end only at one.

    The answer is the only truth. The parser follows it by the common prefix of what it has read and what is asked
    about: rolled back where they part, fed with the rest.

    Args:
        matcher: of llguidance, at its beginning. Never fed an end token, which it could not take back.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, matcher: Any, eos_token_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._read: list[int] = []
        self._masks: dict[int, bytes] = {}

    def __call__(self, logits: NDArray[np.float32], text: Text) -> None:
        """Set what may not come next to minus infinity.

        Rows behind an end token, or behind a drafted token that may not come, follow no text that can be: they
        are left alone, as nothing is ever chosen from them.
        """
        answer: list[int] = text.answer.tolist()
        for i, row in enumerate(logits):
            mask = self._mask(answer[: text.num_answered + i])
            if mask is None:
                return
            _apply(mask, row)

    def num_possible(self, answer: NDArray[np.int64], drafted: NDArray[np.int64]) -> int:
        """How many of the leading `drafted` tokens may follow `answer`; an end token is the last that may."""
        if not self._follow(answer.tolist()):
            return 0
        for i, token in enumerate(drafted.tolist()):
            if token in self._eos_token_ids:
                return i + bool(self._matcher.is_accepting())
            if not self._feed(token):
                return i
        return len(drafted)

    def _mask(self, answer: list[int]) -> bytes | None:
        """One bit a token, lowest first, for what may follow `answer`; `None` if nothing does or it cannot be."""
        length = len(answer)
        if self._read[:length] == answer and length in self._masks:
            return self._masks[length]
        if not self._follow(answer):
            return None
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        self._masks.pop(length - _NUM_MASKS, None)
        self._masks[length] = mask
        return mask

    def _follow(self, answer: list[int]) -> bool:
        """Bring the parser to where it has read `answer`. False if that has no continuation."""
        same = _common_length(self._read, answer)
        if same < len(self._read):
            is_done = self._matcher.rollback(len(self._read) - same)
            assert is_done, self._matcher.get_error()
            del self._read[same:]
            self._masks = {length: mask for length, mask in self._masks.items() if length <= same}
        return all(token not in self._eos_token_ids and self._feed(token) for token in answer[same:])

    def _feed(self, token: int) -> bool:
        """False, with nothing changed, if the token may not come."""
        is_read: bool = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        if is_read:
            self._read.append(token)
        return is_read

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"the grammar cannot be followed any further: {_reason(self._matcher.get_error())}")


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _apply(mask: bytes, row: NDArray[np.float32]) -> None:
    """Minus infinity where `row` has no bit; columns behind the vocabulary of the tokenizer are padding."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(row)]
    np.minimum(row[: len(bits)], _CEILING[bits], out=row[: len(bits)])  # three times as fast as a masked write
    row[len(bits) :] = -np.inf


def _translate(matcher: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    if grammar.kind == "json_schema":
        # White space that the schema does not forbid would let a model go on for ever between two tokens. A schema
        # can still ask for it (its key `x-guidance`).
        source: str = matcher.grammar_from_json_schema(grammar.source, defaults={"whitespace_flexible": False})
    elif grammar.kind == "regex":
        source = matcher.grammar_from_regex(grammar.source)
    else:
        source = matcher.grammar_from_lark(grammar.source)
    return source


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("a grammar needs llguidance: run `pip install 'edgespec[structured]'`") from error
    return llguidance


def _refusal(grammar: Grammar, message: str) -> str:
    name = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}[grammar.kind]
    return f"the {name} cannot be used: {_reason(message)}"


def _reason(message: str) -> str:
    """One line of an error that may show the source around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or ["no reason given"])[0][:300]
