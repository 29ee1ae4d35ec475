"""Drafts that are told what prompt lookup would propose: which hint, of which text. Whole numbers throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgespec
from edgespec.bundle import Bundle, read_bundle
from edgespec.contracts import Interrupted
from edgespec.errors import SessionError
from edgespec.lookup import LONGEST_HINT, NUM_HINT_KINDS, HintIndex, find_hints
from edgespec.models import fork_draft, open_draft, open_target
from edgespec.ort import Interrupt
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession
from tests.test_recurrent import PROMPTS, SPEC, answer, drafted
from tests.tiny import VOCAB
from tests.tiny_hidden import HEAD_IDS, TRUST, make_hidden_bundle

COLUMNS = {int(token): column for column, token in enumerate(HEAD_IDS)}
RUNTIME = RuntimeParams()

Pair = tuple[DecoderSession, RecurrentSession, RecurrentSession]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "attends"])
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """With hints and without. Read only."""
    folder = tmp_path_factory.mktemp("hints")
    hinted = make_hidden_bundle(folder / "hinted", attends=request.param, hinted=True)
    return read_bundle(hinted), read_bundle(make_hidden_bundle(folder / "silent", attends=request.param))


@pytest.fixture
def pair(bundles: tuple[Bundle, Bundle]) -> Iterator[Pair]:
    """A target, the draft that is told, and the same that is not."""
    hinted, silent = bundles
    with (
        closing(open_target(hinted, RUNTIME)) as target,
        closing(open_draft(hinted, RUNTIME, target)) as draft,
        closing(open_draft(silent, RUNTIME, target)) as other,
    ):
        assert isinstance(draft, RecurrentSession)
        assert isinstance(other, RecurrentSession)
        yield target, draft, other


def hint_of(text: list[int]) -> tuple[int, int]:
    """From the definition."""
    for length in range(min(LONGEST_HINT, len(text) - 1), 0, -1):
        places = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
        if places:
            counts = Counter(text[i] for i in places)
            last = {text[i]: i for i in places}
            token = max(counts, key=lambda t: (counts[t], last[t]))
            return token, length + LONGEST_HINT * (len(counts) == 1)
    return 0, 0


def with_hints(rows: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows after the context and after each of the tokens, with what the hints add."""
    text = [*context.tolist(), *tokens.tolist()]
    for i, row in enumerate(rows):
        token, kind = hint_of(text[: len(context) + i])
        if kind and token in COLUMNS:
            row[COLUMNS[token]] += TRUST * kind
    return rows


def test_the_definition() -> None:
    """Matches of every length, sure and not, and none."""
    rng, kinds = np.random.default_rng(3), set()
    for _ in range(60):
        text = rng.integers(0, rng.integers(2, 8), rng.integers(1, 40)).tolist()
        found = find_hints(text)
        assert found == [hint_of(text[:end]) for end in range(1, len(text) + 1)]
        kinds |= {kind for _, kind in found}
    assert kinds == set(range(NUM_HINT_KINDS))


def test_a_text_that_changes_at_its_end() -> None:
    """What was cut off says nothing any more, and leaves nothing behind."""
    rng, index, text = np.random.default_rng(4), HintIndex(), [1]
    index.append(1)
    for _ in range(400):
        text = text[: rng.integers(1, len(text) + 1)] if rng.random() < 0.3 else [*text, int(rng.integers(0, 4))]
        index.cut(min(len(index), len(text)))
        for token in text[len(index) :]:
            index.append(token)
        assert index.find() == hint_of(text)
    index.cut(0)
    assert not index._following


def test_a_row_has_the_hint_of_its_text(pair: Pair) -> None:
    """Over drafts, rejections, edits and texts that outgrow the buffer; tokens that the head has not are no hints."""
    target, draft, other = pair
    rng, num_unknown = np.random.default_rng(5), 0
    text = rng.integers(0, 9, 6)
    for i in range(120):
        keep = len(text) if rng.random() < 0.8 else int(rng.integers(1, len(text) + 1))
        text = np.concatenate([text[:keep], rng.integers(0, 9, rng.integers(1, 6))])
        if rng.random() < 0.8:
            target.forward(target.sync(text), 1)
        tokens = rng.integers(0, 9, rng.integers(0, 6))
        expected = with_hints(drafted(other, text, tokens), text, tokens)
        np.testing.assert_array_equal(drafted(draft, text, tokens), expected, err_msg=str(i))
        token, kind = hint_of(text.tolist())
        num_unknown += bool(kind) and token not in COLUMNS
    assert num_unknown > 5


def test_a_long_text(pair: Pair) -> None:
    """Longer than the buffer is at first, by the text and in the middle of a draft."""
    draft, other = pair[1:]
    for length in (1023, 1024, 1025, 1500):
        text = np.random.default_rng(length).integers(0, VOCAB, length)
        draft.context_length = other.context_length = 4096
        tokens = text[length // 2 : length // 2 + 4]
        draft.target.rewind(0)
        expected = with_hints(drafted(other, text, tokens), text, tokens)
        np.testing.assert_array_equal(drafted(draft, text, tokens), expected)
        assert hint_of([*text.tolist(), *tokens.tolist()])[1] >= LONGEST_HINT


TEXT = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2])


