"""How an answer is shown while it is made: as Markdown, with drafted text tinted, or as it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.cli import terminal
from edgespec.cli.interrupt import stop_on_interrupt
from edgespec.params import RequestParams

if TYPE_CHECKING:
    from edgespec import TextPiece, TextStream


@dataclass(slots=True)
class Look:
    """How answers look on a terminal.

    Attributes:
        markdown: headings, lists, tables and code are rendered.
        drafts: text whose tokens were drafted is tinted; shown as the model wrote it then.
    """

    markdown: bool = True
    drafts: bool = False


def show(make: Callable[[RequestParams], TextStream], request: RequestParams, look: Look) -> TextStream:
    """Write an answer as it comes, with a line end behind it; Ctrl-C ends it. Gives the stream, which is over."""
    with _running(make, request) as (stream, progress), terminal.quiet_keyboard(), _view(look) as write:
        for piece in stream.pieces():
            progress.stop()
            write(piece)
    return stream


def collect(make: Callable[[RequestParams], TextStream], request: RequestParams) -> tuple[TextStream, list[TextPiece]]:
    """The same, showing nothing but progress."""
    pieces = []
    with _running(make, request) as (stream, progress):
        for piece in stream.pieces():
            progress.stop()
            pieces.append(piece)
    return stream, pieces


@contextlib.contextmanager
def _running(
    make: Callable[[RequestParams], TextStream], request: RequestParams
) -> Iterator[tuple[TextStream, terminal.PrefillProgress]]:
    with terminal.PrefillProgress() as progress:
        stream = make(replace(request, on_prefill=progress))
        with stop_on_interrupt(stream.cancel), stream:
            yield stream, progress


@contextlib.contextmanager
def _view(look: Look) -> Iterator[Callable[[TextPiece], None]]:
    is_capable = terminal.is_capable(sys.stdout)
    if is_capable and look.markdown and not look.drafts:
        from edgespec.cli.markdown import MarkdownView

        view = MarkdownView(terminal.console_on(sys.stdout), terminal.write_raw)
        try:
            yield lambda piece: view.write(terminal.clean(piece.text))
        finally:
            view.close()
        return
    last = ""

    def write(piece: TextPiece) -> None:
        nonlocal last
        last = piece.text[-1]
        if is_capable and look.drafts and piece.is_drafted:
            terminal.write_raw(terminal.tint(terminal.clean(piece.text)))
        else:
            terminal.write(piece.text)

    try:
        yield write
    except BaseException:
        if last not in ("", "\n"):
            terminal.write("\n")
        raise
    if last != "\n":
        terminal.write("\n")
