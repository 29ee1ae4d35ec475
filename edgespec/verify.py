"""The rule: which drafted tokens are accepted, and what is emitted in place of the first that is not.

The only place that decides what is emitted. Knows arrays; nothing of sessions, caches or text.
Source: Leviathan et al. 2023 (algorithm 1), Chen et al. 2023 (algorithm 2), Daliri et al. 2025 (coupled).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.noise import Noise, Purpose
from edgespec.sampling import draw


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A proposed continuation.

    Attributes:
        tokens: shape (n,); n may be 0.
        dists: the distribution q that each token was really drawn from, shape (n, vocab), rows summing to 1; or
            `None` where the proposal is deterministic (q is one-hot). With `ids` shape (n, len(ids)).
        confidences: how sure the drafter is of each token, from 0 to 1, n of them; only their order matters. Empty
            where it does not say. Plays no part in what is emitted.
        ids: token of each column of `dists`, ascending; all others have q = 0. `None` where column t is token t.
    """

    tokens: NDArray[np.int64]
    dists: NDArray[np.float32] | None = None
    confidences: tuple[float, ...] = ()
    ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """The first `count` tokens. Only for a deterministic draft: cutting by content what was drawn is a bias."""
        if count >= len(self.tokens):
            return self
        assert self.dists is None
        return Draft(self.tokens[:count], confidences=self.confidences[:count])

    def q(self, index: int) -> float:
        """The probability with which the token at `index` was drafted."""
        if self.dists is None:
            return 1.0
        token = self.tokens[index]
        return float(self.dists[index, token if self.ids is None else np.searchsorted(self.ids, token)])


class Distributions(Protocol):
    """Distributions by the number of drafted tokens that they follow: an array of them, or made when asked for."""

    def __getitem__(self, index: int, /) -> NDArray[np.float32]:
        """Shape (vocab,)."""


EMPTY_DRAFT = Draft(np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a target pass decided: the first `accepted` drafted tokens are emitted, then `token`."""

    accepted: int
    token: int


def verify_greedy(logits: NDArray[np.float32], draft: Draft) -> Verdict:
    """Accept drafted tokens as long as they are the target's arg max.

    Args:
        logits: shape (n + 1, vocab): row i is what the target says after i drafted tokens.
        draft: n tokens; its distributions play no part.
    """
    # Row by row: those behind the first difference are megabytes that nobody needs to look at.
    for i, drafted in enumerate(draft.tokens.tolist()):
        token = int(logits[i].argmax())
        if token != drafted:
            return Verdict(i, token)
    return Verdict(len(draft), int(logits[len(draft)].argmax()))


def acceptance_rates(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability min(1, p / q) with which a token drawn with probability q is accepted; 0 where p is 0."""
    return np.divide(p, q, out=(p > 0).astype(np.float64), where=p < q)


def verify_rejection(probs: Distributions, draft: Draft, noise: Noise, start: int) -> Verdict:
    """Accept token x with probability min(1, p(x) / q(x)); emit from the residual, or the bonus token from p.

    The emitted tokens are distributed exactly as p, whatever q is, as long as each drafted token was drawn from
    its q.

    Args:
        probs: the target's shaped distributions p, n + 1 of shape (vocab,), summing to 1. Those behind the first
            rejection are not looked at.
        draft: n tokens and their q.
        noise: of this answer.
        start: number of committed tokens when the round began.
    """
    uniforms = noise.uniforms(start, Purpose.ACCEPT, len(draft))
    accepted = 0
    while accepted < len(draft):
        p, q = probs[accepted][draft.tokens[accepted]], draft.q(accepted)
        if not uniforms[accepted] < acceptance_rates(np.array([p], np.float64), np.array([q]))[0]:
            break
        accepted += 1
    row = probs[accepted] if accepted == len(draft) else residual(probs[accepted], draft, accepted)
    return Verdict(accepted, draw(row, float(noise.uniforms(start, Purpose.EMIT, 1)[0])))


def verify_coupled(probs: Distributions, draft: Draft, noise: Noise, start: int) -> Verdict:
    """Accept drafted tokens as long as they are what the target chooses with the noise of their positions.

    What is emitted does not depend on the draft at all. A draft is accepted often if it was chosen with the same
    noise (Gumbel coupling; Daliri et al. 2025).

    Args:
        probs: the target's shaped distributions p, n + 1 of shape (vocab,).
        draft: n tokens; its distributions play no part.
        noise: of this answer.
        start: number of committed tokens when the round began, the position of the first drafted one.
    """
    for i, drafted in enumerate(draft.tokens.tolist()):
        token = noise.choose(probs[i], start + i)
        if token != drafted:  # later rows follow a text that is not the target's
            return Verdict(i, token)
    return Verdict(len(draft), noise.choose(probs[len(draft)], start + len(draft)))


def residual(p: NDArray[np.float32], draft: Draft, index: int) -> NDArray[np.float32]:
    """What p has beyond q, max(0, p - q), not normalised: shape (vocab,).

    Where rounding leaves nothing (p equals q, which is rejected with probability 0), p itself.
    """
    rest = p.copy()
    if draft.dists is None:
        rest[draft.tokens[index]] = 0
    elif draft.ids is None:
        rest -= draft.dists[index]
        np.maximum(rest, 0, out=rest)
    else:
        rest[draft.ids] = np.maximum(rest[draft.ids] - draft.dists[index], 0)
    return rest if np.logical_or.reduce(rest) else p
