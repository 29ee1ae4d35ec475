"""Which drafts are refused: token maps decide, vocabulary sizes do not."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models

from edgespec.errors import IncompatibleDraftError
from edgespec.export.pair import check_pair, token_differences


def words(*tokens: str, special: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def compare(target: Tokenizer, draft: Tokenizer, **changes: object) -> list[str]:
    values = {"target_eos": (0,), "draft_eos": (0,), "target_template": "T", "draft_template": "T"} | changes
    return check_pair(target, draft, **values)  # type: ignore[arg-type]


def test_the_same_tokens_are_compatible_without_a_word() -> None:
    """Nothing to say about a perfect pair."""
    assert compare(words("<unk>", "a", "b"), words("<unk>", "a", "b")) == []


def test_a_difference_is_refused_with_the_first_tokens_that_differ() -> None:
    """The message has the id, both tokens and the number of differences."""
    with pytest.raises(IncompatibleDraftError, match=r"2 ids, first 1: 'a' against 'b'; 2: 'b' against 'a'"):
        compare(words("<unk>", "a", "b"), words("<unk>", "b", "a"))


def test_equal_sizes_do_not_make_a_pair_and_missing_tokens_are_named() -> None:
    """A token that only one of them has is a difference, even at the end of the map."""
    assert token_differences({"a": 0, "b": 1}, {"a": 0, "c": 1}) == [(1, "b", "c")]
    assert token_differences({"a": 0}, {"a": 0, "b": 5}) == [(5, None, "b")]
    with pytest.raises(IncompatibleDraftError, match="nothing against 'b'"):
        compare(words("<unk>", "a"), words("<unk>", "a", "b"))


def test_the_tokens_added_later_count() -> None:
    """Added tokens are part of the map."""
    with pytest.raises(IncompatibleDraftError, match="<end>"):
        compare(words("<unk>", "a"), words("<unk>", "a", special=("<end>",)))


def test_what_costs_only_acceptance_is_said_and_allowed() -> None:
    """Other end tokens, another template, another idea of what is special: the target's are used."""
    plain, special = words("<unk>", "a", "b"), words("<unk>", "a", "b", special=("b",))
    lines = compare(plain, special, draft_eos=(2,), draft_template="U")
    assert len(lines) == 3
    assert "[0]" in lines[0]
    assert "[2]" in lines[0]
    assert "template" in lines[1]
    assert "'b' (2)" in lines[2]


def test_a_draft_without_a_template_is_no_difference() -> None:
    """A base model drafts well; it just has no template of its own."""
    assert compare(words("<unk>", "a"), words("<unk>", "a"), draft_template=None) == []
