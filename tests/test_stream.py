"""What a stream does besides giving text: cancelling, waiting, limits, progress, log-probabilities, overflow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

import edgespec
from edgespec import (
    BusyError,
    ConfigError,
    ContextOverflowError,
    Engine,
    RequestParams,
    RuntimeParams,
    SamplingParams,
    SpecParams,
)
from tests.tiny import reference_logits, tiny_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello!"}]
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=400, ignore_eos=True)
WAIT = RequestParams(busy="wait")


@pytest.fixture
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with edgespec.load(tiny_pair, runtime=RuntimeParams(prefill_chunk=4)) as engine:
        yield engine


@pytest.fixture
def expected(engine: Engine) -> str:
    return engine.chat(HELLO, LONG).text()


def slow(seconds: float) -> SamplingParams:
    """An endless answer with a pause at each row."""

    def pause(context: np.ndarray, row: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return row

    return SamplingParams(max_new_tokens=400, ignore_eos=True, logits_processor=pause)


def in_thread(function: object) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_second_call_waits_if_it_is_told_to(engine: Engine, expected: str) -> None:
    """With `wait`, eight threads all get the right answer."""
    texts: list[str] = []

    def work() -> None:
        texts.extend(engine.chat(HELLO, LONG, WAIT).text() for _ in range(3))

    threads = [in_thread(work) for _ in range(8)]
    for thread in threads:
        thread.join()
    assert texts == [expected] * 24


def test_waiting_has_an_end(engine: Engine, expected: str) -> None:
    """After the timeout it is a BusyError that says how long was waited; cancelling ends the wait without one."""
    with engine.chat(HELLO, ENDLESS) as holder:
        next(holder)
        start = time.monotonic()
        with pytest.raises(BusyError, match=r"after 0.12 s"):
            engine.chat(HELLO, LONG, RequestParams(busy="wait", timeout=0.12)).text()
        assert 0.1 < time.monotonic() - start < 5
        waiting = engine.chat(HELLO, LONG, WAIT)
        threading.Timer(0.1, waiting.cancel).start()
        assert waiting.text() == ""
        assert waiting.finish_reason == "cancelled"
    assert engine.chat(HELLO, LONG).text() == expected


def test_closing_from_another_thread_ends_the_answer(engine: Engine, expected: str) -> None:
    """`close` and `engine.cancel` return when the engine is free; the iterating thread sees the end of its loop."""
    for end in ("close", "cancel", "exit"):
        pieces: list[str] = []
        stream = engine.chat(HELLO, slow(0.002))
        thread = in_thread(lambda stream=stream, pieces=pieces: pieces.extend(stream))
        while not pieces:
            time.sleep(0.001)
        if end == "close":
            stream.close()
        elif end == "cancel":
            engine.cancel()
        else:
            stream.__exit__(None, None, None)
        assert stream.is_over
        assert engine.chat(HELLO, LONG).text() == expected
        thread.join()
        assert stream.finish_reason == "cancelled"
        assert stream.text_so_far == "".join(pieces)


def test_closing_the_engine_cancels_only_if_asked(tiny_pair: Path) -> None:
    """`close(cancel=True)` ends a half-read answer, and so does an exception that leaves the `with` block."""
    engine = edgespec.load(tiny_pair)
    stream = engine.chat(HELLO, LONG)
    next(stream)
    with pytest.raises(BusyError, match="cancel or close"):
        engine.close()
    engine.close(cancel=True)
    assert stream.finish_reason == "cancelled"
    with pytest.raises(ConfigError, match="closed"):
        engine.chat(HELLO)
    with pytest.raises(ZeroDivisionError), edgespec.load(tiny_pair) as other:
        next(other.chat(HELLO, LONG))
        raise ZeroDivisionError


def test_closing_turns_away_who_waits(tiny_pair: Path) -> None:
    """Eight threads in line and one inside: all end, and the engine is closed once, whoever closes it."""
    engine = edgespec.load(tiny_pair)
    outcomes: list[str | None] = []

    def work() -> None:
        try:
            with engine.chat(HELLO, slow(0.002), WAIT) as stream:
                stream.text()
            outcomes.append(stream.finish_reason)
        except ConfigError as error:
            outcomes.append(str(error))

    threads = [in_thread(work) for _ in range(8)]
    time.sleep(0.1)
    closers = [in_thread(lambda: engine.close(cancel=True)) for _ in range(3)]
    for thread in threads + closers:
        thread.join()
    assert sorted(outcomes) == ["cancelled"] + ["the engine is closed: load the bundle again"] * 7


def test_a_stream_that_was_never_read_holds_nothing(engine: Engine, expected: str) -> None:
    """Made, closed and asked again: it is over, and never was in anybody's way."""
    stream = engine.chat(HELLO, LONG)
    assert engine.chat(HELLO, LONG).text() == expected
    stream.close()
    stream.close()
    assert (stream.finish_reason, stream.text(), stream.is_over) == ("cancelled", "", True)
    assert engine.chat(HELLO, LONG).text() == expected


