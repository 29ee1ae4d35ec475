"""A terminal's screen: as much of one as our output uses. What it does not know is an error."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\](?:[^\x07]*)\x07|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """Lines of text and a cursor. `height` lines are in sight; those above can no longer be reached.

    Attributes:
        lines: all of them, those that scrolled away included.
        touched: how often characters were put on or erased from each line.
    """

    def __init__(self, height: int = 24) -> None:
        self.lines = [""]
        self.touched = [0]
        self._height = height
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        at = 0
        for match in _PART.finditer(text):
            assert match.start() == at, f"unknown at {text[at : at + 20]!r}"
            at = match.end()
            argument, command, move, plain = match.groups()
            if plain:
                self._put(plain)
            elif move:
                self._move(move)
            elif command:
                self._obey(command, argument)
        assert at == len(text), f"unknown at {text[at:]!r}"

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def _put(self, text: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        self._set(line[: self._column] + text + line[self._column + len(text) :])
        self._column += len(text)

    def _set(self, line: str) -> None:
        self.lines[self._row] = line
        self.touched[self._row] += 1

    def _move(self, to: str) -> None:
        self._column = 0
        if to == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
                self.touched.append(0)

    def _obey(self, command: str, argument: str) -> None:
        if command == "A":
            self._row -= int(argument or 1)
            assert self._row >= max(0, len(self.lines) - self._height), "above the top of the screen"
        elif command == "K":
            if len(self.lines[self._row]) > self._column:
                self._set(self.lines[self._row][: self._column])
        elif command == "J":
            del self.lines[self._row + 1 :], self.touched[self._row + 1 :]
            self._obey("K", "")
        else:
            assert command == "m", (command, argument)
