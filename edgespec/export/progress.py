"""How a long job says where it is. Owns the protocol and a silent implementation.

Knows nothing of terminals: the bar is drawn by whoever calls the export.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What the export tells its caller while it works."""

    def step(self, name: str) -> None:
        """A new step begins; the one before it is finished."""

    def advance(self, fraction: float) -> None:
        """This part of the current step is done, from 0 to 1."""

    def note(self, text: str) -> None:
        """Something worth a line: a size, a figure."""

    def warn(self, text: str) -> None:
        """Something was degraded, and the user must know."""


class SilentProgress:
    """Says nothing; keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def step(self, name: str) -> None:
        pass

    def advance(self, fraction: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)
