"""Drafts that look back through the target's cache: rows, what becomes of the cache, whole answers. Whole numbers."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgespec
from edgespec.bundle import Bundle, read_bundle
from edgespec.contracts import Interrupted
from edgespec.errors import ContextOverflowError, SessionError
from edgespec.models import fork_draft, open_draft, open_target
from edgespec.ort import Interrupt
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.probe import PASTS, measure_pair
from edgespec.proof.replay import RecurrentReplay
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession
from tests.test_recurrent import GREEDY, MODEL, PROMPTS, SPEC, TABLE, answer, check_answers, check_law, drafted
from tests.tiny import VOCAB, reference_logits
from tests.tiny_hidden import draft_logits, make_hidden_bundle, target_hidden

TEXT = np.random.default_rng(1).integers(0, VOCAB, 60)
NOTHING, NO_TOKENS = np.zeros(2, np.float32), TEXT[:0]
RUNTIME = RuntimeParams(prefill_chunk=8, initial_capacity=8)

Pair = tuple[DecoderSession, RecurrentSession]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Target and draft. Read only."""
    return read_bundle(make_hidden_bundle(tmp_path_factory.mktemp("attention") / "pair", attends=True))


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with a target whose cache cannot be lent."""
    return read_bundle(make_hidden_bundle(tmp_path_factory.mktemp("growing") / "pair", attends=True, shared=False))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with a draft made for a cache of another size."""
    return read_bundle(make_hidden_bundle(tmp_path_factory.mktemp("other") / "pair", attends=True, width=16))


@pytest.fixture
def pair(bundle: Bundle) -> Iterator[Pair]:
    with closing(open_target(bundle, RUNTIME)) as target, closing(open_draft(bundle, RUNTIME, target)) as draft:
        assert isinstance(draft, RecurrentSession)
        assert draft.borrows
        yield target, draft


def expected(start: np.ndarray, seen: np.ndarray, fed: np.ndarray) -> np.ndarray:
    return np.stack([draft_logits(MODEL, TABLE, start, fed[: i + 1], seen) for i in range(len(fed))])


