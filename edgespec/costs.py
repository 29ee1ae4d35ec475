"""What a call of a model costs: seconds by rows and cached tokens, measured once and corrected while running.

Knows no clocks and no sessions: it is told what was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# An observation moves the estimate by one part in so many. The first follows the load of the machine, which every
# call feels alike; the second the shape of the curve, which belongs to the graph and should hardly move.
_LOAD_HORIZON = 8
_SHAPE_HORIZON = 64
# A call that took longer than this many times what was expected was interrupted: it says nothing about the model.
_OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured seconds of a call.

    Attributes:
        pasts: cached tokens at which was measured, ascending.
        rows: rows of a call at which was measured, ascending, from 1.
        seconds: `seconds[i][j]` at `pasts[i]` and `rows[j]`.
        uncertainty: share by which a time may be wrong, as for most of them; large if the machine was busy, 0 if it is
            not known.
    """

    pasts: tuple[int, ...]
    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    uncertainty: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.seconds) == len(self.pasts) > 0, self
        assert all(len(line) == len(self.rows) > 0 for line in self.seconds), self


class CostCurve:
    """A table between whose points is interpolated, scaled by what is seen while running.

    Args:
        table: measured.
        max_rows: rows up to which costs are asked for; beyond the table's last point it goes on straight.
    """

    def __init__(self, table: CostTable, max_rows: int) -> None:
        self._pasts = table.pasts
        widths = np.arange(max_rows + 1)
        self._lines = np.stack([_extended(table.rows, line, widths) for line in table.seconds])
        self._shape = np.ones(max_rows + 1)
        self._load = 1.0
        self._known: tuple[int, NDArray[np.float64]] | None = None  # asked for several times a round

    @property
    def max_rows(self) -> int:
        return len(self._shape) - 1

    def seconds(self, past: int) -> NDArray[np.float64]:
        """Seconds of calls of 0, 1, ... max_rows rows after `past` tokens: shape (max_rows + 1,); 0 for 0 rows."""
        if self._known is None or self._known[0] != past:
            self._known = past, self._base(past) * self._shape * self._load
        return self._known[1]

    def observe(self, rows: int, past: int, seconds: float) -> None:
        """A call of `rows` rows after `past` tokens took so many seconds."""
        if not 1 <= rows <= self.max_rows:
            return
        ratio = seconds / self.seconds(past).item(rows)
        if ratio > _OUTLIER:
            return
        self._shape[rows] *= ratio ** (1 / _SHAPE_HORIZON)
        self._load *= ratio ** (1 / _LOAD_HORIZON)
        self._known = None

    def _base(self, past: int) -> NDArray[np.float64]:
        if len(self._pasts) == 1:
            first: NDArray[np.float64] = self._lines[0]
            return first
        at = min(max(bisect_right(self._pasts, past), 1), len(self._pasts) - 1)
        low, high = self._pasts[at - 1], self._pasts[at]
        share = max((past - low) / (high - low), 0.0)  # beyond the last point it goes on straight
        line: NDArray[np.float64] = self._lines[at - 1] * (1 - share) + self._lines[at] * share
        return line


def _extended(rows: tuple[int, ...], seconds: tuple[float, ...], widths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds at every width: straight between the measured points and behind the last, 0 at 0 rows."""
    seconds = _non_decreasing(seconds)
    line = np.interp(widths, rows, seconds)
    if len(rows) > 1:
        slope = max((seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]), 0.0)
        line = np.where(widths > rows[-1], seconds[-1] + slope * (widths - rows[-1]), line)
    line[0] = 0.0
    return np.asarray(line, np.float64)


def _non_decreasing(values: tuple[float, ...]) -> tuple[float, ...]:
    """The closest values that never fall (least squares): more rows cannot take less time, but noise can say so.

    Source: pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean = (mean * count + before * number) / (count + number)
            count += number
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))