def test_an_error_is_no_finish_reason(engine: Engine, expected: str) -> None:
    """An exception from a hook reaches the loop, frees the engine and leaves no reason."""

    def fail(read: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), engine.generate("some words", LONG, RequestParams(on_prefill=fail)) as s:
        s.text()
    assert (s.finish_reason, s.is_over) == (None, True)
    assert engine.chat(HELLO, LONG).text() == expected


def test_prefill_shows_progress(engine: Engine) -> None:
    """The hook sees every chunk and the end, cached tokens counted; the share is there for other threads."""
    seen: list[tuple[int, int]] = []
    request = RequestParams(on_prefill=lambda read, total: seen.append((read, total)))
    prompt = list(range(10, 31))
    stream = engine.generate(prompt, LONG, request)
    assert stream.prefill_progress == 0
    stream.text()
    assert seen == [(4, 21), (8, 21), (12, 21), (16, 21), (20, 21), (21, 21)]
    assert stream.prefill_progress == 1
    seen.clear()
    engine.generate([*prompt[:10], *range(100, 107)], LONG, request).text()
    assert seen == [(10, 17), (14, 17), (17, 17)]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_prefill_can_be_cancelled(engine: Engine, expected: str, end: str) -> None:
    """From the hook itself, too: nothing more is read, and the engine goes on."""
    engine.generate([5]).close()

    def stop(read: int, total: int) -> None:
        if read >= 8:
            getattr(stream, end)()

    stream = engine.generate(list(range(10, 90)), LONG, RequestParams(on_prefill=stop))
    assert stream.text() == ""
    assert stream.finish_reason == "cancelled"
    assert (stream.stats.read_tokens, stream.stats.new_tokens) == (8, 0)
    assert stream.prefill_progress == 8 / 80
    assert engine.chat(HELLO, LONG).text() == expected


def test_a_cancelled_stream_leaves_no_flag_behind(engine: Engine) -> None:
    """After a cancel, the sessions can be used by whoever comes next, directly as well."""
    with engine.chat(HELLO, ENDLESS) as stream:
        next(stream)
        stream.cancel()
    assert [session.interrupt for session in engine._sessions] == [None, None]


def test_time_is_a_limit(engine: Engine) -> None:
    """The answer ends soon after `max_time`, says so, and what there is of it is the beginning of the whole."""
    start = time.monotonic()
    params = SamplingParams(
        max_new_tokens=400, ignore_eos=True, max_time=0.1, logits_processor=slow(0.01).logits_processor
    )
    stream = engine.chat(HELLO, params)
    text = stream.text()
    assert stream.finish_reason == "time"
    assert 0.1 <= time.monotonic() - start < 5
    assert 0 < stream.stats.new_tokens < 60
    assert engine.chat(HELLO, LONG).text().startswith(text)


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("temperature", [0, 50.0])
def test_logprobs_are_the_model_s_own(tiny_pair: Path, drafter: str, temperature: float) -> None:
    """Log-softmax of the logits by definition, whatever bias and temperature the answer was chosen with."""
    model = tiny_model(eos_bonus=272)
    params = SamplingParams(
        temperature=temperature, seed=3, max_new_tokens=40, ignore_eos=True, logprobs=3, logit_bias={40: 300.0}, top_k=9
    )
    with edgespec.load(tiny_pair, spec=SpecParams(drafter=drafter)) as engine:
        prompt = tiny_tokenizer().encode("Once", add_special_tokens=False).ids
        stream = engine.generate(prompt, params)
        stream.text()
    assert [found.token for found in stream.logprobs] == stream.token_ids
    for i, found in enumerate(stream.logprobs):
        row = log_softmax(reference_logits(model, np.array(prompt + stream.token_ids[:i])).astype(np.float64))
        best = np.argsort(-row, kind="stable")[:3]
        ids = [token for token, _ in found.top]
        assert len(set(ids)) == 3
        assert row[ids].tolist() == row[best].tolist()  # tied tokens may come in any order
        np.testing.assert_allclose([value for _, value in found.top], row[best], atol=1e-4)
        assert found.logprob == pytest.approx(row[found.token], abs=1e-4)


