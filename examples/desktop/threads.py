"""What would make the window wait happens in these threads. They talk to it by signals, which Qt queues for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from PySide6.QtCore import QThread, Signal

import edgespec


class LoadThread(QThread):
    """Makes an engine: `loaded` with it, or `failed` with the reason in one line."""

    loaded = Signal(object)
    failed = Signal(str)

    def __init__(self, make: Callable[[], edgespec.Engine]) -> None:
        super().__init__()
        self._make = make
        self.engine: edgespec.Engine | None = None

    def run(self) -> None:
        try:
            self.engine = self._make()
        except (edgespec.EdgespecError, OSError) as error:
            self.failed.emit(str(error))
        else:
            self.loaded.emit(self.engine)


class AnswerThread(QThread):
    """Has a question answered. While it runs, the conversation is this thread's alone.

    `progress` tells how many of how many tokens of the prompt have been read, `piece` a text and whether it was
    drafted. Then comes `ended` with an error in one line, or with "".
    """

    progress = Signal(int, int)
    piece = Signal(str, bool)
    ended = Signal(str)

    def __init__(self, conversation: edgespec.Conversation, question: str, params: edgespec.SamplingParams) -> None:
        super().__init__()
        self._conversation, self._question, self._params = conversation, question, params
        self._stop = threading.Event()
        self.stream: edgespec.TextStream | None = None

    def stop(self) -> None:
        """End the answer; from any thread, at any time, and it returns at once."""
        self._stop.set()
        if self.stream is not None:
            self.stream.cancel()

    def run(self) -> None:
        error = ""
        try:
            request = edgespec.RequestParams(overflow="drop_oldest", on_prefill=self.progress.emit)
            with self._conversation.ask(self._question, self._params, request) as stream:
                self.stream = stream
                if self._stop.is_set():  # it came before there was a stream to cancel
                    stream.cancel()
                for piece in stream.pieces():
                    self.piece.emit(piece.text, piece.is_drafted)
        except edgespec.EdgespecError as problem:
            error = str(problem)
        self.ended.emit(error)
