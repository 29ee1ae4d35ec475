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
import traceback
from pathlib import Path

import click

from edgespec.bundle import cache_dir
from edgespec.cli.terminal import clean, clean_line
from edgespec.errors import ConfigError, EdgespecError

INTERRUPTED = 130


def exit_code(error: BaseException, *, debug: bool = False) -> int:
    """Report an exception and give the exit code that stands for it.

    Args:
        debug: report it with its traceback.
    """
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED  # click's name for Ctrl-C; it has ended the line
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        _drop_output()
        return 1
    if debug:
        with contextlib.suppress(OSError):
            sys.stderr.write(clean("".join(traceback.format_exception(error))))
            sys.stderr.flush()
    else:
        say(one_line(error))
    return 2 if isinstance(error, click.UsageError | ConfigError) else 1


def say(text: str) -> None:
    """One line on stderr, with nothing in it that a terminal would obey."""
    with contextlib.suppress(OSError):  # nobody may be listening there either
        print(f"edgespec: {clean_line(text)}", file=sys.stderr, flush=True)  # noqa: T201


def one_line(error: BaseException) -> str:
    """What happened, in one line."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
        if isinstance(error, click.UsageError) and error.ctx is not None:
            text = f"{text.rstrip('.')}; see `{error.ctx.command_path} --help`"
    elif isinstance(error, EdgespecError):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.filename or 'the system'}: {error.strerror or error}{_origin(error.filename)}"
    else:
        text = f"this is a bug: {type(error).__name__}: {error} (`edgespec --debug ...` shows where)"
    return clean_line(text)


def _origin(name: object) -> str:
    """Where a path comes from that nobody has typed."""
    if not os.environ.get("EDGESPEC_CACHE") or not isinstance(name, str):
        return ""
    is_ours = Path(name).absolute().is_relative_to(cache_dir().absolute())
    return "; the variable EDGESPEC_CACHE names the cache folder" if is_ours else ""


def _drop_output() -> None:
    """The reader has gone: keep the interpreter from flushing to it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
