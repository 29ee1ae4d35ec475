"""Whether an exported graph still is the model. Owns the comparison and the thresholds.

Everything runs through the session that will serve the bundle: prompt reading, one-row decoding, verification of
several rows, and rolling back after rejected ones. Distances are total variation between next-token distributions:
half the sum of |p - q|, which is also the fraction of draft tokens that speculative sampling would reject.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Tokens
from edgespec.errors import ExportError
from edgespec.export.reference import Reference
from edgespec.invariance import measure_row_invariance, probe_tokens
from edgespec.params import RowInvariance, RuntimeParams
from edgespec.selfcheck import affordable_tokens, make_probe
from edgespec.session import DecoderSession

_READ = 64  # rows of a call while the text is read; even, so that it obeys every row rule
_VERIFY = 5
_SPAN = 60  # rows at the end of the text that are decoded, verified and rolled back
_WRONG = 3
_INVARIANCE_TOKENS, _INVARIANCE_S = 200, 10.0
_PAST = 128  # tokens before the calls that are timed
_TIMED = 7

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an export may cost; anything beyond means that it is broken, not merely rounded.

    Attributes:
        mean_tv: mean total variation to the original.
        max_tv: the largest of a row.
        perplexity: the graph's on the text, over the original's.
        path_tv: mean total variation between ways to compute the same rows.
    """

    mean_tv: float
    max_tv: float
    perplexity: float
    path_tv: float


