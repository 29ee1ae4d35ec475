"""Log-probabilities of tokens, of the model's own logits. Knows arrays; nothing of models or of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token of an answer and its alternatives were.

    Natural logarithms of the softmax of the target's logits at the token's position, before anything that
    `SamplingParams` asks for changed them; so the token need not be among `top`, nor possible under top-k.

    Attributes:
        token: its id.
        logprob: its log-probability.
        top: (id, log-probability) of the most probable tokens at that position, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: NDArray[np.float32], tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens, one a row.

    Args:
        logits: shape (rows, vocab), unchanged.
        tokens: one for each row.
        count: most probable tokens to list beside each.
    """
    best = logits.max(axis=1, keepdims=True)
    totals = np.exp(logits - best).sum(axis=1, dtype=np.float64)
    norms = best[:, 0].astype(np.float64) + np.log(totals)
    count = min(count, logits.shape[1])
    found = []
    for row, token, norm in zip(logits, tokens, norms, strict=True):
        top = np.argpartition(row, -count)[-count:] if count else np.empty(0, np.int64)
        top = top[np.lexsort((top, -row[top]))]
        pairs = tuple((int(t), float(row[t] - norm)) for t in top)
        found.append(TokenLogprobs(int(token), float(row[token] - norm), pairs))
    return tuple(found)
