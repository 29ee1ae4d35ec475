"""`TextStream`: an answer for a loop. Knows threads and answers, nothing behind them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType

from edgespec.answer import Answer, AnswerView, TextPiece


class TextStream(AnswerView, Iterator[str]):
    """An answer while it is made: iterate it for pieces of text, in `with` or without.

    Nothing happens before the first piece is asked for; then the engine works for this stream alone until it ends.
    Leaving the loop early and closing the stream (or leaving its `with` block, or dropping it) frees the engine. All
    methods may be called from any thread. Threads that iterate at the same time share the pieces as those of a queue:
    each piece goes to one of them, and `text_so_far` has them all.

    Iterating raises what `Engine.chat` says, and BusyError, SessionError or ContextOverflowError where the engine
    is busy, ONNX Runtime fails or the prompt does not fit.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._turn = threading.RLock()  # one thread at a time is in the generator
        self._is_running = False
        self._iterator = answer.run(weakref.ref(self))

    def __next__(self) -> str:
        return self._next().text

    def pieces(self) -> Iterator[TextPiece]:
        """The same pieces, each with the knowledge whether it was drafted. Instead of iterating the stream."""
        while True:
            try:
                yield self._next()
            except StopIteration:
                return

    def text(self) -> str:
        """The whole answer, waiting for what is not there yet."""
        for _ in self.pieces():
            pass
        return self.text_so_far

    def close(self) -> None:
        """End the answer here and free the engine. Where another thread is making a piece, wait until it stops."""
        if not self.is_over:
            self.cancel()
        with self._turn:
            if self._is_running:  # called from a hook inside it: it ends when that returns
                return
            self._iterator.close()
            self._answer.end("cancelled")

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> TextPiece:
        with self._turn:
            self._is_running = True
            try:
                return next(self._iterator)
            finally:
                self._is_running = False