def test_the_next_state_is_the_same(pair: Pair) -> None:
    """What a hint adds is in the row alone."""
    target, draft, other = pair
    target.forward(target.sync(TEXT), 1)
    drafted(draft, TEXT, TEXT[2:5])
    state = draft._state.copy()
    drafted(other, TEXT, TEXT[2:5])
    np.testing.assert_array_equal(state, other._state)
    assert state.any()


def test_without_a_text_there_is_no_hint(pair: Pair) -> None:
    """After `rewind`, `pretend` and an interrupted call, until the next `sync`; several tokens at once have theirs."""
    target, draft, other = pair
    target.forward(target.sync(TEXT), 1)
    rows = drafted(draft, TEXT, TEXT[2:4])
    draft.sync(TEXT)
    np.testing.assert_array_equal(draft.forward(np.concatenate([TEXT[-1:], TEXT[2:4]]), 2), rows[1:])
    for start in ("rewind", "pretend"):
        drafted(draft, TEXT, TEXT[2:3])
        found = []
        for session in (draft, other):
            getattr(session, start)(len(target.tokens))
            found.append(session.forward(TEXT[:2], 2).copy())
        np.testing.assert_array_equal(*found)
    draft.interrupt = Interrupt()
    draft.interrupt.set()
    draft.sync(TEXT)
    with pytest.raises(Interrupted):
        draft.forward(TEXT[-1:], 1)
    draft.interrupt = None
    assert draft.forward(TEXT[:1], 1).max() < TRUST
    np.testing.assert_array_equal(drafted(draft, TEXT, TEXT[2:4]), rows)


def test_a_fork_has_a_text_of_its_own(pair: Pair, bundles: tuple[Bundle, Bundle]) -> None:
    """Two sessions on the same weights, one token of each in turn."""
    target, draft, _ = pair
    with (
        closing(open_target(bundles[0], RUNTIME)) as second,
        closing(fork_draft(draft, second)) as fork,
    ):
        texts = (TEXT, np.array([3, 1, 3]))
        for session, text in zip((target, second), texts, strict=True):
            session.forward(session.sync(text), 1)
        expected = [drafted(draft, texts[0], TEXT[2:4]), drafted(fork, texts[1], TEXT[2:4])]
        found: list[list[np.ndarray]] = [[], []]
        pending = [draft.sync(texts[0]), fork.sync(texts[1])]
        for i in range(3):
            for session, rows, tokens in zip((draft, fork), found, pending, strict=True):
                rows.append(session.forward(tokens, 1)[0].copy())
            pending = [TEXT[2 + i : 3 + i]] * 2
        np.testing.assert_array_equal(found, expected)


def test_a_head_with_all_tokens(bundles: tuple[Bundle, Bundle]) -> None:
    """A column is a token then; a token beyond the last column is no hint."""
    path = bundles[0].path / "draft" / "model.onnx"
    text = np.array([2, 9, 2, VOCAB - 1, 5, VOCAB - 1, 2])
    with (
        closing(open_target(bundles[0], RUNTIME)) as target,
        closing(RecurrentSession(path, target=target, context_length=64, runtime=RUNTIME)) as draft,
    ):
        first = drafted(draft, text[:3], text[:0])[0]
        assert first.argmax() == 9
        assert drafted(draft, text, text[:0])[0].max() < TRUST


def test_it_copies(bundles: tuple[Bundle, Bundle]) -> None:
    """A draft that trusts hints drafts what prompt lookup proposes, and the text is plain decoding's."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with (
        edgespec.load(bundles[0].path, spec=SpecParams(drafter="none")) as plain,
        edgespec.load(bundles[0].path, spec=SPEC) as fast,
    ):
        for prompt in PROMPTS:
            assert answer(fast, prompt, params) == answer(plain, prompt, params)
        draft = fast._draft
        assert draft is not None
        pending, text = draft.sync(TEXT), TEXT.tolist()
        for _ in range(8):
            text.append(int(HEAD_IDS[draft.forward(pending, 1)[0].argmax()]))
            pending = np.array(text[-1:])
        assert text[len(TEXT) :] == [3, 4, 5, 1, 2, 3, 4, 5]


def test_hints_of_another_shape_are_refused(bundles: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    """One line, before anything is computed."""
    model = onnx.load(bundles[0].path / "draft" / "model.onnx")
    (hint,) = (value for value in model.graph.input if value.name == "hint")
    hint.type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(model, tmp_path / "model.onnx")
    with (
        closing(open_target(bundles[0], RUNTIME)) as target,
        pytest.raises(SessionError, match="no draft without a cache"),
    ):
        RecurrentSession(tmp_path / "model.onnx", target=target, context_length=64, runtime=RUNTIME)
