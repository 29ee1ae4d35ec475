"""How a command ends when it does not end well: one line on stderr, and an exit code.

::

    0    all went well
    1    an error of edgespec or of the system
    2    an option or a parameter is wrong
    130  Ctrl-C
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import click

from edgespec.errors import ConfigError, EdgespecError

INTERRUPTED = 130


def exit_code(error: Exception) -> int:
    """Report an exception and give the exit code that stands for it."""
    if isinstance(error, click.Abort):
        return INTERRUPTED  # click's name for Ctrl-C; it has ended the line
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        _drop_output()
        return 1
    say(one_line(error))
    return 2 if isinstance(error, click.UsageError | ConfigError) else 1


def say(text: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError):  # nobody may be listening there either
        print(f"edgespec: {text}", file=sys.stderr, flush=True)  # noqa: T201


def one_line(error: Exception) -> str:
    """What happened, in one line."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
        if isinstance(error, click.UsageError) and error.ctx is not None:
            text = f"{text.rstrip('.')}; see `{error.ctx.command_path} --help`"
    elif isinstance(error, EdgespecError):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.filename or 'the system'}: {error.strerror or error}"
    else:
        text = f"this is a bug: {type(error).__name__}: {error} (`edgespec --debug ...` shows where)"
    return " ".join(text.split())


def _drop_output() -> None:
    """The reader has gone: keep the interpreter from flushing to it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