def expected_rows(context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where the target has read all of the context but its last token."""
    before = context[:-1]
    return expected(target_hidden(MODEL, before), before, np.concatenate([context[-1:], tokens]))


def check_target(target: DecoderSession, text: np.ndarray, rows: int = 1) -> None:
    """What follows the last tokens of a text is what it is without any draft."""
    found = target.forward(target.sync(text), rows)
    np.testing.assert_array_equal(found, [reference_logits(MODEL, text[: len(text) - i]) for i in range(rows)][::-1])


def test_a_row_is_a_function_of_the_text(pair: Pair) -> None:
    """Over a walk of reading, rejections, other texts and growing buffers, and nothing the target counts on is lost.

    Chunks, and drafts that make the buffers grow between two of their tokens, are part of it.
    """
    target, draft = pair
    rng = np.random.default_rng(7)
    text, capacities = TEXT[:6], set()
    for _ in range(300):
        keep = len(text) if rng.random() < 0.8 else int(rng.integers(1, len(text) + 1))
        text = np.concatenate([text[:keep], rng.integers(0, 5, rng.integers(1, 12))])[-200:]
        if rng.random() < 0.8:
            pending = target.sync(text)
            if len(pending) > 1:
                target.forward(pending[:-1], 1)
        same = target.tokens[: len(text) - 1] == text[: len(target.tokens)][: len(text) - 1]
        seen = text[: len(same) if same.all() else same.argmin()]
        has_row = target.hidden_after(text[:-1]) is not None
        start = target_hidden(MODEL, text[:-1]) if has_row else NOTHING
        tokens = rng.integers(0, 5, rng.integers(0, 6))
        np.testing.assert_array_equal(
            drafted(draft, text, tokens), expected(start, seen, np.concatenate([text[-1:], tokens]))
        )
        capacities.add(target._cache.capacity)  # type: ignore[union-attr]
        np.testing.assert_array_equal(target.tokens, seen)
        if rng.random() < 0.7:
            accepted = int(rng.integers(0, len(tokens) + 1))
            check_target(target, np.concatenate([text, tokens[:accepted], [3]]), rows=2)
        elif rng.random() < 0.5:
            target.rewind(int(rng.integers(0, len(target.tokens) + 1)))
    assert len(capacities) >= 4


def test_a_buffer_that_grows_in_the_middle_of_a_draft(pair: Pair) -> None:
    """By the draft, whose entries stay, and by the target afterwards, which has all of its own."""
    target, draft = pair
    for capacity, length in ((8, 6), (16, 14), (32, 31)):
        target.forward(target.sync(TEXT[:length]), 1)
        assert target._cache.capacity == capacity  # type: ignore[union-attr]
        context = TEXT[: length + 1]
        np.testing.assert_array_equal(drafted(draft, context, TEXT[:5]), expected_rows(context, TEXT[:5]))
        assert target._cache.capacity == 2 * capacity  # type: ignore[union-attr]
        check_target(target, TEXT[: length + 3], rows=3)


def test_it_looks_back_at_tokens_that_hidden_is_silent_about(pair: Pair) -> None:
    """Of two texts with one row of `hidden`, but another beginning, one is not what the row says."""
    target, draft = pair
    rows = []
    for first in TEXT[:2]:
        text = np.append(first, TEXT[1:20])
        target.forward(target.sync(text), 1)
        row = target.last_hidden()
        assert row is not None
        row[:] = target_hidden(MODEL, TEXT[:20])
        context = np.append(text, 5)
        rows.append(drafted(draft, context, NO_TOKENS)[0])
        np.testing.assert_array_equal(rows[-1], draft_logits(MODEL, TABLE, row, context[-1:], text))
    assert not np.array_equal(*rows)


def test_the_target_may_go_on_between_two_steps(pair: Pair) -> None:
    """A draft that is not told writes behind what the target has read meanwhile."""
    target, draft = pair
    target.forward(TEXT[:10], 1)
    draft.forward(draft.sync(TEXT[:11]), 1)
    target.forward(target.sync(TEXT[:20]), 1)
    for token in TEXT[11:14]:
        draft.forward(np.array([token]), 1)
    check_target(target, TEXT[:22], rows=2)
    draft.rewind(3)
    draft.forward(TEXT[:2], 1)
    draft.pretend(5)
    draft.forward(TEXT[:2], 1)
    check_target(target, TEXT[:24], rows=2)


def test_an_interrupted_draft_starts_anew(pair: Pair) -> None:
    """A call that was ended leaves nothing behind that the next one would go on from."""
    target, draft = pair
    target.forward(TEXT[:20], 1)
    draft.interrupt = Interrupt()
    draft.interrupt.set()
    draft.sync(TEXT[:21])
    with pytest.raises(Interrupted):
        draft.forward(TEXT[20:21], 1)
    draft.interrupt = None
    np.testing.assert_array_equal(drafted(draft, TEXT[:21], TEXT[21:24]), expected_rows(TEXT[:21], TEXT[21:24]))


def test_the_context_ends(pair: Pair) -> None:
    """The last token has a place; one more is an error, after which everything goes on."""
    target, draft = pair
    text = np.random.default_rng(2).integers(0, VOCAB, 512)
    target.forward(text[:511], 1)
    np.testing.assert_array_equal(drafted(draft, text, NO_TOKENS), expected_rows(text, NO_TOKENS))
    with pytest.raises(ContextOverflowError, match="513 tokens do not fit the draft's context of 512"):
        draft.forward(TEXT[:1], 1)
    np.testing.assert_array_equal(drafted(draft, text[:500], TEXT[:2]), expected_rows_after(target, text[:500]))


def expected_rows_after(target: DecoderSession, context: np.ndarray) -> np.ndarray:
    """The target has thrown the row away, but the cache is there."""
    assert target.last_hidden() is None
    return expected(NOTHING, context[:-1], np.concatenate([context[-1:], TEXT[:2]]))


# where the target's cache cannot be used


def _other_provider(target: DecoderSession) -> None:
    target.provider = "SomeOtherProvider"


@pytest.mark.parametrize(
    ("name", "change"), [("growing", lambda target: None), ("other", lambda target: None), ("bundle", _other_provider)]
)
def test_it_falls_back_to_a_cache_of_its_own(
    name: str, change: Callable[[DecoderSession], None], request: pytest.FixtureRequest
) -> None:
    """It then sees what it drafted, in any number, and neither reads, rewinds nor writes what the target has."""
    opened: Bundle = request.getfixturevalue(name)
    with closing(open_target(opened, RUNTIME)) as target:
        change(target)
        with closing(open_draft(opened, RUNTIME, target)) as draft:
            assert isinstance(draft, RecurrentSession)
            assert not draft.borrows
            target.forward(TEXT[:30], 1)
            before = {key: array.tobytes() for key, array in target.read_cache().items()}
            for context in (TEXT[:31], TEXT[:21], TEXT[30:40]):
                fed = np.concatenate([context[-1:], TEXT[:40]])
                is_there = len(context) == 31
                start = target_hidden(MODEL, context[:-1]) if is_there else NOTHING
                found = drafted(draft, context, TEXT[:40])
                np.testing.assert_array_equal(found, expected(start, NO_TOKENS, fed))
            assert {key: array.tobytes() for key, array in target.read_cache().items()} == before
            draft.pretend(200)
            np.testing.assert_array_equal(draft.forward(TEXT[:1], 1), expected(NOTHING, NO_TOKENS, TEXT[:1]))
            _, table = measure_pair(target, draft, 0.01)
            assert len(table.pasts) == 1


@pytest.mark.parametrize("name", ["growing", "other"])
def test_answers_with_a_cache_of_its_own(name: str, request: pytest.FixtureRequest) -> None:
    """Text is plain decoding's all the same."""
    path = request.getfixturevalue(name).path
    with edgespec.load(path, spec=SPEC) as fast, edgespec.load(path, spec=SpecParams(drafter="none")) as plain:
        for prompt in PROMPTS:
            assert answer(fast, prompt) == answer(plain, prompt)


# whole answers


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=60, temperature=50, seed=3)])
@pytest.mark.parametrize("runtime", [RuntimeParams(initial_capacity=8), RuntimeParams(exact=True), RUNTIME])
def test_answers_are_the_plain_ones(bundle: Bundle, params: SamplingParams, runtime: RuntimeParams) -> None:
    """Greedy and coupled texts are those without drafts, over many rounds with rejections; about half is accepted."""
    check_answers(bundle.path, params, runtime)


