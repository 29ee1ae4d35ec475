"""Lookup in earlier texts, and drafters that an application brings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import ConfigError, SamplingParams, SpecParams
from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.drafters import HistoryDrafter
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import Draft

SHAPER = Shaper(SamplingParams())
HELLO = [{"role": "user", "content": "Hello!"}]
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def propose(drafter: HistoryDrafter, context: list[int], limit: int = 4) -> list[int]:
    return drafter.propose(np.array(context), limit, SHAPER, Noise(0)).tokens.tolist()


def test_what_followed_in_earlier_texts_is_proposed(tmp_path: Path) -> None:
    """Across processes through the file, most frequent first, never beyond the end of a text."""
    drafter = HistoryDrafter(tmp_path / "texts", 100, 4)
    assert propose(drafter, [1, 2]) == []
    for text in ([1, 2, 3, 4], [9, 1, 2, 5, 6], [1, 2, 3, 7]):
        drafter.learn(np.array(text))
    again = HistoryDrafter(tmp_path / "texts", 100, 4)
    assert propose(again, [8, 1, 2]) == [3, 7]
    assert propose(again, [9, 1, 2]) == [5, 6]
    assert propose(again, [3, 4]) == []
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


def test_one_token_is_no_match() -> None:
    """A single token occurs everywhere in so much text."""
    drafter = HistoryDrafter(None, 100, 4)
    drafter.learn(np.array([1, 2, 3]))
    assert propose(drafter, [7, 2]) == []
    assert propose(drafter, [1, 2]) == [3]


def test_the_oldest_texts_go_first(tmp_path: Path) -> None:
    """Memory and file are bounded."""
    drafter = HistoryDrafter(tmp_path / "texts", 10**6, 4, capacity=50)
    for start in range(0, 1000, 20):
        drafter.learn(np.arange(start, start + 20))
    assert len(drafter) == 50
    assert propose(drafter, [990, 991]) == [992, 993, 994, 995]
    assert propose(drafter, [2, 3]) == []
    assert (tmp_path / "texts").stat().st_size < 50 * 4 + 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# My notes\n", "is no history of edgespec"),
        (b"", "is no history of edgespec"),
        (b"edgespec history 1\n\0\1\0", "is no history of edgespec"),
        (b"edgespec history 1\n\0" + bytes(4 * 501), "is no history of edgespec"),
        (b"edgespec history 1\n\0" + (100).to_bytes(4, "little"), "belongs to another vocabulary"),
        (b"edgespec history 1\n\0" + (-2).to_bytes(4, "little", signed=True), "belongs to another vocabulary"),
    ],
    ids=range(6),
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    """Whatever is in it: one line, and the file is as it was."""
    path = tmp_path / "README.md"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        HistoryDrafter(path, 100, 4, capacity=500)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, tiny_bundle: Path) -> None:
    """A folder, or a file in a folder that is not there: before anything is answered, and nothing is created."""
    for path in (tmp_path, tmp_path / "none" / "texts"):
        with pytest.raises(ConfigError, match="choose another"):
            edgespec.load(tiny_bundle, spec=SpecParams(history=path))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_with_a_history_gives_the_same_text(tiny_pair: Path, tmp_path: Path) -> None:
    """The second time the same is asked the drafts come from the first answer; the text stays the target's."""
    spec = SpecParams(drafter="history", history=tmp_path / "texts", num_draft_tokens=4)
    with edgespec.load(tiny_pair, spec=spec) as engine:
        first = engine.chat(HELLO, LONG)
        text = first.text()
        assert first.stats.accepted == 0
    with edgespec.load(tiny_pair, spec=spec) as engine:
        second = engine.chat(HELLO, LONG)
        assert second.text() == text
        assert second.stats.accepted > 40
        assert engine.drafter == "history"


class Parrot(Drafter):
    """Repeats the last token."""

    asked = 0

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        self.asked += 1
        return Draft(np.full(limit, context[-1]))


def test_an_application_s_own_drafter(tiny_pair: Path) -> None:
    """It joins the chain, may be used alone, and changes nothing about the text."""
    with edgespec.load(tiny_pair, spec=SpecParams(drafter="none")) as engine:
        expected = engine.chat(HELLO, LONG).text()
    parrot = Parrot()
    with edgespec.load(tiny_pair, drafters={"parrot": parrot}) as engine:
        assert engine.drafter == "parrot+ngram+model"
        assert engine.chat(HELLO, LONG).text() == expected
        assert parrot.asked > 5
    alone = SpecParams(drafter="parrot", num_draft_tokens=2)
    with edgespec.load(tiny_pair, spec=alone, drafters={"parrot": parrot}) as engine:
        stream = engine.chat(HELLO, LONG)
        assert stream.text() == expected
        assert stream.stats.drafted > 0


def test_names_that_cannot_be(tiny_pair: Path) -> None:
    """A name that is taken, or that nobody has."""
    with pytest.raises(ConfigError, match="the name 'ngram' is taken"):
        edgespec.load(tiny_pair, drafters={"ngram": Parrot()})
    with pytest.raises(ConfigError, match="drafter is 'parrot'; it must be one of auto, none, ngram, model"):
        edgespec.load(tiny_pair, spec=SpecParams(drafter="parrot"))
