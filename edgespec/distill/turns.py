"""A chat template taken apart, so that a model can write both sides. Knows tokens and templates, no model."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from edgespec.chat import ChatTemplate
from edgespec.errors import EdgespecError, ExportError
from edgespec.export.source import Source

_MARKS = ("Qa1question", "Qa2answer", "Qa3again")


@dataclass(frozen=True, slots=True)
class Turns:
    """Token ids of what a template puts around texts.

    Attributes:
        before: the user's first text.
        to_answer: between a user's text and the answer.
        to_user: between an answer and the user's next text.
        ends: tokens that end a turn.
    """

    before: list[int]
    to_answer: list[int]
    to_user: list[int]
    ends: frozenset[int]

    def bridge(self, ended_by: int, *, is_answer: bool) -> list[int]:
        """What follows a turn, less its first token where that is the one which ended the turn."""
        bridge = self.to_user if is_answer else self.to_answer
        return bridge[1:] if bridge and bridge[0] == ended_by else bridge


def take_apart(source: Source, tokenizer: Tokenizer) -> Turns:
    """Find the pieces between texts by rendering a conversation of marked ones.

    A model without a template, or with one that shows no such pieces, writes on from an end token without turns.
    """
    plain = Turns([source.eos_token_ids[0]], [], [], frozenset())
    if source.chat_template is None:
        return plain
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        text = ChatTemplate(source.chat_template, source.special_tokens).render(messages)
    except EdgespecError:
        return plain
    pieces = []
    for mark in _MARKS:
        piece, found, text = text.partition(mark)
        if not found:
            return plain
        pieces.append(_encode(tokenizer, piece))
    before, to_answer, to_user = pieces
    if not before:
        raise ExportError(f"{source.name}: its chat template starts with the user's text, so nothing can be written")
    ends = {*source.eos_token_ids, *to_answer[:1], *to_user[:1]}
    return Turns(before, to_answer, to_user, frozenset(ends))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
