"""`AsyncTextStream`: a `TextStream` for `async for`. Knows asyncio and streams, nothing behind them.

asyncio is imported where it is used, and then is loaded already: it would be a fourth of `import edgespec`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from edgespec.answer import AnswerView, TextPiece
from edgespec.stream import TextStream

if TYPE_CHECKING:
    import asyncio


class AsyncTextStream(AnswerView, AsyncIterator[str]):
    """An answer while it is made, for an event loop, which it never blocks.

    A thread of its own works from the first piece that is asked for to the end of the answer and puts the pieces into
    a queue; it does not wait for a slow consumer, so the engine is free as soon as it can be. Where the task that
    iterates is cancelled, the answer is, and the engine is free when CancelledError is raised. Leave a loop early
    inside `async with`, or call `aclose`.

    For one event loop and one consumer. Statistics are of what was made, not of what was consumed; after `cancel`,
    pieces that were made already still come.
    """

    def __init__(self, stream: TextStream) -> None:
        super().__init__(stream._answer)
        self._stream = stream
        self._pump: _Pump | None = None

    async def __anext__(self) -> str:
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece.text

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """The same pieces, each with the knowledge whether it was drafted. Instead of iterating the stream."""
        while (piece := await self._next()) is not None:
            yield piece

    async def text(self) -> str:
        """The whole answer, waiting for what is not there yet."""
        while await self._next() is not None:
            pass
        return self.text_so_far

    async def aclose(self) -> None:
        """End the answer here; when it returns the engine is free and the thread is gone."""
        import asyncio

        self.cancel()
        if self._pump is None:
            self._stream.close()
        else:
            await asyncio.shield(self._pump.finished())

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()  # the thread holds the stream, not this object

    async def _next(self) -> TextPiece | None:
        import asyncio

        if self._pump is None:
            self._pump = _Pump(self._stream)
        try:
            return await self._pump.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise


class _Pump:
    """The thread that makes the pieces, and the queue to the event loop."""

    def __init__(self, stream: TextStream) -> None:
        import asyncio

        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[TextPiece | BaseException | None] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._is_over = False
        # A daemon: the end of the interpreter ends the answer instead of waiting for it.
        self._thread = threading.Thread(target=self._work, args=(stream,), name="edgespec-answer", daemon=True)
        self._thread.start()

    async def get(self) -> TextPiece | None:
        """The next piece, or `None` at the end, as often as it is asked for."""
        if self._is_over:
            return None
        item = await self._queue.get()
        self._is_over = not isinstance(item, TextPiece)
        if self._is_over:
            await self.finished()
        if isinstance(item, BaseException):
            raise item
        return item

    async def finished(self) -> None:
        await self._finished.wait()
        self._thread.join()

    def _work(self, stream: TextStream) -> None:
        last: BaseException | None = None
        try:
            for piece in stream.pieces():
                if not self._call(self._queue.put_nowait, piece):
                    break
        except BaseException as error:  # it is raised where the consumer is
            last = error
        stream.close()
        self._call(self._queue.put_nowait, last)
        self._call(self._finished.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call it in the event loop; False if that is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True
