"""What a target computed on the way to its last logits: its output `hidden` by position, for drafts to start from.

Knows nothing of tokens: whoever owns the cache says when positions are no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kv import Device

HIDDEN = "hidden"
_LEAST_ROWS = 16


class HiddenRows:
    """Rows of the output `hidden` of the last positions, in a ring.

    Rows are there for positions `first` to `end - 1`, all of which the cache stands for. A call's rows become the
    ring's only after it succeeded.

    Args:
        width: of a row.
        dtype: the output's.
        host: device of the host's memory.
        binding: of the session whose output it is.
    """

    def __init__(self, width: int, dtype: str, host: Device, binding: Any) -> None:
        self.width = width
        self._dtype, self._host, self._binding = dtype, host, binding
        self._output: NDArray[Any] = np.empty((0, width), dtype)
        self._values: dict[int, Any] = {}  # by number of rows
        self._bound = 0
        self._ring = np.empty((_LEAST_ROWS, width), np.float32)
        self.first = self.end = 0

    def bind(self, num_rows: int) -> None:
        """Make room for the rows of a call."""
        if num_rows == self._bound:
            return
        if num_rows > len(self._output):
            self._output, self._values = np.empty((num_rows, self.width), self._dtype), {}
        if num_rows not in self._values:
            self._values[num_rows] = self._host.put(self._output[None, :num_rows])
        self._binding.bind_ortvalue_output(HIDDEN, self._values[num_rows])
        self._bound = num_rows

    def take(self, start: int, stop: int, position: int) -> None:
        """Rows `start` to `stop - 1` of the call just made are of the positions from `position` on."""
        rows = self._output[start:stop]
        if position != self.end:
            self.first = position
        if len(rows) > len(self._ring):
            self._ring = np.empty((2 * len(rows), self.width), np.float32)
            self.first = position
        self.end = position + len(rows)
        self.first = max(self.first, self.end - len(self._ring))
        place = position % len(self._ring)
        before_wrap = min(len(rows), len(self._ring) - place)
        self._ring[place : place + before_wrap] = rows[:before_wrap]
        self._ring[: len(rows) - before_wrap] = rows[before_wrap:]

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def row(self, position: int) -> NDArray[np.float32] | None:
        """The row of a position, a view, or `None` where it is not there (any more)."""
        if not self.first <= position < self.end:
            return None
        found: NDArray[np.float32] = self._ring[position % len(self._ring)]
        return found
