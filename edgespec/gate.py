"""`Gate`: one answer at a time, and none in a process or at a time where it cannot be. Knows no models."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from edgespec.errors import BusyError, ConfigError, SessionError
from edgespec.params import RequestParams

_TICK = 0.05  # seconds between two looks at whether the one who waits still wants to


class Closable(Protocol):
    """What may be inside: an answer."""

    def close(self) -> None:
        """End it; returns when it has left the gate."""


class Gate:
    """Lets one in at a time; used from any thread.

    Raises:
        SessionError: from every method, in a process that was forked after the gate was made: threads of ONNX
            Runtime do not survive a fork, and a call would wait for them for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._inside: Callable[[], Closable | None] | None = None
        self._is_open, self._is_closed = True, False

    def enter(
        self,
        visitor: Callable[[], Closable | None] | None = None,
        request: RequestParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Go in; False if cancelled while waiting. `visitor` finds who is inside (a weak reference does).

        Raises:
            BusyError: somebody is inside, and the request does not want to wait (longer).
            ConfigError: the gate is closed.
        """
        self.check()
        if not self._lock.acquire(blocking=False) and not self._wait(request or RequestParams(), cancelled):
            return False
        try:
            self.check_open()
        except ConfigError:
            self._lock.release()
            raise
        self._inside = visitor
        return True

    def leave(self) -> None:
        self._inside = None
        self._lock.release()

    def eject(self) -> None:
        """End what is inside, if anything is."""
        self.check()
        visitor = None if self._inside is None else self._inside()
        if visitor is not None:
            visitor.close()

    def close(self, *, eject: bool = False) -> bool:
        """Let nobody in any more. False if that was done already.

        Args:
            eject: end what is inside, and turn away who is waiting.
        Raises:
            BusyError: somebody is inside, and `eject` is not set.
        """
        self.check()
        if eject:
            self._is_open = False
            self.eject()
        if not self._lock.acquire(blocking=eject):
            raise BusyError("the engine is making an answer: cancel or close its stream first")
        is_first, self._is_open, self._is_closed = not self._is_closed, False, True
        self._lock.release()
        return is_first

    def shut_down(self) -> None:
        """At the end of the interpreter: end what is inside, as its thread would otherwise be killed in mid-call."""
        if os.getpid() == self._pid:
            self._is_open = False
            self.eject()

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise SessionError(
                "this process was forked after the engine was loaded, and ONNX Runtime's threads did not come along: "
                "load the bundle in the new process, or start it with `spawn`"
            )

    def check_open(self) -> None:
        """Raise what `enter` would, but for BusyError."""
        self.check()
        if not self._is_open:
            raise ConfigError("the engine is closed: load the bundle again")

    def _wait(self, request: RequestParams, cancelled: Callable[[], bool]) -> bool:
        if request.busy == "raise":
            raise BusyError("the engine is making another answer: finish, cancel or close that stream first")
        deadline = None if request.timeout is None else monotonic() + request.timeout
        while not cancelled():
            left = _TICK if deadline is None else min(_TICK, deadline - monotonic())
            if left <= 0:
                raise BusyError(f"the engine is still making another answer after {request.timeout:g} s")
            if self._lock.acquire(timeout=left):
                return True
        return False
