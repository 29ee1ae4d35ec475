"""Samples of whole rounds of the loop, and the exact laws that they must follow.

Every sample starts at the same context and drafts at once, so that each law is known exactly:

- the first token follows p, whether it was drafted or corrected;
- a corrected token (in place of a rejected first one) follows the residual, the part of p that acceptance leaves;
- the token after that, decided in another round with rewound caches, follows p at the text so far;
- so does the bonus token behind a draft that was accepted whole;
- pairs of first tokens follow the product of p's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from edgespec import theory
from edgespec.contracts import Rows, Scorer, Tokens
from edgespec.decoder import SpeculativeDecoder
from edgespec.params import SamplingParams, Verifier
from edgespec.proof.fit import LEAST_EXPECTED, Fit, g_test
from edgespec.shaper import Constraint, Shaper
from edgespec.stats import GenerationStats

Kind = Literal["first token", "corrected token", "after a rejection", "bonus token", "pairs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MEMORY = 128 * 2**20  # bytes of remembered rows
_MAX_PREFIXES = 64
_MOST_BINS = 16
_BIN_EXPECTED = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of an answer.

    Attributes:
        tokens: of the first round, and of the next if that gave only one; a single end token is all there is.
        drafted, accepted: of the first round.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int

    @property
    def is_rejected(self) -> bool:
        """The first drafted token was refused."""
        return self.drafted > 0 and self.accepted == 0

    @property
    def is_accepted_whole(self) -> bool:
        return 0 < self.drafted == self.accepted < len(self.tokens)


def draw_samples(
    loop: SpeculativeDecoder,
    prompt: Tokens,
    params: SamplingParams,
    seeds: Iterable[int],
    constraint: Constraint | None = None,
) -> Iterable[Sample]:
    """The beginnings of one answer per seed."""
    for seed in seeds:
        wanted = replace(params, seed=seed, max_new_tokens=loop.policy.max_depth + 1)
        rounds = loop.generate(prompt, wanted, GenerationStats(), constraint=constraint, draft_first=True)
        first = next(rounds)
        tokens = first.tokens
        if len(tokens) < 2 and first.finish is None:  # what later rounds add is not tested
            tokens += next(rounds).tokens
        yield Sample(tokens, first.drafted, first.accepted)


class PlainRows:
    """The target's logits after a context, by the plainest way there is: rewind, feed.

    Args:
        target: scores; its cache is emptied before the context is read.
        context: shape (n,).
    """

    def __init__(self, target: Scorer, context: Tokens) -> None:
        self.target, self.context = target, context
        self._is_read = False
        self._rows: dict[tuple[int, ...], Rows] = {}
        self._max_rows = max(64, _MEMORY // (4 * target.vocab_size))

    def reset(self) -> None:
        """Somebody else has used the model: read the context again before it is asked for more rows."""
        self._is_read = False

    def after(self, prefix: tuple[int, ...]) -> Rows:
        """Logits after the context and `prefix`, a copy: shape (1, vocab)."""
        if prefix not in self._rows:
            if len(self._rows) == self._max_rows:
                del self._rows[next(iter(self._rows))]
            self._rows[prefix] = self._score(prefix)
        return self._rows[prefix].copy()

    def _score(self, prefix: tuple[int, ...]) -> Rows:
        if not self._is_read:
            self.target.rewind(0)
            if len(self.context) > 1:
                self.target.forward(self.context[:-1], 1)
            self._is_read = True
        self.target.rewind(len(self.context) - 1)
        return self.target.forward(np.array([self.context[-1], *prefix]), 1).copy()


class Reference:
    """The target's exact distributions after a context.

    Args:
        rows: gives the logits.
        shaper: how tokens are chosen.
    """

    def __init__(self, rows: PlainRows, shaper: Shaper) -> None:
        self.rows, self.shaper = rows, shaper
        rows.reset()

    def p(self, prefix: tuple[int, ...] = ()) -> theory.Floats:
        """Distribution after the context and `prefix`, summing to 1: shape (vocab,)."""
        text = np.concatenate([self.rows.context, np.array(prefix, np.int64)])
        row = self.shaper.shape(self.rows.after(prefix), text, text[:0])[0].astype(np.float64)
        return np.asarray(row / row.sum())


def fit_samples(
    samples: Sequence[Sample],
    reference: Reference,
    q: Rows | None,
    *,
    verifier: Verifier,
    seed: int,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[Kind, Fit]:
    """Test what was sampled after one context.

    Args:
        samples: after the context of `reference`.
        reference: gives the exact laws.
        q: the first drafted token's distribution, shape (vocab,); `None` where nothing is drafted.
        verifier: which rule the loop applied.
        seed: of the ranks' randomisation.
        is_late: asked before each further row; rows that are not had make a test smaller, not wrong.
    """
    p = reference.p()
    rng = np.random.default_rng(seed)
    rejected = [s for s in samples if s.is_rejected]
    whole = [s for s in samples if s.is_accepted_whole]
    return {
        "first token": g_test(p, np.bincount([s.tokens[0] for s in samples], minlength=len(p))),
        "corrected token": _fit_corrected(rejected, p, q, verifier),
        "after a rejection": _fit_ranks([s.tokens[:2] for s in rejected if len(s.tokens) > 1], reference, rng, is_late),
        "bonus token": _fit_ranks([s.tokens[: s.drafted + 1] for s in whole], reference, rng, is_late),
        "pairs": _fit_pairs(samples, reference, is_late),
    }


def _fit_corrected(rejected: Sequence[Sample], p: theory.Floats, q: Rows | None, verifier: Verifier) -> Fit:
    if q is None or not rejected:
        return Fit()
    q = q.astype(np.float64)
    law = np.maximum(p - (theory.coupled_overlap(p, q) if verifier == "coupled" else q), 0)
    if law.sum() < 1e-9:
        return Fit()
    return g_test(law / law.sum(), np.bincount([s.tokens[0] for s in rejected], minlength=len(p)))


def _fit_ranks(
    texts: Sequence[tuple[int, ...]], reference: Reference, rng: np.random.Generator, is_late: Callable[[], bool]
) -> Fit:
    """The last token of each text, after whatever the text before it is.

    A token's place in its own distribution, sorted by probability and randomised inside the token, is uniform on
    (0, 1) whatever that distribution is, so that different texts make one test.
    """
    prefixes = Counter(text[:-1] for text in texts)
    places: list[float] = []
    for prefix, _ in prefixes.most_common(_MAX_PREFIXES):
        if is_late():
            break
        p = reference.p(prefix)
        places += [_place(p, text[-1], rng.random()) for text in texts if text[:-1] == prefix]
    num_bins = min(_MOST_BINS, len(places) // _BIN_EXPECTED)
    if num_bins < 2:
        return Fit()
    counts, _ = np.histogram(places, bins=num_bins, range=(0, 1))
    return g_test(np.full(num_bins, 1 / num_bins), counts)


def _place(p: theory.Floats, token: int, uniform: float) -> float:
    above = p[p > p[token]].sum() + p[:token][p[:token] == p[token]].sum()
    return min(float(above + uniform * p[token]), 1.0)


def _fit_pairs(samples: Sequence[Sample], reference: Reference, is_late: Callable[[], bool]) -> Fit:
    """One cell for each pair that is expected often enough, one for each first token's others, one for the rest.

    Which cells there are depends on p alone, not on what was sampled.
    """
    p, n = reference.p(), len(samples)
    counts = Counter(s.tokens[:2] for s in samples)
    chances: list[float] = []
    observed: list[int] = []
    for first in np.argsort(-p, kind="stable")[:_MAX_PREFIXES].tolist():
        if n * p[first] < 2 * LEAST_EXPECTED or is_late():
            break
        if first in reference.shaper.eos_token_ids:
            chances.append(p[first])
            observed.append(counts[(first,)])
            continue
        second = p[first] * reference.p((first,))
        (often,) = np.nonzero(n * second >= LEAST_EXPECTED)
        seen = [counts[first, token] for token in often.tolist()]
        num_first = sum(count for pair, count in counts.items() if pair[0] == first)
        chances += [*second[often], p[first] - second[often].sum()]
        observed += [*seen, num_first - sum(seen)]
    chances.append(max(1 - sum(chances), 0))
    observed.append(n - sum(observed))
    return g_test(np.maximum(chances, 0), np.array(observed))
