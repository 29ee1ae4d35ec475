"""Ctrl-C while an answer is made."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `cancel` instead of raising somewhere in the middle of the engine; a second one raises."""
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        cancel()

    with _handling(handle):
        yield


@contextlib.contextmanager
def no_interrupt() -> Iterator[None]:
    """Ctrl-C does nothing but what the code inside makes of it. For what cannot be left in its middle."""
    with _handling(lambda number, frame: None):
        yield


@contextlib.contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is None or previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