def test_the_law_is_the_targets(bundle: Bundle) -> None:
    """The whole losslessness test, which knows where each of the draft's rows started."""
    check_law(bundle.path)


def test_remembered_rows_know_their_start(pair: Pair) -> None:
    """The same text drafted from two places gives two rows; the target reads what it has not."""
    draft = pair[1]
    draft.reads = True
    replay = RecurrentReplay(draft, recheck_every=3)
    for _ in range(8):
        for start in (20, 21, 22):
            context, tokens = TEXT[:start], TEXT[start:24]
            pending, rows = replay.sync(context), []
            for i in range(len(tokens) + 1):
                rows.append(replay.forward(pending, 1)[0].copy())
                pending = tokens[i : i + 1]
            np.testing.assert_array_equal(np.stack(rows), expected_rows(context, tokens))
    assert replay.num_changed == 0
    assert replay.num_rechecked > 0


# several sessions


def test_forks_have_the_cache_of_their_own_target(bundle: Bundle) -> None:
    """Two pairs on the same weights, drafting and reading in turns: each sees its own text, and loses nothing."""
    with closing(open_target(bundle, RUNTIME)) as first, closing(open_draft(bundle, RUNTIME, first)) as draft:
        with closing(first.fork()) as second, closing(fork_draft(draft, second)) as fork:
            texts, sessions = (TEXT, TEXT[::-1]), ((first, draft), (second, fork))
            for length in range(5, 40, 3):
                for text, (target, its) in zip(texts, sessions, strict=True):
                    target.forward(target.sync(text[:length]), 1)
                    its.forward(its.sync(text[: length + 1]), 1)
                for text, (_, its) in zip(texts, sessions, strict=True):
                    found = its.forward(text[:1], 1)
                    np.testing.assert_array_equal(found, expected_rows(text[: length + 1], text[:1])[1:])
                for text, (target, _) in zip(texts, sessions, strict=True):
                    check_target(target, text[: length + 2], rows=2)
        target, its = first, draft
        target.forward(target.sync(TEXT[:50]), 1)
        np.testing.assert_array_equal(drafted(its, TEXT[:51], TEXT[:9]), expected_rows(TEXT[:51], TEXT[:9]))  # type: ignore[arg-type]


def test_engines_on_the_same_weights(bundle: Bundle, tmp_path: Path) -> None:
    """Streams in turns, and a cache file into another engine, give what each gives alone."""
    runtime = RuntimeParams(initial_capacity=8)
    with edgespec.load(bundle.path, spec=SPEC, runtime=runtime) as engine, engine.fork() as fork:
        alone = [answer(engine, prompt) for prompt in PROMPTS]
        streams = [engine.generate(PROMPTS[0], GREEDY), fork.generate(PROMPTS[1], GREEDY)]
        for _ in itertools.zip_longest(*streams):
            pass
        assert [list(stream.token_ids) for stream in streams] == alone[:2]
        engine.save_caches(tmp_path / "caches.npz")
        with edgespec.load(bundle.path, spec=SPEC, runtime=runtime) as new:
            new.load_caches(tmp_path / "caches.npz")
            stream = new.generate(PROMPTS[0], GREEDY)
            stream.text()
            assert list(stream.token_ids) == alone[0]
            assert stream.stats.cached_tokens > 0
            assert stream.stats.accepted > 0


