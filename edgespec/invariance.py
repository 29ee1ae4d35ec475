"""Row invariance: does a row's logits depend on which rows share the call? Measured, never assumed.

Knows nothing of how a graph is run. FP sums are not associative and kernels choose tiles by the number of rows, so
the answer belongs to one graph on one machine with one ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.contracts import Rows, Scorer, Tokens
from edgespec.params import RowInvariance
from edgespec.session import DecoderSession

_RULES: tuple[RowInvariance, ...] = (">=2", "even")
# Ways to feed the same tokens: one row at a time, as a verification does, uneven, and one more than kernels' tiles.
_SPLITS = ((1,), (5,), (2, 3, 1), (7,), (33,), (129,))


def probe_tokens(vocab_size: int, count: int = 48) -> Tokens:
    """`count` tokens spread over the vocabulary, the same every time: shape (count,)."""
    return np.random.Generator(np.random.Philox(key=7)).integers(0, vocab_size, count, dtype=np.int64)


def measure_row_invariance(session: DecoderSession, tokens: Tokens | None = None) -> RowInvariance:
    """The weakest rule under which `session` gives bitwise equal logits however the tokens are split.

    The session's cache is empty afterwards and its rule as before.

    Args:
        session: any.
        tokens: text to try it on, shape (n,); by default `probe_tokens`.
    """
    tokens = probe_tokens(session.vocab_size) if tokens is None else tokens
    before = session.row_rule
    try:
        return next((rule for rule in _RULES if _holds(session, rule, tokens)), "none")
    finally:
        session.row_rule = before
        session.rewind(0)


def _holds(session: DecoderSession, rule: RowInvariance, tokens: Tokens) -> bool:
    session.row_rule = rule
    session.rewind(0)
    whole = session.forward(tokens, len(tokens)).copy()
    return all(np.array_equal(split_logits(session, tokens, widths), whole) for widths in _SPLITS)


def split_logits(session: Scorer, tokens: Tokens, widths: Sequence[int]) -> Rows:
    """Logits of every position, shape (n, vocab), with the tokens fed in calls of the given widths, repeated.

    After each call a wrong token is fed and rewound, as a rejected draft would be.
    """
    session.rewind(0)
    rows = np.empty((len(tokens), session.vocab_size), np.float32)
    start = call = 0
    while start < len(tokens):
        end = min(start + widths[call % len(widths)], len(tokens))
        rows[start:end] = session.forward(tokens[start:end], end - start)
        if end < len(tokens):
            session.forward(tokens[:1], 1)
            session.rewind(end)
        start, call = end, call + 1
    return rows
