"""The rule: which drafted tokens are accepted, and what is emitted in place of the first that is not.

The only place that decides what is emitted. Knows arrays; nothing of sessions, caches or text.
Source: Leviathan et al. 2023 (algorithm 1), Chen et al. 2023 (algorithm 2), Daliri et al. 2025 (coupled).
"""

from __future__ import annotations

from dataclasses import dataclass

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
            `None` where the proposal is deterministic (q is one-hot).
        confidences: how sure the drafter is of each token, from 0 to 1, n of them; only their order matters. Empty
            where it does not say. Plays no part in what is emitted.
    """

    tokens: NDArray[np.int64]
    dists: NDArray[np.float32] | None = None
    confidences: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """The first `count` tokens. Only for a deterministic draft: cutting by content what was drawn is a bias."""
        if count >= len(self.tokens):
            return self
        assert self.dists is None
        return Draft(self.tokens[:count], confidences=self.confidences[:count])


EMPTY_DRAFT = Draft(np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a target pass decided: the first `accepted` drafted tokens are emitted, then `token`."""

    accepted: int
    token: int


def _num_accepted(accept: NDArray[np.bool_]) -> int:
    """Length of the leading run of acceptances."""
    return int(accept.argmin()) if not accept.all() else len(accept)


def verify_greedy(logits: NDArray[np.float32], draft: Draft) -> Verdict:
    """Accept drafted tokens as long as they are the target's arg max.

    Args:
        logits: shape (n + 1, vocab): row i is what the target says after i drafted tokens.
        draft: n tokens; its distributions play no part.
    """
    best = logits.argmax(axis=1)
    accepted = _num_accepted(best[:-1] == draft.tokens)
    return Verdict(accepted, int(best[accepted]))


def acceptance_rates(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability min(1, p / q) with which a token drawn with probability q is accepted; 0 where p is 0."""
    return np.divide(p, q, out=(p > 0).astype(np.float64), where=p < q)


def verify_rejection(probs: NDArray[np.float32], draft: Draft, noise: Noise, start: int) -> Verdict:
    """Accept token x with probability min(1, p(x) / q(x)); emit from the residual, or the bonus token from p.

    The emitted tokens are distributed exactly as p, whatever q is, as long as each drafted token was drawn from
    its q.

    Args:
        probs: the target's shaped distributions p, shape (n + 1, vocab), rows summing to 1.
        draft: n tokens and their q.
        noise: of this answer.
        start: number of committed tokens when the round began.
    """
    n = len(draft)
    steps = np.arange(n)
    p = probs[steps, draft.tokens].astype(np.float64)
    q = np.ones(n) if draft.dists is None else draft.dists[steps, draft.tokens].astype(np.float64)
    accepted = _num_accepted(noise.uniforms(start, Purpose.ACCEPT, n) < acceptance_rates(p, q))
    row = probs[accepted] if accepted == n else residual(probs[accepted], draft, accepted)
    return Verdict(accepted, draw(row, float(noise.uniforms(start, Purpose.EMIT, 1)[0])))


def verify_coupled(probs: NDArray[np.float32], draft: Draft, noise: Noise, start: int) -> Verdict:
    """Accept drafted tokens as long as they are what the target chooses with the noise of their positions.

    What is emitted does not depend on the draft at all. A draft is accepted often if it was chosen with the same
    noise (Gumbel coupling; Daliri et al. 2025).

    Args:
        probs: the target's shaped distributions p, shape (n + 1, vocab).
        draft: n tokens; its distributions play no part.
        noise: of this answer.
        start: number of committed tokens when the round began, the position of the first drafted one.
    """
    for i, drafted in enumerate(draft.tokens.tolist()):
        token = noise.choose(probs[i], start + i)
        if token != drafted:  # later rows follow a text that is not the target's
            return Verdict(i, token)
    return Verdict(len(draft), noise.choose(probs[-1], start + len(draft)))


def residual(p: NDArray[np.float32], draft: Draft, index: int) -> NDArray[np.float32]:
    """What p has beyond q, max(0, p - q), not normalised: shape (vocab,).

    Where rounding leaves nothing (p equals q, which is rejected with probability 0), p itself.
    """
    rest = p.copy()
    if draft.dists is None:
        rest[draft.tokens[index]] = 0
    else:
        rest -= draft.dists[index]
        np.maximum(rest, 0, out=rest)
    return rest if rest.any() else p
