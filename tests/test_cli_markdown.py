"""Markdown while it is written: the same in the end as all at once, and nothing is drawn without need."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from edgespec.cli.markdown import MarkdownView, _block_starts, num_finished
from tests.screen import Screen

ANSWER = """\
# Tea

Put the kettle on, and *wait* for it.
Then:

1. warm the pot
2. add `two` spoons
   - or three

   if you like

```python
def brew(minutes):
    return "tea" * minutes   # 茶

```

| leaf | minutes |
|------|--------:|
| black | 4 |
| green | 2 |

> A quotation
> of two lines.

<think>tags are text</think>

Setext
------
An end with an [address](http://example.org) and a **bold** word.
"""
LONG = "\n".join(f"- item {i} of a list that is higher than the screen" for i in range(40)) + "\n\nThe end.\n"
# Each row is wider than all before it, so all lines change with each.
TABLE = "| a | b |\n|---|---|\n" + "".join(f"| {'x' * i} | {i} |\n" for i in range(1, 30)) + "\nThe end.\n"


def drawn(pieces: list[str], *, height: int = 24, width: int = 60, interval: float = 0.0) -> Screen:
    """The screen after an answer came in these pieces, every one of them drawn at once."""
    screen = Screen(height)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="standard")
    view = MarkdownView(console, screen.feed, interval)
    for piece in pieces:
        view.write(piece)
    view.close()
    return screen


def pieces_of(text: str, seed: int, most: int = 16) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", [ANSWER, LONG, TABLE], ids=["mixed", "long", "table"])
def test_pieces_end_up_as_the_whole(text: str, seed: int) -> None:
    """However an answer is cut into pieces, the screen at the end is that of the answer in one piece."""
    height = random.Random(seed).choice([5, 12, 24])
    assert drawn(pieces_of(text, seed), height=height).text() == drawn([text], height=100).text()


def test_what_it_looks_like() -> None:
    """Headings at the left, numbers, code and table as such, line ends and tags kept, links with their address."""
    lines = drawn([ANSWER]).text().split("\n")
    assert lines[:4] == ["Tea", "", "Put the kettle on, and wait for it.", "Then:"]
    for wanted in ("def brew(minutes):", '    return "tea" * minutes   # 茶', "<think>tags are text</think>", "Setext"):
        assert wanted in lines
    text = "\n".join(lines)
    for wanted in (" 1 warm the pot", "black", "address (http://example.org)", "A quotation"):
        assert wanted in text
    assert "**" not in text
    assert "```" not in text


def test_nothing_flickers() -> None:
    """A line of prose is written when it comes and never erased; finished blocks are never touched again."""
    paragraphs = [f"{'word ' * 30}{i}.\n\n" for i in range(5)]
    screen = Screen()
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=24)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        screen.feed(text)

    view = MarkdownView(console, write, interval=0)
    for paragraph in paragraphs:
        for word in paragraph.split(" "):
            before = list(screen.touched)
            view.write(word + " ")
            assert sum(a != b for a, b in zip(before, screen.touched, strict=False)) <= 2
    view.close()
    assert "\x1b[J" not in "".join(written)
    assert max(screen.touched) < 40


def test_drawing_is_bounded_in_time() -> None:
    """Between two drawings passes the interval; what came in between is there at the end."""
    writes: list[str] = []
    view = MarkdownView(Console(file=io.StringIO(), force_terminal=True, width=60), writes.append, interval=3600)
    for word in ["one", "two", "three"]:
        view.write(word + " ")
    assert len(writes) == 1
    view.close()
    assert "three" in "".join(writes)


@pytest.mark.parametrize(
    ("source", "finished"),
    [
        ("", ""),
        ("a\n\n", ""),
        ("a\n\nb", ""),
        ("a\n\nb\n", "a\n\n"),
        ("a\n#", ""),
        ("- a\n\n", ""),
        ("- a\n\n  b\n", ""),
        ("- a\n\nb\n", "- a\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n```\nb\n", "```\na\n```\n"),
        ("# a\nb\n", "# a\n"),
        ("a\n---\n", ""),
        ("[x]: http://y\n\na\n\nb\n", "[x]: http://y\n\na\n\n"),
    ],
)
def test_finished_blocks(source: str, finished: str) -> None:
    """A block is finished when a later one has begun on a line that is complete; an open fence goes on."""
    assert source[: num_finished(source)] == finished


def test_finished_blocks_stay() -> None:
    """Where the beginning of a text counts as finished, there is the border of two blocks in all of it."""
    whole = ANSWER + LONG
    borders = set(_block_starts(whole))
    found = {num_finished(whole[:at]) for at in range(0, len(whole) + 1, 3)}
    assert found <= borders
    assert len(found) > len(borders) / 2
