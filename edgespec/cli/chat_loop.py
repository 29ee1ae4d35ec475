"""The chat of `edgespec run`: questions, streamed answers, commands. The history is the conversation's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.chat import Conversation
from edgespec.cli import terminal
from edgespec.cli.errors import say
from edgespec.cli.run import show, stop_on_interrupt
from edgespec.errors import ConfigError, EdgespecError
from edgespec.params import SamplingParams
from edgespec.stats import GenerationStats

if TYPE_CHECKING:
    from edgespec import Engine

HELP = """\
/help           this list
/reset          forget the conversation; the system prompt stays
/system [TEXT]  show the system prompt, or set it from here on
/stats          figures of the last answer and of the whole chat
/exit           leave (so does the end of input, Ctrl-D or Ctrl-Z)
Ctrl-C stops an answer and keeps what was said; twice at the prompt it leaves."""


def chat_loop(
    engine: Engine, chat: Conversation, params: SamplingParams, read: Callable[[str], str] | None = None
) -> int:
    """Chat until the user leaves; the exit code.

    Args:
        read: shows a prompt and returns a line, or raises EOFError.
    Raises:
        ConfigError: the bundle has no chat template.
    """
    if engine.bundle.manifest.chat_template is None:
        raise ConfigError(f"{engine.bundle.path} has no chat template; give a --prompt to be continued")
    with contextlib.suppress(ImportError):  # line editing and history, where Python has them
        import readline  # noqa: F401
    terminal.note(f"{engine.bundle.manifest.name}, drafter {engine.drafter}; /help for commands, /exit to leave")
    session = _Session(engine, chat, params)
    while (line := _next_line(read or input)) is not None:
        if line.startswith("/"):
            if not session.command(*line[1:].partition(" ")[::2]):
                break
        elif line:
            session.answer(line)
    return 0


def _next_line(read: Callable[[str], str]) -> str | None:
    """A line, or None at the end of input. A Ctrl-C that came too late for the answer must not end the chat."""
    try:
        return read("> ").strip()
    except EOFError:
        terminal.write("\n")
        return None
    except KeyboardInterrupt:
        terminal.write("\n")
        terminal.note("Ctrl-C again leaves, and so does /exit")
    try:
        return read("> ").strip()
    except EOFError:
        return None


class _Session:
    """One chat: the conversation and the figures of its answers."""

    def __init__(self, engine: Engine, chat: Conversation, params: SamplingParams) -> None:
        self._engine = engine
        self._chat = chat
        self._params = params
        self._stats: list[GenerationStats] = []

    def command(self, name: str, argument: str) -> bool:
        """Obey a command; False when it is to leave."""
        argument = argument.strip()
        match name:
            case "exit":
                return False
            case "help":
                terminal.note(HELP)
            case "reset":
                self._chat.reset()
                terminal.note("the conversation is forgotten")
            case "system":
                self._chat.system = argument or self._chat.system
                terminal.note(f"system prompt: {self._chat.system or 'the default of the template'}")
            case "stats":
                self._show_stats()
            case _:
                terminal.note(f"there is no command /{name}; /help lists them")
        return True

    def answer(self, question: str) -> None:
        """Answer a question; an error takes it back and the chat goes on."""
        self._chat.ask(question)
        try:
            stream = self._engine.chat(self._chat.messages(), self._params)
            with stop_on_interrupt(stream.cancel), stream:
                self._chat.answer(show(stream))
        except EdgespecError as error:
            self._chat.take_back()
            say(f"{error}; the question was taken back (/reset forgets the conversation)")
            return
        self._stats.append(stream.stats)
        terminal.note(terminal.footer(stream.stats, stream.finish_reason))

    def _show_stats(self) -> None:
        if not self._stats:
            terminal.note("nothing has been answered yet")
            return
        for name, value in self._stats[-1].as_dict().items():
            terminal.note(f"{name:16} {_figure(value)}")
        total = GenerationStats()
        for stats in self._stats:
            for name in ("new_tokens", "target_passes", "drafted", "accepted"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
        terminal.note(f"whole chat: {len(self._stats)} answers, {terminal.footer(total, None)}")


def _figure(value: object) -> str:
    return "unknown" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