def test_logprobs_end_where_the_answer_does(engine: Engine, expected: str) -> None:
    """Behind a stop string there are neither tokens nor their log-probabilities; unasked there are none."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, stop=[expected[20:23]], logprobs=0)
    stream = engine.chat(HELLO, params)
    stream.text()
    assert stream.finish_reason == "stop"
    assert len(stream.logprobs) == len(stream.token_ids) > 0
    assert all(found.top == () for found in stream.logprobs)
    plain = engine.chat(HELLO, LONG)
    plain.text()
    assert plain.logprobs == []


def test_pieces_tell_what_was_drafted(tiny_pair: Path, expected: str) -> None:
    """As many characters are marked as drafts were accepted, in a model of one character a token."""
    # A fixed number: how much the controller drafts depends on what else the machine does.
    with edgespec.load(tiny_pair, spec=SpecParams(num_draft_tokens=4)) as engine:
        stream = engine.chat(HELLO, LONG)
        pieces = list(stream.pieces())
    assert "".join(p.text for p in pieces) == expected
    assert all(p.text for p in pieces)
    num_silent = 60 - len(expected)  # special tokens have no text
    drafted = sum(len(p.text) for p in pieces if p.is_drafted)
    assert 0 < stream.stats.accepted - num_silent <= drafted <= stream.stats.accepted
    with edgespec.load(tiny_pair, spec=SpecParams(drafter="none")) as plain:
        assert not any(p.is_drafted for p in plain.chat(HELLO, LONG).pieces())


@pytest.mark.parametrize("name", ["fork", "other drafter"])
def test_forks_share_weights_and_nothing_else(engine: Engine, expected: str, name: str) -> None:
    """Two engines on one set of sessions answer different prompts at the same time, and outlive each other."""
    spec = None if name == "fork" else SpecParams(drafter="ngram")
    fork = engine.fork(spec)
    assert [a.session is b.session for a, b in zip(engine._sessions, fork._sessions, strict=False)] == [True] * len(
        fork._sessions
    )
    other = [{"role": "user", "content": "Something else"}]
    both: list[str] = []
    alone = engine.chat(other, LONG).text()
    with fork.chat(other, LONG) as a, engine.chat(HELLO, LONG) as b:
        for x, y in zip(a, b, strict=False):
            both += [x, y]
        a.text()
        b.text()
        assert (a.text_so_far, b.text_so_far) == (alone, expected)
        assert len(both) > 4
    results: dict[str, str] = {}
    threads = [
        in_thread(lambda: results.update(a=fork.chat(HELLO, LONG).text())),
        in_thread(lambda: results.update(b=engine.chat(other, LONG).text())),
    ]
    for thread in threads:
        thread.join()
    assert results == {"a": expected, "b": alone}
    engine.close()
    assert fork.chat(HELLO, LONG).text() == expected
    fork.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.fork()


def conversation(num_turns: int, words: str = "some words") -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be brief."}]
    for i in range(num_turns):
        messages += [{"role": "user", "content": f"{words} {i}"}, {"role": "assistant", "content": f"answer {i}"}]
    return [*messages, {"role": "user", "content": "the last question"}]


def test_stopping_at_the_end_of_the_context(engine: Engine) -> None:
    """By default the answer takes what is left of the context and says that it is full."""
    prompt = conversation(9)
    room = engine.context_length - engine.count_tokens(prompt)
    assert 0 < room < 100
    stream = engine.chat(prompt, ENDLESS)
    stream.text()
    assert (stream.finish_reason, len(stream.token_ids), stream.dropped) == ("context", room, ())
    with pytest.raises(ContextOverflowError, match="shorten"):
        engine.chat(conversation(13), LONG)


def test_refusing_what_does_not_fit(engine: Engine) -> None:
    """Prompt and budget must fit to the token, or nothing is begun."""
    prompt = conversation(9)
    room = engine.context_length - engine.count_tokens(prompt)
    for budget, fits in ((room, True), (room + 1, False)):
        params = SamplingParams(max_new_tokens=budget, ignore_eos=True)
        if fits:
            stream = engine.chat(prompt, params, RequestParams(overflow="refuse"))
            assert len(stream.text()) > 0
            assert stream.finish_reason == "length"
        else:
            with pytest.raises(ContextOverflowError, match=f"leaves {room} of {budget}"):
                engine.chat(prompt, params, RequestParams(overflow="refuse"))


def test_dropping_the_oldest_turns(engine: Engine) -> None:
    """The stream says what was left out; the answer is that of the conversation without it."""
    messages = conversation(30)
    stream = engine.chat(messages, LONG, RequestParams(overflow="drop_oldest"))
    text = stream.text()
    num_dropped = len(stream.dropped)
    assert num_dropped > 0
    assert list(stream.dropped) == messages[1 : 1 + num_dropped]
    kept = [messages[0], *messages[1 + num_dropped :]]
    assert kept[1]["role"] == "user"
    with engine.fork(SpecParams(drafter="none")) as fresh:
        assert fresh.chat(kept, LONG).text() == text
    assert stream.finish_reason == "length"


def test_a_growing_conversation_is_seldom_read_again(engine: Engine) -> None:
    """Turn after turn beyond the context, most turns read only what is new: the cut moves in steps."""
    messages, reread = conversation(5), 0
    for i in range(30):
        stream = engine.chat(messages, SamplingParams(max_new_tokens=10), RequestParams(overflow="drop_oldest"))
        answer = stream.text()
        # Each turn adds fewer than 60 tokens; where more is read the cut has moved.
        new = stream.stats.prompt_tokens - stream.stats.cached_tokens
        reread += new > 80
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{i}"}]
    assert stream.dropped
    assert 2 <= reread <= 12


def test_a_last_turn_that_does_not_fit(engine: Engine) -> None:
    """Neither the system prompt nor the question is ever dropped."""
    messages = [*conversation(3)[:-1], {"role": "user", "content": "x" * 600}]
    with pytest.raises(ContextOverflowError, match="last turn and the system prompt have"):
        engine.chat(messages, LONG, RequestParams(overflow="drop_oldest"))
    with pytest.raises(ConfigError, match="no turns"):
        engine.generate("text", LONG, RequestParams(overflow="drop_oldest"))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (RequestParams, {"overflow": "shrink"}, "overflow is 'shrink'"),
        (RequestParams, {"busy": True}, "busy is True"),
        (RequestParams, {"timeout": -1}, "timeout is -1"),
        (RequestParams, {"on_prefill": 3}, "on_prefill is 3"),
        (SamplingParams, {"max_time": 0}, "max_time is 0"),
        (SamplingParams, {"logprobs": -1}, "logprobs is -1"),
        (SamplingParams, {"logprobs": True}, "logprobs is True"),
        (RuntimeParams, {"exact": "yes"}, "exact is 'yes'"),
        (RuntimeParams, {"verify_hashes": 1}, "verify_hashes is 1"),
        (RuntimeParams, {"provider": None}, "provider is None"),
    ],
)
def test_wrong_parameters_are_refused(kind: type, values: dict[str, object], message: str) -> None:
    """One line with the name, the value and what it must be."""
    with pytest.raises(ConfigError, match=message):
        kind(**values)
