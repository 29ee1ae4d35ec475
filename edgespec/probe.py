"""Measures what calls of a session cost. Knows no bundles and no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles
from time import perf_counter

from edgespec.costs import CostTable
from edgespec.invariance import probe_tokens
from edgespec.session import DecoderSession

# Rows: dense where a draft may begin to pay, sparse where the curve is straight.
ROWS = (1, 2, 3, 5, 9, 17)
# Cached tokens: a first sentence, a long document.
PASTS = (16, 1024)
_STEADY = 0.02  # of a median: its error at which no more is measured


def measure_costs(
    session: DecoderSession, budget_s: float, rows: tuple[int, ...] = ROWS, pasts: tuple[int, ...] = PASTS
) -> CostTable:
    """Seconds of calls with few and with many cached tokens, medians of interleaved rounds (of few the least).

    At least one round is measured after a warm-up call of each kind; more until all medians are certain to 2 % or the
    budget is spent. The session's cache is empty afterwards.

    Args:
        session: any; in exact mode its dummy rows are part of the cost.
        budget_s: seconds to spend.
        rows: widths of the calls.
        pasts: cached tokens, as far as the context has room for them.
    """
    room = session.context_length - max(rows)
    pasts = tuple(sorted({min(pasts[0], room // 2), *(min(past, room) for past in pasts[1:])}))
    times: dict[tuple[int, int], list[float]] = {(past, width): [] for past in pasts for width in rows}
    started = perf_counter()
    while True:
        for past in pasts:
            session.pretend(past)
            for width in rows:
                times[past, width].append(_time_call(session, past, width))
        rounds = len(times[pasts[0], rows[0]])
        is_late = (perf_counter() - started) * (rounds + 1) / rounds > budget_s
        if rounds > 1 and (is_late or all(is_steady(line[1:]) for line in times.values())):
            break
    session.rewind(0)
    # The first call of each kind allocates.
    return CostTable(pasts, rows, tuple(tuple(_typical(times[past, width][1:]) for width in rows) for past in pasts))


def _typical(values: Sequence[float]) -> float:
    """The median; of a few values the least, since whatever else the machine does only adds."""
    return median(values) if len(values) >= 5 else min(values)


def is_steady(values: Sequence[float]) -> bool:
    """Whether enough was measured for the median to be certain."""
    return len(values) >= 5 and median_error(values) < _STEADY * median(values)


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median of two or more values.

    It is 1.25 sigma / sqrt(n), and sigma the interquartile range / 1.35, for errors that are normal.
    """
    low, _, high = quantiles(values, n=4)
    return 0.93 * (high - low) / math.sqrt(len(values))


def _time_call(session: DecoderSession, past: int, width: int) -> float:
    tokens = probe_tokens(session.vocab_size, width)
    started = perf_counter()
    session.forward(tokens, width)
    seconds = perf_counter() - started
    session.rewind(past)
    return seconds
