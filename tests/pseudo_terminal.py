"""`edgespec` on a real pseudo-terminal, and somebody who types. Not on Windows, which has none in Python."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class Terminal:
    """A process on a pseudo-terminal.

    Args:
        args: of `edgespec`.
        cache: its cache folder.
        out: stdout goes to this file instead of the terminal.
        term: what kind of terminal it is told to have.

    Attributes:
        seen: what came and was not waited for yet.
        transcript: all that came.
    """

    def __init__(self, *args: object, cache: Path, out: Path | None = None, term: str = "xterm") -> None:
        import pty

        self._ours, theirs = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        # This terminal does not answer when it is asked where its cursor is.
        env |= {"TERM": term, "COLUMNS": "200", "LINES": "40", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env["EDGESPEC_CACHE"] = str(cache)
        command = [sys.executable, "-m", "edgespec", *map(str, args)]
        with contextlib.ExitStack() as stack:
            stdout = theirs if out is None else stack.enter_context(out.open("wb"))
            self.child = subprocess.Popen(
                command, stdin=theirs, stdout=stdout, stderr=theirs, env=env, start_new_session=True
            )
        os.close(theirs)
        self.seen = self.transcript = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Read until `text` is seen; what came up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            self._read(0.1)
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_prompt(self) -> None:
        """Until lines are edited: the terminal has been told to mark what is pasted."""
        self.wait_for("\x1b[?2004h")

    def end(self, seconds: float = 30) -> int:
        """Wait for the process to end; its exit code."""
        deadline = time.monotonic() + seconds
        while self.child.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.seen!r}"
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.child.returncode

    def interrupt(self, is_noticed: Callable[[], bool], seconds: float = 30) -> None:
        """Ctrl-C, as often as it takes: one between the prompt and the wait for a key is seen at the next key."""
        deadline = time.monotonic() + seconds
        while not is_noticed():
            assert time.monotonic() < deadline, f"no reaction but {self.seen!r}"
            os.killpg(self.child.pid, signal.SIGINT)
            quiet = time.monotonic() + 2
            while not is_noticed() and time.monotonic() < quiet:
                self._read(0.05)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            text = os.read(self._ours, 1 << 16).decode(errors="replace")
        except OSError:  # the child has gone
            return False
        self.seen += text
        self.transcript += text
        return bool(text)
