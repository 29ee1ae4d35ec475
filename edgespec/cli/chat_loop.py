"""The chat of `edgespec run`: reads a line, obeys it or has it answered, until the user leaves."""

from __future__ import annotations

from edgespec.bundle import cache_dir
from edgespec.cli import terminal
from edgespec.cli.chat_session import ChatSession
from edgespec.cli.commands import COMMANDS, obey
from edgespec.cli.lines import Read, reader

_QUOTES = '"""'


def chat_loop(session: ChatSession, read: Read | None = None) -> int:
    """Chat until the user leaves; the exit code.

    Args:
        read: shows a prompt and returns a line, or raises EOFError.
    """
    engine = session.conversation.engine
    read = read or reader(cache_dir() / "chat_history", [f"/{name}" for name in COMMANDS])
    name = terminal.clean_line(engine.bundle.manifest.name)
    terminal.note(f"{name}, drafter {engine.drafter}; /help for commands, /exit to leave")
    for document in session.documents:
        terminal.note(f"{document.name} goes with the first question: {engine.count_tokens(document.text)} tokens")
    while (line := _next_text(read)) is not None:
        if line.startswith("/"):
            if not obey(session, line):
                break
        elif line:
            session.ask(line)
    return 0


def _next_text(read: Read) -> str | None:
    """A question or command, or None at the end of input.

    A Ctrl-C that came too late for the answer must not end the chat; two in a row raise.
    """
    try:
        return _text(read)
    except EOFError:
        terminal.note("")
        return None
    except KeyboardInterrupt:
        terminal.note("Ctrl-C again leaves, and so does /exit")
    try:
        return _text(read)
    except EOFError:
        terminal.note("")
        return None


def _text(read: Read) -> str:
    """A line; or what is between two times three quotation marks, over several lines."""
    line = read("> ").strip()
    if not line.startswith(_QUOTES):
        return line
    text = line.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + read(". ")
    return text.rstrip().removesuffix(_QUOTES).strip()
