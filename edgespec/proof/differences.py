"""Texts with and without a drafter, and rows alone and in company: comparisons, no statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.contracts import Rows, Scorer, Tokens
from edgespec.decoder import SpeculativeDecoder
from edgespec.invariance import split_logits
from edgespec.params import SamplingParams
from edgespec.sampling import shape
from edgespec.shaper import Constraint, Shaper
from edgespec.stats import GenerationStats
from edgespec.theory import total_variation


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a text made with a drafter parts from the plain one.

    Attributes:
        prompt: its number.
        position: tokens of the answer before it.
        plain, speculative: token ids, -1 where the text had ended.
        margin: by how much the plain token's logit leads the next best; `None` for sampled text.
    """

    prompt: int
    position: int
    plain: int
    speculative: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Width:
    """Rows of logits from calls of several rows against the same rows alone.

    Attributes:
        width: rows a call.
        rows: compared.
        mean_tv, max_tv: total variation of the distributions at temperature 1.
        flips: rows with another arg max.
        max_change: largest change of the lead that the best token alone has over the second.
    """

    width: int
    rows: int
    mean_tv: float
    max_tv: float
    flips: int
    max_change: float


def answer(
    loop: SpeculativeDecoder, prompt: Tokens, params: SamplingParams, constraint: Constraint | None = None
) -> list[int]:
    """Token ids of one answer."""
    steps = loop.generate(prompt, params, GenerationStats(), constraint=constraint)
    return [token for step in steps for token in step.tokens]


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first token that is not the same, or `None`."""
    for i in range(max(len(plain), len(speculative))):
        if [*plain[i : i + 1]] != [*speculative[i : i + 1]]:
            return i
    return None


def compare(
    plain: Sequence[int],
    loop: SpeculativeDecoder,
    prompt: Tokens,
    params: SamplingParams,
    constraint: Constraint | None = None,
    number: int = 0,
) -> Difference | None:
    """An answer made with a drafter against the plain one.

    Args:
        plain: the answer without a drafter.
        number: of the prompt, for the report.
    """
    speculative = answer(loop, prompt, params, constraint)
    at = first_difference(plain, speculative)
    if at is None:
        return None
    margin = None
    if params.is_greedy:
        text = np.concatenate([prompt, np.array(plain[:at], np.int64)])
        shaper = Shaper(params, prompt, loop.eos_token_ids, loop.target.vocab_size, constraint)
        margin = _margin(loop.target, shaper, text)
    return Difference(number, at, _token(plain, at), _token(speculative, at), margin)


def _token(tokens: Sequence[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else -1


def _margin(target: Scorer, shaper: Shaper, text: Tokens) -> float:
    row = shaper.adjust(target.forward(target.sync(text), 1), text, text[:0])[0]
    second, best = np.partition(row, -2)[-2:]
    return float(best - second)


def measure_widths(target: Scorer, tokens: Tokens, widths: Sequence[int]) -> list[Width]:
    """Feed `tokens`, shape (n,), one at a time and then so many at a time, and compare the rows."""
    alone = split_logits(target, tokens, (1,))
    return [_width(alone, split_logits(target, tokens, (width,)), width) for width in widths]


def _width(alone: Rows, rows: Rows, width: int) -> Width:
    one = SamplingParams(temperature=1)
    distances = total_variation(shape(alone.copy(), one), shape(rows.copy(), one))
    flips = int((alone.argmax(axis=1) != rows.argmax(axis=1)).sum())
    best = np.argpartition(alone, -2, axis=1)[:, -2:]
    leads = (np.abs(np.diff(np.take_along_axis(alone - rows, best, axis=1)))).max()
    return Width(width, len(rows), float(distances.mean()), float(distances.max()), flips, float(leads))


def merge(parts: Sequence[Width]) -> Width:
    """The same width over several texts."""
    rows = sum(part.rows for part in parts)
    return replace(
        parts[0],
        rows=rows,
        mean_tv=sum(part.mean_tv * part.rows for part in parts) / rows,
        max_tv=max(part.max_tv for part in parts),
        flips=sum(part.flips for part in parts),
        max_change=max(part.max_change for part in parts),
    )
