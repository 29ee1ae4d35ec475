"""Texts beside the question: files and piped input, and the prompt that is made of both. Knows no models."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from edgespec.cli import terminal
from edgespec.errors import ConfigError

_MAX_SIZE = 8 << 20  # bytes; no context takes in more, and tokenising more takes gigabytes
_PATIENCE = 2.0  # seconds without a first byte of stdin, after which we say what we are waiting for
_LONG_PATIENCE = 8.0  # more seconds after which text beside a prompt is not waited for any longer


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the name by which a question may speak of it; piped input has none."""

    text: str
    name: str | None = None


def read_file(path: Path) -> Document:
    """A file as a document.

    Raises:
        ConfigError: it is too large, empty, or no text.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:  # a device or pipe does not say how large it is
        data = stream.read(_MAX_SIZE + 1)
    if len(data) > _MAX_SIZE:
        raise _too_large(str(path))
    text = _decode(data, str(path))
    if not text.strip():
        raise ConfigError(f"{path} is empty: name a file with text, or leave it out")
    return Document(text, path.name)


def read_stdin(*, is_needed: bool) -> str | None:
    """What is piped in, or `None` where stdin is a terminal or closed, or where nothing comes and nothing has to.

    Args:
        is_needed: wait for ever. Otherwise stdin may be a pipe that somebody forgot, into which nobody ever writes:
            after a while without a first byte we go on without it, and say so.
    Raises:
        UsageError: it is no text, or does not end where any context does.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    reader = _Reader()
    if not reader.has_begun.wait(_PATIENCE):
        terminal.note("waiting for text on stdin; `< /dev/null` (Windows: `< NUL`) says that there is none")
        if not reader.has_begun.wait(None if is_needed else _LONG_PATIENCE):
            terminal.note("nothing came on stdin: going on without it")
            return None
    try:
        return _decode(reader.data(), "stdin")
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def compose(question: str, documents: Sequence[Document]) -> str:
    """The user's message: the documents, each between marks, and the question behind them."""
    parts = []
    for document in documents:
        name = "" if document.name is None else f' name="{document.name}"'
        parts.append(f"<document{name}>\n{document.text}\n</document>\n\n")
    return "".join(parts) + question


def _too_large(name: str) -> ConfigError:
    return ConfigError(f"{name} is larger than {_MAX_SIZE >> 20} MiB: give a part of it")


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}): convert it first") from error


class _Reader:
    """Reads stdin in a thread of its own: no system lets us ask all kinds of stdin whether there is something."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._has_ended = threading.Event()
        self._chunks: list[bytes] = []
        self._size = 0
        self._error: OSError | ConfigError | None = None
        self._stream = sys.stdin
        try:
            # Not through sys.stdin, whose lock a thread that waits for ever would keep from the end of the program; and
            # a descriptor of its own, since whoever closes stdin meanwhile sets its number free for another file.
            self._descriptor: int | None = os.dup(self._stream.fileno())
        except io.UnsupportedOperation:  # no real file, as in tests of applications
            self._descriptor = None
        threading.Thread(target=self._work, name="edgespec-stdin", daemon=True).start()

    def data(self) -> bytes:
        """All of it, waiting for the end."""
        while not self._has_ended.wait(0.1):  # in pieces, so that Ctrl-C is noticed on every system
            pass
        if self._error is not None:
            raise self._error
        return b"".join(self._chunks)

    def _work(self) -> None:
        try:
            while chunk := self._read():
                self._chunks.append(chunk)
                self._size += len(chunk)
                if self._size > _MAX_SIZE:
                    raise _too_large("stdin")
                self.has_begun.set()
        except (OSError, ConfigError) as error:
            self._error = error
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
        self._has_ended.set()
        self.has_begun.set()

    def _read(self) -> bytes:
        return self._stream.buffer.read() if self._descriptor is None else os.read(self._descriptor, 1 << 20)
