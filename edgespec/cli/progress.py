"""Progress of work that knows how far it is: a bar on a terminal, a line for each part elsewhere. Times as options."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

import click

from edgespec.cli import terminal

_MAX_SECONDS = 1e6  # eleven days


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Callback of an option that is a time: `60s`, `2m`, `1.5` for seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min)?", value.strip())
    if found is None or not 0 < float(found[1]) < _MAX_SECONDS:
        raise click.BadParameter(f"{value!r} is no time; write 60s or 2m")
    return float(found[1]) * (60 if found[2] in ("m", "min") else 1)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A function to be told what is being done and how much of the whole is done, from 0 to 1."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def say(text: str, fraction: float) -> None:
            part = text.partition(":")[0]
            if part not in said:
                said.add(part)
                terminal.note(f"{part} ...")

        yield say
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal.console_on(sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, fraction: bar.update(task, description=terminal.clean(text), completed=fraction)
