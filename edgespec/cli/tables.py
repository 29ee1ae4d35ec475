"""Tables and figures: drawn with rich on a terminal, aligned text elsewhere; matplotlib where it is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import terminal
from edgespec.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on stdout. Columns whose cells all begin like a number are flush right."""
    flush = [all(cell[:1] in "0123456789+-<.≥" for row in rows for cell in row[i : i + 1]) for i in range(len(headers))]
    if sys.stdout.isatty():
        _write_rich(headers, rows, flush, title)
        return
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = [title] if title else []
    for row in [headers, *rows]:
        cells = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, flush, strict=True)]
        lines.append("  ".join(cells).rstrip())
    terminal.write("\n".join(lines) + "\n")


def _write_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], flush: Sequence[bool], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=terminal.clean(title) or None, title_justify="left", box=box.SIMPLE_HEAD)
    for header, right in zip(headers, flush, strict=True):
        table.add_column(header, justify="right" if right else "left")
    for row in rows:
        style = "bold red" if "FAILED" in row else "bold" if "best" in row else ""
        table.add_row(*(Text(terminal.clean(cell)) for cell in row), style=style)
    Console(highlight=False, emoji=False).print(table)


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written to `path` at the end of the block; its kind follows from the file's name.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: there is no such kind of file.
    """
    drawing = require_matplotlib()(figsize=(width, height), layout="constrained")
    if path.suffix.lstrip(".").lower() not in drawing.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: name a file that ends in .png, .svg or .pdf")
    yield drawing
    drawing.savefig(path)


def require_matplotlib() -> Any:
    """matplotlib's `Figure`, which draws to files without a display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("--plot needs matplotlib: run `pip install 'edgespec[plot]'`") from error
    return Figure
