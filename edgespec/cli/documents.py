"""Texts beside the question: files and piped input, and the prompt that is made of both. Knows no models."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from edgespec.cli import terminal
from edgespec.errors import ConfigError

_MAX_SIZE = 64 << 20  # bytes; no context takes in a fraction of it
_PATIENCE = 2.0  # seconds without an end of the input, after which we say what we are waiting for


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the name by which a question may speak of it; piped input has none."""

    text: str
    name: str | None = None


def read_file(path: Path) -> Document:
    """A file as a document.

    Raises:
        ConfigError: it is too large or no text.
        OSError: it cannot be read.
    """
    if path.stat().st_size > _MAX_SIZE:
        raise ConfigError(f"{path} is larger than {_MAX_SIZE >> 20} MiB: give a part of it")
    return Document(_decode(path.read_bytes(), str(path)), path.name)


def read_stdin() -> str | None:
    """What is piped in, or `None` where stdin is a terminal or nothing.

    Raises:
        UsageError: it is no text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    hint = "reading stdin to its end; `< /dev/null` (Windows: `< NUL`) says that there is nothing"
    timer = threading.Timer(_PATIENCE, terminal.note, [hint])
    timer.daemon = True
    timer.start()
    try:
        data = sys.stdin.buffer.read()
    finally:
        timer.cancel()
    try:
        return _decode(data, "stdin")
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def compose(question: str, documents: Sequence[Document]) -> str:
    """The user's message: the documents, each between marks, and the question behind them."""
    parts = []
    for document in documents:
        name = "" if document.name is None else f' name="{document.name}"'
        parts.append(f"<document{name}>\n{document.text}\n</document>\n\n")
    return "".join(parts) + question


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}): convert it first") from error
