"""Where questions come from: an edited line on a terminal that can do that, a plain one elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from edgespec.cli import terminal
from edgespec.cli.errors import one_line
from edgespec.cli.interrupt import no_interrupt

Read = Callable[[str], str]

_MAX_HISTORY = 1 << 20  # bytes; the older half is forgotten beyond it


def reader(history: Path, words: Iterable[str]) -> Read:
    """What shows a prompt and returns what was typed; raises EOFError at the end and KeyboardInterrupt at Ctrl-C.

    Args:
        history: file of earlier questions; made if it is not there.
        words: completed by the Tab key.
    """
    if not (sys.stdin and sys.stdin.isatty() and terminal.is_capable(sys.stdout)):
        return plain
    try:
        return _edited(history, words)
    except OSError as error:
        terminal.note(f"no history of questions: {one_line(error)}")
        return _edited(None, words)


def plain(prompt: str) -> str:
    """A line. The prompt goes to stderr, so that stdout has the answers alone."""
    sys.stdout.flush()
    sys.stderr.write(prompt)
    sys.stderr.flush()
    if sys.stdin is None:
        raise EOFError
    return input()


def _edited(history: Path | None, words: Iterable[str]) -> Read:
    # It takes a while to import, which an answer to a --prompt need not wait for.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else FileHistory(_own_file(history)),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        prompt_continuation=". ",
    )

    def read(prompt: str) -> str:
        # The editor makes a KeyboardInterrupt of the key; one in the midst of its own set-up would break it.
        with no_interrupt():
            return session.prompt(prompt)

    return read


def _own_file(path: Path) -> str:
    """The file, which only its owner can read, and which does not grow for ever."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    if path.stat().st_size > _MAX_HISTORY:
        data = path.read_bytes()
        at = data.find(b"\n# ", len(data) // 2)  # a date begins each entry
        path.write_bytes(data[at + 1 :] if at >= 0 else b"")
    return str(path)
