"""Whether a draft means the same text by the same ids as its target. Two tokenizers in, an error or remarks out.

Ids above both tokenizers are padding rows of the weights, so the *sizes* of the vocabularies say nothing: they may
differ between compatible models and agree between incompatible ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from edgespec.errors import IncompatibleDraftError

_SHOWN = 3


def token_differences(target: dict[str, int], draft: dict[str, int]) -> list[tuple[int, str | None, str | None]]:
    """Ids that stand for different tokens, as (id, target's token, draft's token), by id; None where there is none."""
    ours = {token_id: token for token, token_id in target.items()}
    theirs = {token_id: token for token, token_id in draft.items()}
    ids = sorted(ours.keys() | theirs.keys())
    return [(i, ours.get(i), theirs.get(i)) for i in ids if ours.get(i) != theirs.get(i)]


def check_pair(
    target: Tokenizer,
    draft: Tokenizer,
    target_eos: tuple[int, ...],
    draft_eos: tuple[int, ...],
    target_template: str | None,
    draft_template: str | None,
) -> list[str]:
    """Refuse a draft whose ids mean other text.

    Args:
        target, draft: the parsed tokenizers.
        target_eos, draft_eos: ids that end an answer.
        target_template, draft_template: chat templates, or None.
    Returns:
        Differences that cost acceptance but not correctness, as lines for the user: the target's template, end
        tokens and special tokens are used for both.
    Raises:
        IncompatibleDraftError: the token maps differ.
    """
    different = token_differences(target.get_vocab(True), draft.get_vocab(True))
    if different:
        raise IncompatibleDraftError(
            f"the draft's tokens differ from the target's at {len(different)} ids, first {_show(different)}; "
            "choose a draft of the target's own family"
        )
    special = sorted(_special_ids(target) ^ _special_ids(draft))
    lines = _harmless(target_eos, draft_eos, target_template, draft_template)
    if special:
        names = ", ".join(f"{target.id_to_token(i)!r} ({i})" for i in special[:_SHOWN])
        lines.append(f"special in only one of target and draft: {names}; the target's choice is used")
    return lines


def _show(different: list[tuple[int, str | None, str | None]]) -> str:
    shown = [f"{i}: {_name(ours)} against {_name(theirs)}" for i, ours, theirs in different[:_SHOWN]]
    return "; ".join(shown)


def _name(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.special}


def _harmless(
    target_eos: tuple[int, ...], draft_eos: tuple[int, ...], target_template: str | None, draft_template: str | None
) -> list[str]:
    lines = []
    if set(target_eos) != set(draft_eos):
        lines.append(f"end tokens differ (target {list(target_eos)}, draft {list(draft_eos)}); the target's are used")
    if target_template is not None and draft_template is not None and target_template != draft_template:
        lines.append("the draft was trained with another chat template; the target's is used")
    return lines


class HasTokens(Protocol):
    """What a model's folder says of its tokens."""

    @property
    def tokenizer(self) -> Path:
        """Its `tokenizer.json`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    @property
    def chat_template(self) -> str | None:
        """The template's text."""


def compare_sources(target: HasTokens, draft: HasTokens) -> list[str]:
    """`check_pair` of two folders. Raises what it raises."""
    return check_pair(
        Tokenizer.from_file(str(target.tokenizer)),
        Tokenizer.from_file(str(draft.tokenizer)),
        target.eos_token_ids,
        draft.eos_token_ids,
        target.chat_template,
        draft.chat_template,
    )