def test_a_cache_that_was_written_is_seen(pair: Pair, bundle: Bundle) -> None:
    """Its buffers are new ones, to which the draft is bound as well."""
    target, draft = pair
    with closing(open_target(bundle, RUNTIME)) as source:
        source.forward(TEXT[:40], 1)
        target.write_cache(TEXT[:40], source.read_cache())
    context = TEXT[:41]
    fed = np.concatenate([context[-1:], TEXT[:3]])
    np.testing.assert_array_equal(drafted(draft, context, TEXT[:3]), expected(NOTHING, TEXT[:40], fed))
    check_target(target, TEXT[:43], rows=2)


def test_closing_lets_go(bundle: Bundle) -> None:
    """A draft that is closed is not kept by its target, which goes on, nor the target by it."""
    target = open_target(bundle, RUNTIME)
    for _ in range(2):
        draft = open_draft(bundle, RUNTIME, target)
        target.forward(target.sync(TEXT[:10]), 1)
        draft.forward(draft.sync(TEXT[:11]), 1)
        known = weakref.ref(draft._binding)
        draft.close()
        gc.collect()
        assert known() is None
    check_target(target, TEXT[:50], rows=2)
    engine = edgespec.load(bundle.path, spec=SPEC)
    answer(engine, PROMPTS[0])
    assert engine._draft is not None
    bindings = [weakref.ref(session._binding) for session in (engine._target, engine._draft)]
    engine.close()
    gc.collect()
    assert [binding() for binding in bindings] == [None, None]
    target.close()


# what it costs, and what is refused


def test_a_step_is_measured_after_several_lengths(pair: Pair) -> None:
    """As in use: the token stands behind so many cached ones."""
    target, draft = pair
    _, table = measure_pair(target, draft, 0.01)
    assert table.rows == (1,)
    assert len(table.pasts) == len(PASTS)
    assert len(target.tokens) == 0
    for length in (7, 100):
        draft.pretend(length)
        target._cache.write([np.ones((1, 1, 200, 8), np.float32)] * 2, 200)
        j = np.arange(length)
        cached = int((j % 11 + 1 + j % 7 + 1).sum())
        own = (length % 11 + 1) * MODEL.key[7] + (length % 7 + 1) * MODEL.value[7]
        # At position 1 for the chain that starts from zeros, and behind `length` for the cache.
        state = (MODEL.key[7] * 2 + MODEL.value[7] * 2) % 251
        row = TABLE[(2 * ((cached + own) % 251) - state) % 251][draft.head.ids]  # type: ignore[union-attr]
        np.testing.assert_array_equal(draft.forward(np.array([7]), 1)[0], row)


@pytest.mark.parametrize("change", ["past_len", "layers", "missing"])
def test_graphs_that_are_something_else(change: str, bundle: Bundle, tmp_path: Path) -> None:
    """Lengths of two texts, two layers, a cache that is not given back: one line."""
    model = onnx.load(bundle.path / "draft" / "model.onnx")
    value, match = helper.make_tensor_value_info, "the draft's attention must be of one layer"
    if change == "past_len":
        (found,) = (v for v in model.graph.input if v.name == "past_len")
        found.CopyFrom(value("past_len", TensorProto.INT64, ["n"]))
    elif change == "layers":
        model.graph.input.append(value("past_key_values.1.key", TensorProto.FLOAT, [1, 1, "C", 8]))
        model.graph.output.append(value("present.1.key", TensorProto.FLOAT, [1, 1, "C", 8]))
        model.graph.node.append(helper.make_node("Identity", ["past_key_values.1.key"], ["present.1.key"]))
    else:
        (found,) = (v for v in model.graph.output if v.name == "present.0.key")
        model.graph.output.remove(found)
        match = "but not the output present.0.key"
    onnx.save(model, tmp_path / "model.onnx")
    with closing(open_target(bundle, RUNTIME)) as target, pytest.raises(SessionError, match=match):
        RecurrentSession(tmp_path / "model.onnx", target=target, context_length=64, runtime=RUNTIME)
