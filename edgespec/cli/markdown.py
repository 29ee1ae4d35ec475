"""An answer in Markdown on a terminal while it is written.

Finished blocks are printed once and never touched again. Of the last block, only the lines that changed are written
anew, so nothing flickers and nothing that scrolled away is redrawn. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from time import perf_counter
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.theme import Theme

_INTERVAL = 1 / 15  # seconds between two drawings
# A model's <tags> are text that must be seen; rich would leave HTML out.
_PARSER = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])


class _LeftHeading(Heading):
    """Headings at the left, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize("bold underline" if self.tag == "h1" else "bold")
        yield self.text


class _PlainCode(CodeBlock):
    """Code without padding, so that it can be selected and pasted."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Syntax("", self.lexer_name, theme=self.theme, background_color="default").highlight(str(self.text))
        text.rstrip()
        text.overflow, text.no_wrap = "fold", False
        yield text


class _Markdown(Markdown):
    """Markdown as models write it: a line end is a line end."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }

    def __init__(self, source: str) -> None:
        super().__init__(source, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def num_finished(source: str) -> int:
    """Length of the beginning of a text whose blocks no later text can change.

    Blocks are decided line by line, so that all but the last one of the complete lines are closed for good.
    """
    starts = _block_starts(source[: source.rfind("\n") + 1])
    return starts[-1] if len(starts) > 1 else 0


def _block_starts(source: str) -> list[int]:
    """Where blocks begin; what shows nothing by itself belongs to the block behind it."""
    tokens = (t for t in _PARSER.parse(source) if t.level == 0 and t.nesting >= 0 and t.map)
    ends = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
    starts = [ends[token.map[0]] for token in tokens if token.map]
    return [0, *starts[1:]] if starts else []


class MarkdownView:
    """Writes an answer to a terminal that understands ANSI sequences.

    Args:
        console: renders; for its width, height and colours.
        write: puts text, escape sequences included, on the terminal.
        interval: seconds between two drawings of the block that is being written.
    """

    def __init__(self, console: Console, write: Callable[[str], None], interval: float = _INTERVAL) -> None:
        self._console = console
        # rich's own has a black background, which not everybody's terminal has.
        self._console.push_theme(Theme({"markdown.code": "cyan"}))
        self._write = write
        self._interval = interval
        self._source = ""
        self._shown: list[str] = []  # lines on the screen that may still change; the cursor is behind the last
        self._has_printed = False
        self._drawn_at = float("-inf")

    def write(self, text: str) -> None:
        """A piece of the answer."""
        self._source += text
        length = num_finished(self._source) if "\n" in text else 0
        if not length and perf_counter() - self._drawn_at < self._interval:
            return
        done = self._take(length)
        # Higher than the screen, a block shows its end until it is finished: what scrolls away stays as it is.
        rest = self._lines(self._source)[1 - self._console.height :]
        self._draw(done + rest)
        self._shown = rest
        self._drawn_at = perf_counter()

    def close(self) -> None:
        """Print what is left, and end the line."""
        self._draw(self._take(len(self._source)))
        if self._has_printed:
            self._write("\n")

    def _take(self, length: int) -> list[str]:
        """Lines of the first characters, which are done with."""
        lines = self._lines(self._source[:length])
        self._source = self._source[length:]
        self._has_printed = self._has_printed or bool(lines)
        return lines

    def _lines(self, source: str) -> list[str]:
        """Rendered lines; a blank one before each block but the very first."""
        lines: list[str] = []
        for start, end in pairwise([*_block_starts(source), len(source)]):
            with self._console.capture() as capture:
                # One column is left free: at the edge terminals differ on where the cursor is.
                self._console.print(_Markdown(source[start:end]), width=self._console.width - 1)
            if lines or self._has_printed:
                lines.append("")
            lines += capture.get().strip("\n").split("\n")
        return lines

    def _draw(self, lines: list[str]) -> None:
        """Make the shown lines these, touching only those from the first difference on."""
        if lines == self._shown:
            return
        pairs = enumerate(zip(lines, self._shown, strict=False))
        at = next((i for i, (new, old) in pairs if new != old), min(len(lines), len(self._shown)))
        if at == len(self._shown):
            out = "\n" if self._shown else ""
        else:
            at = max(0, min(at, len(lines) - 1))
            up = len(self._shown) - 1 - at
            out = (f"\x1b[{up}A" if up else "") + "\r"
        out += "\n".join(line + "\x1b[K" for line in lines[at:])
        if len(lines) < len(self._shown):
            out += "\x1b[J"
        self._write(out)
        self._shown = lines
