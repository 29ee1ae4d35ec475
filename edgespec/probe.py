"""Measures what calls of a session cost. Knows no bundles and no files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Scorer
from edgespec.costs import CostTable
from edgespec.invariance import probe_tokens
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession

Times: TypeAlias = NDArray[np.float64]


class Measurable(Scorer, Protocol):
    """A `Scorer` that can behave as if it had read a text."""

    def pretend(self, length: int) -> None:
        """Behave as if so many tokens were cached."""


# Rows: dense where a draft may begin to pay, sparse where the curve is straight.
ROWS = (1, 2, 3, 5, 9, 17)
# Cached tokens: a first sentence, a long document.
PASTS = (16, 1024)
_STEADY = 0.02  # of a median: its error at which no more is measured
# Whatever else the machine does only adds to a time: of those of a call the lower quartile counts.
_LOW = 0.25


def measure_costs(
    session: Measurable, budget_s: float, rows: tuple[int, ...] = ROWS, pasts: tuple[int, ...] = PASTS
) -> CostTable:
    """Seconds of calls with few and with many cached tokens.

    At least two rounds of all calls are measured, more until all are certain to 2 % or the budget is spent. What a
    round took longer than others as a whole, as the first one does, is taken out, see `leveled`. The session's cache
    is empty afterwards.

    Args:
        session: any; in exact mode its dummy rows are part of the cost.
        budget_s: seconds to spend.
        rows, pasts: widths of the calls and cached tokens, as far as the context has room for them.
    """
    (table,) = _measure([_Calls(session, rows, pasts)], budget_s)
    return table


def measure_pair(
    target: DecoderSession,
    draft: Measurable,
    budget_s: float,
    rows: tuple[int, ...] = ROWS,
    pasts: tuple[int, ...] = PASTS,
) -> tuple[CostTable, CostTable]:
    """`measure_costs` of both, in the same rounds: what counts is the ratio, and load falls on both alike.

    Args:
        rows: of the target's calls. The draft's are `ROWS`; one that reads no text has calls of one row only, at one
            price unless it looks at the target's cache.
    """
    if isinstance(draft, DecoderSession):
        calls = _Calls(draft, ROWS, pasts)
    else:
        is_longer_dearer = isinstance(draft, RecurrentSession) and draft.borrows
        calls = _Calls(draft, (1,), pasts if is_longer_dearer else pasts[:1])
    tables = _measure([calls, _Calls(target, rows, pasts)], budget_s)
    return tables[1], tables[0]


def leveled(times: Times) -> Times:
    """Times without what rounds have in common, so that a slow spell of the machine does not pass for a dear call.

    A round's level is the median of what its calls took, each over its own median. All are brought to that of the
    quiet rounds.

    Args:
        times: seconds, shape (rounds, calls); the calls of a round were made one after the other.
    """
    levels = np.median(times / np.median(times, axis=0), axis=1, keepdims=True)
    return np.asarray(times / levels * np.quantile(levels, _LOW))


def is_steady(values: Sequence[float]) -> bool:
    """Whether enough was measured for the median to be certain."""
    return len(values) >= 5 and median_error(values) < _STEADY * median(values)


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median of two or more values.

    It is 1.25 sigma / sqrt(n), and sigma the interquartile range / 1.35, for errors that are normal.
    """
    low, _, high = quantiles(values, n=4)
    return 0.93 * (high - low) / math.sqrt(len(values))


@dataclass(slots=True)
class _Calls:
    """Calls of a session: each width after each past."""

    session: Measurable
    rows: tuple[int, ...]
    pasts: tuple[int, ...]

    def __post_init__(self) -> None:
        self.rows = tuple(width for width in self.rows if width <= self.session.context_length)
        room = self.session.context_length - max(self.rows)
        first, *others = self.pasts
        self.pasts = tuple(sorted({min(first, room // 2), *(min(past, room) for past in others)}))

    def time(self) -> Iterator[float]:
        """Seconds of each."""
        for past in self.pasts:
            self.session.pretend(past)
            for width in self.rows:
                yield _time_call(self.session, past, width)
        self.session.rewind(0)

    def table(self, times: Times) -> CostTable:
        """From their times, shape (rounds, calls)."""
        seconds = np.quantile(times, _LOW, axis=0, method="lower").reshape(len(self.pasts), len(self.rows))
        errors = [median_error(line) / median(line) for line in times.T.tolist()] if len(times) > 1 else [0.0]
        return CostTable(self.pasts, self.rows, tuple(map(tuple, seconds.tolist())), median(errors))


def _measure(subjects: Sequence[_Calls], budget_s: float) -> list[CostTable]:
    """The table of each. All take turns."""
    rounds: list[list[float]] = []
    started = perf_counter()
    while True:
        rounds.append([seconds for subject in subjects for seconds in subject.time()])
        is_late = (perf_counter() - started) * (len(rounds) + 1) / len(rounds) > budget_s
        if len(rounds) > 1:
            times = leveled(np.array(rounds))
            if is_late or all(map(is_steady, times.T.tolist())):
                break
    counts = [len(subject.pasts) * len(subject.rows) for subject in subjects]
    parts = np.split(times, np.cumsum(counts)[:-1], axis=1)
    return [subject.table(part) for subject, part in zip(subjects, parts, strict=True)]


def _time_call(session: Measurable, past: int, width: int) -> float:
    tokens = probe_tokens(session.vocab_size, width)
    started = perf_counter()
    session.forward(tokens, width)
    seconds = perf_counter() - started
    session.rewind(past)
    return seconds
