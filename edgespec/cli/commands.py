"""The commands of a chat: `/help`, `/set`, ... Each is a line of the table at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli import clipboard, terminal
from edgespec.cli.errors import one_line, say
from edgespec.errors import ConfigError, EdgespecError

if TYPE_CHECKING:
    from edgespec.cli.chat_session import ChatSession


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command: what may follow it, what it does in words, and what it does."""

    usage: str
    text: str
    obey: Callable[[ChatSession, str], None]


# What names of counters leave open.
_MEANINGS = {
    "cached_tokens": ", of the prompt: read for earlier answers",
    "read_tokens": ", of the prompt: read by now, cached ones included",
}


class _Leave(Exception):
    """Not an error: the user wants to go."""


def obey(session: ChatSession, line: str) -> bool:
    """Obey a line that begins with a slash; False when it is to leave."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        terminal.note(f"there is no command /{name}; /help lists them")
        return True
    try:
        command.obey(session, argument.strip())
    except _Leave:
        return False
    except (EdgespecError, OSError) as error:
        say(one_line(error))
    return True


def _help(session: ChatSession, argument: str) -> None:
    for name, command in COMMANDS.items():
        terminal.note(f"{f'/{name} {command.usage}':22} {command.text}")
    terminal.note(KEYS)


def _reset(session: ChatSession, argument: str) -> None:
    session.conversation.reset()
    terminal.note("the conversation is forgotten")


def _system(session: ChatSession, argument: str) -> None:
    session.conversation.system = argument or session.conversation.system
    terminal.note(f"system prompt: {session.conversation.system or 'the default of the template'}")


def _set(session: ChatSession, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value.strip():
        session.set(name, value.strip())
    settings = session.settings()
    if name and name not in settings:
        raise ConfigError(f"there is no setting {name}; /set lists them")
    for key in [name] if name else settings:
        terminal.note(f"{key:22} {_setting(settings[key])}")


def _stats(session: ChatSession, argument: str) -> None:
    if not session.stats:
        terminal.note("nothing has been answered yet")
        return
    for name, value in session.stats[-1].as_dict().items():
        terminal.note(f"{name:16} {_figure(value)}{_MEANINGS.get(name, '')}")
    conversation = session.conversation
    terminal.note(f"{'context':16} {conversation.count_tokens()} of {conversation.engine.context_length} tokens")
    terminal.note(f"whole chat: {len(session.stats)} answers, {terminal.footer(session.total(), None)}")


def _save(session: ChatSession, argument: str) -> None:
    name = argument.removesuffix(" caches").strip()
    path = _path(name)
    if path.exists() and str(path) not in session.files and not _is_conversation(path):
        raise ConfigError(f"{path} is there and is no saved conversation: choose another name")
    session.conversation.save(path, caches=name != argument)
    session.files.add(str(path))
    terminal.note(f"saved {len(session.conversation.messages)} messages in {path}")


def _load(session: ChatSession, argument: str) -> None:
    path, old = _path(argument), session.conversation
    session.conversation = type(old).load(path, old.engine)
    session.files.add(str(path))
    messages = session.conversation.messages
    terminal.note(f"loaded {len(messages)} messages from {path}")
    if session.conversation.cache_note:
        terminal.note(session.conversation.cache_note)
    for message in messages[-2:]:
        terminal.note(f"{message['role']}: {message['content']}")


def _undo(session: ChatSession, argument: str) -> None:
    question = session.conversation.undo()
    terminal.note("nothing has been asked yet" if question is None else f"forgotten, with its answer: {question}")


def _retry(session: ChatSession, argument: str) -> None:
    session.retry()


def _copy(session: ChatSession, argument: str) -> None:
    answers = [m["content"] for m in session.conversation.messages if m["role"] == "assistant"]
    if not answers:
        raise ConfigError("nothing has been answered yet")
    terminal.note(f"copied {len(answers[-1])} characters {clipboard.copy(answers[-1])}")


def _exit(session: ChatSession, argument: str) -> None:
    raise _Leave


def _path(name: str) -> Path:
    if not name:
        raise ConfigError("name a file: /save FILE, /load FILE")
    return Path(name).expanduser()


def _is_conversation(path: Path) -> bool:
    with path.open("rb") as stream:
        return b'"edgespec-conversation"' in stream.read(200)


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, ()) else str(value)


def _figure(value: object) -> str:
    return "unknown" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


COMMANDS = {
    "help": Command("", "this list", _help),
    "reset": Command("", "forget the conversation; the system prompt stays", _reset),
    "system": Command("[TEXT]", "show the system prompt, or set it from here on", _system),
    "set": Command("[NAME [VALUE]]", "show or change settings, as in /set temperature 0.8", _set),
    "stats": Command("", "figures of the last answer and of the whole chat", _stats),
    "save": Command("FILE [caches]", "write the conversation; with caches, large, it goes on at once", _save),
    "load": Command("FILE", "go on with a conversation that was saved", _load),
    "undo": Command("", "forget the last question and its answer", _undo),
    "retry": Command("", "answer the last question again", _retry),
    "copy": Command("", "put the last answer on the clipboard", _copy),
    "exit": Command("", "leave (so does the end of input, Ctrl-D or Ctrl-Z)", _exit),
}
KEYS = '''\
Ctrl-C stops an answer and keeps what was said; twice at the prompt it leaves.
Several lines: paste them, or Alt-Enter for a new line, or put """ before and behind them.'''
