"""The asynchronous twins: the same text, a loop that is never blocked, cancellation that leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import BusyError, ConfigError, Conversation, Engine, RequestParams, RuntimeParams, SamplingParams

HELLO = [{"role": "user", "content": "Hello!"}]
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
WAIT = RequestParams(busy="wait")


def pause(context: np.ndarray, row: np.ndarray) -> np.ndarray:
    time.sleep(0.02)
    return row


SLOW = SamplingParams(max_new_tokens=400, ignore_eos=True, logits_processor=pause)


@pytest.fixture
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with edgespec.load(tiny_pair, runtime=RuntimeParams(prefill_chunk=4)) as engine:
        yield engine


def run(coroutine: Coroutine[object, object, None]) -> None:
    """Run it, and see that no thread of ours is left."""
    asyncio.run(asyncio.wait_for(coroutine, 60))
    assert not [t for t in threading.enumerate() if t.name == "edgespec-answer"]


def test_the_same_text(engine: Engine) -> None:
    """Pieces, text, figures and drafted marks are those of the synchronous stream."""
    expected = engine.chat(HELLO, LONG)
    expected.text()

    async def main() -> None:
        async with engine.achat(HELLO, LONG) as stream:
            assert "".join([piece async for piece in stream]) == expected.text_so_far
            assert [piece async for piece in stream] == []
        assert (stream.finish_reason, stream.token_ids) == ("length", expected.token_ids)
        assert (stream.stats.new_tokens, stream.prefill_progress, stream.dropped) == (60, 1, ())
        assert await engine.agenerate([5, 6, 7], LONG).text() == engine.generate([5, 6, 7], LONG).text()
        pieces = [piece async for piece in engine.achat(HELLO, LONG).pieces()]
        assert "".join(p.text for p in pieces) == expected.text_so_far
        assert any(p.is_drafted for p in pieces)

    run(main())


def test_the_loop_goes_on(engine: Engine) -> None:
    """While the model works, timers of the loop fire on time."""

    async def main() -> None:
        delays: list[float] = []

        async def tick() -> None:
            while True:
                start = time.perf_counter()
                await asyncio.sleep(0.001)
                delays.append(time.perf_counter() - start)

        ticking = asyncio.create_task(tick())
        async with engine.achat(HELLO, SLOW) as stream:
            count = 0
            async for _ in stream:
                count += 1
                if count == 5:
                    break
        ticking.cancel()
        # A step takes 40 ms and more; had it blocked the loop, no tick would be shorter.
        assert np.median(delays) < 0.02
        assert len(delays) > 20

    run(main())


def test_cancelling_a_task_cancels_the_answer(engine: Engine) -> None:
    """With `async with` and without: when the task is gone, the engine is free."""
    expected = engine.chat(HELLO, LONG).text()

    async def main() -> None:
        for is_managed in (True, False):
            stream = engine.achat(HELLO, SLOW)

            async def consume(stream: edgespec.AsyncTextStream = stream, is_managed: bool = is_managed) -> None:
                if is_managed:
                    async with stream:
                        await stream.text()
                else:
                    async for _ in stream:
                        pass

            task = asyncio.create_task(consume())
            while not stream.token_ids:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (stream.finish_reason, stream.is_over) == ("cancelled", True)
            assert engine.chat(HELLO, LONG).text() == expected

    run(main())


def test_errors_come_where_the_consumer_is(engine: Engine) -> None:
    """Nothing is raised when the stream is made; the first piece raises, and later ones end."""

    async def main() -> None:
        for stream, error in (
            (engine.achat([], LONG), ConfigError),
            (engine.agenerate("", LONG), ConfigError),
            (engine.agenerate("x" * 600, LONG), edgespec.ContextOverflowError),
        ):
            with pytest.raises(error):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await stream.aclose()
        async with engine.achat(HELLO, SLOW) as holder:
            await anext(holder)
            with pytest.raises(BusyError):
                await engine.achat(HELLO, LONG).text()
        await engine.achat(HELLO, LONG).aclose()  # never begun

    run(main())


def test_many_tasks_wait_for_each_other(engine: Engine) -> None:
    """More tasks than an executor has threads: all are answered."""
    expected = engine.chat(HELLO, LONG).text()

    async def main() -> None:
        streams = [engine.achat(HELLO, LONG, WAIT) for _ in range(50)]
        texts = await asyncio.gather(*(stream.text() for stream in streams))
        assert texts == [expected] * 50
        for stream in streams:
            await stream.aclose()

    run(main())


def test_a_dropped_stream_is_cancelled(engine: Engine) -> None:
    """Breaking out of a loop over a stream that nobody holds ends the answer."""

    async def main() -> None:
        async for _ in engine.achat(HELLO, SLOW):
            break
        gc.collect()
        while True:
            try:
                engine.chat(HELLO, LONG).text()
                break
            except BusyError:
                await asyncio.sleep(0.01)
        while any(t.name == "edgespec-answer" for t in threading.enumerate()):
            await asyncio.sleep(0.01)

    run(main())


def test_a_loop_that_ends_ends_the_answer(engine: Engine) -> None:
    """An event loop closed under a running answer leaves neither an error nor a busy engine."""

    async def main() -> None:
        stream = engine.achat(HELLO, SLOW)
        await anext(stream)
        kept.append(stream)

    kept: list[edgespec.AsyncTextStream] = []
    asyncio.run(main())
    assert engine.chat(HELLO, LONG, RequestParams(busy="wait", timeout=20)).text()


def test_conversations_too(engine: Engine) -> None:
    """`aask` and `areply` keep the history as `ask` and `reply` do."""
    by_hand = Conversation(engine)
    for question in ("one", "two"):
        by_hand.ask(question, LONG).text()

    async def main() -> None:
        chat = Conversation(engine)
        for question in ("one", "two"):
            assert await chat.aask(question, LONG).text()
        assert chat.messages == by_hand.messages
        chat.edit(2, "two")
        assert await chat.areply(LONG).text()
        assert chat.messages == by_hand.messages
        async with chat.aask("three", SLOW) as stream:
            stream.cancel()
            assert await stream.text() == ""
        assert chat.messages == by_hand.messages
        with pytest.raises(edgespec.ContextOverflowError):
            await chat.aask("x" * 900, LONG).text()
        assert chat.messages == by_hand.messages

    run(main())