# Measured on a 135M model, the hardest case, as mean total variation and ratio of perplexities: fp32 1e-6 and 1.00,
# int8 0.06 and 1.03, int4 0.4 and 2. Room is left for others, and none for a wrong mask, scale or packing.
LIMITS = {
    "fp16": Limits(mean_tv=0.05, max_tv=0.3, perplexity=1.05, path_tv=0.05),
    "fp32": Limits(mean_tv=1e-3, max_tv=2e-2, perplexity=1.01, path_tv=1e-3),
    "int8": Limits(mean_tv=0.15, max_tv=0.8, perplexity=1.25, path_tv=0.15),
    "int4": Limits(mean_tv=0.6, max_tv=1.0, perplexity=5.0, path_tv=0.25),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, as it goes into the manifest.

    Attributes:
        tokens: of the check text.
        mean_tv, max_tv, top1: graph against the original, over all rows: total variation, and how often both
            find the same token most probable.
        perplexity, original_perplexity: of the text.
        decode_tv, verify_tv, rollback_tv: mean total variation to the rows of prompt reading, when decoded one by
            one, verified five at once, and verified after wrong tokens were rolled back.
        one_row_flips, one_row_rows, one_row_max_tv: one-row decoding against five-row calls: rows whose most
            probable token differs, out of how many, and the largest total variation.
    """

    tokens: int
    mean_tv: float
    max_tv: float
    top1: float
    perplexity: float
    original_perplexity: float
    decode_tv: float
    verify_tv: float
    rollback_tv: float
    one_row_flips: int
    one_row_rows: int
    one_row_max_tv: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_graph(path: Path, context_length: int, reference: Reference, limits: Limits, rows_file: Path) -> Figures:
    """Compare a graph with the original on the check text.

    Args:
        path: of the graph.
        reference: the original's logits.
        limits: beyond which the graph is not the original.
        rows_file: where the graph's logits of the whole text are kept (.npy), for comparing a draft with them.
    Raises:
        ExportError: a limit was passed.
    """
    with closing(DecoderSession(path, context_length=context_length, runtime=RuntimeParams())) as session:
        figures = _measure(session, reference, rows_file)
    _enforce(figures, limits, path)
    return figures


def find_row_rule(path: Path, context_length: int, reference: Reference) -> RowInvariance:
    """The rule under which this machine computes a row of the graph the same whatever shares its call."""
    with closing(DecoderSession(path, context_length=context_length, runtime=RuntimeParams())) as session:
        count = affordable_tokens(session, _INVARIANCE_S, _INVARIANCE_TOKENS)
        return measure_row_invariance(session, reference.tokens[:count])


def record_probe(path: Path, context_length: int) -> dict[str, Any]:
    """What the self-check at load will compare a graph with."""
    with closing(DecoderSession(path, context_length=context_length, runtime=RuntimeParams())) as session:
        return make_probe(session)


def measure_steps(path: Path, context_length: int) -> dict[str, Any]:
    """Milliseconds of calls with one and with `_VERIFY` rows after a text: medians, on this machine."""
    with closing(DecoderSession(path, context_length=context_length, runtime=RuntimeParams())) as session:
        past = min(_PAST, context_length // 2)
        tokens = probe_tokens(session.vocab_size, past + _VERIFY)
        session.forward(tokens[:past], 1)
        return {"past": past, "ms": {str(width): _median_ms(session, tokens[past:], width) for width in (1, _VERIFY)}}


def _median_ms(session: DecoderSession, tokens: Tokens, width: int) -> float:
    past, seconds = len(session.tokens), []
    for _ in range(_TIMED + 1):
        started = time.perf_counter()
        session.forward(tokens[:width], width)
        seconds.append(time.perf_counter() - started)
        session.rewind(past)
    return float(np.median(seconds[1:]) * 1e3)


def mean_overlap(rows: Logits, others: Logits) -> float:
    """Mean of sum(min(p, q)) over rows: the acceptance that sampling at temperature 1 would see on this text.

    Args:
        rows, others: logits, shapes (n, v) and (n, w); columns beyond the shorter are padding and are cut.
    """
    width = min(rows.shape[1], others.shape[1])
    return float(np.mean([1 - total_variation(a[:width], b[:width]) for a, b in zip(rows, others, strict=True)]))


def _measure(session: DecoderSession, reference: Reference, rows_file: Path) -> Figures:
    tokens, original = reference.tokens, reference.logits
    start = _span_start(len(tokens))
    rows = _collect(session, tokens, rows_file)
    distances = np.array([total_variation(a, b) for a, b in zip(rows, original, strict=True)])
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(rows, original, strict=True)]
    decoded = _in_calls(session, tokens, start, 1)
    verified = _in_calls(session, tokens, start, _VERIFY)
    rolled_back = _in_calls(session, tokens, start, _VERIFY, wrong=_WRONG)
    pairs = [total_variation(a, b) for a, b in zip(decoded, verified, strict=True)]
    return Figures(
        tokens=len(tokens),
        mean_tv=float(distances.mean()),
        max_tv=float(distances.max()),
        top1=float(np.mean(same)),
        perplexity=_perplexity(rows, tokens),
        original_perplexity=_perplexity(original, tokens),
        decode_tv=_mean_tv(decoded, rows[start:]),
        verify_tv=_mean_tv(verified, rows[start:]),
        rollback_tv=_mean_tv(rolled_back, rows[start:]),
        one_row_flips=int((decoded.argmax(-1) != verified.argmax(-1)).sum()),
        one_row_rows=len(decoded),
        one_row_max_tv=max(pairs),
    )


def _span_start(count: int) -> int:
    """An even position with at most `_SPAN` rows after it, and a good part of the text before."""
    return max(count - _SPAN, count // 3) // 2 * 2


def _collect(session: DecoderSession, tokens: Tokens, file: Path) -> Logits:
    """Read the whole text and keep its logits on disk: they may be larger than the model."""
    shape = (len(tokens), session.vocab_size)
    rows = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    for start in range(0, len(tokens), _READ):
        part = tokens[start : start + _READ]
        rows[start : start + len(part)] = session.forward(part, len(part))
    rows.flush()
    return rows


def _in_calls(session: DecoderSession, tokens: Tokens, start: int, width: int, wrong: int = 0) -> Logits:
    """Rows from `start` to the end, computed in calls of `width`.

    Args:
        wrong: before each call so many tokens that are not the text's are fed and rolled back.
    """
    session.rewind(start)
    found = []
    for at in range(start, len(tokens), width):
        part = tokens[at : at + width]
        room = min(wrong, session.context_length - at)
        if room:
            session.forward((tokens[:room] + 1 + at) % session.vocab_size, room)
            session.rewind(at)
        found.append(session.forward(part, len(part)).copy())
    return np.concatenate(found)


def distribution(row: Logits) -> NDArray[np.float64]:
    """Probabilities of a row of logits."""
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def total_variation(row: Logits, other: Logits) -> float:
    """Between the distributions of two rows of logits, over the columns that both have."""
    width = min(len(row), len(other))
    return float(np.abs(distribution(row[:width]) - distribution(other[:width])).sum() / 2)


def _mean_tv(rows: Logits, others: Logits) -> float:
    return float(np.mean([total_variation(a, b) for a, b in zip(rows, others, strict=True)]))


def _perplexity(rows: Logits, tokens: Tokens) -> float:
    pairs = zip(rows[:-1], tokens[1:], strict=True)
    return float(np.exp(np.mean([-np.log(distribution(row)[token]) for row, token in pairs])))


def _enforce(figures: Figures, limits: Limits, path: Path) -> None:
    ratio = figures.perplexity / figures.original_perplexity
    for found, most, meaning in _comparisons(figures, limits, ratio):
        if not found <= most:  # also true for NaN
            raise ExportError(
                f"{path.parent.name}: the graph is not the original model: {meaning} is {found:.4g}, "
                f"and at most {most:g} is rounding; use another precision, or report the model"
            )


def _comparisons(figures: Figures, limits: Limits, ratio: float) -> Iterator[tuple[float, float, str]]:
    yield figures.mean_tv, limits.mean_tv, "the mean total variation to it"
    yield figures.max_tv, limits.max_tv, "the largest total variation to it"
    yield ratio, limits.perplexity, "the ratio of perplexities"
    yield figures.decode_tv, limits.path_tv, "the total variation of one-row decoding to prompt reading"
    yield figures.verify_tv, limits.path_tv, "the total variation of verification to prompt reading"
    yield figures.rollback_tv, limits.path_tv, "the total variation of verification after a rollback"
