"""Identity: accept route + reject route = p, calculated with the rule's own functions on rows that a pair really gives.

Says nothing about the loop around the rule; `laws` tests that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgespec import theory
from edgespec.contracts import Drafter, Rows, Scorer, Tokens
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import Draft, acceptance_rates, residual

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Identity:
    """What the rows of one setting and one drafter showed.

    Attributes:
        rows: looked at.
        max_error: largest difference of a token's probability between what the rule emits and p.
        acceptance: probability that a drafted token is accepted by the standard rule, mean over the rows.
        coupled_acceptance: the same where target and draft share their noise.
    """

    rows: int
    max_error: float
    acceptance: float
    coupled_acceptance: float

    @property
    def passed(self) -> bool:
        return self.max_error <= TOLERANCE


def proposal(draft: Draft, index: int, vocab_size: int) -> Rows:
    """The distribution q of a drafted token, one-hot where it is deterministic: shape (vocab,)."""
    if draft.dists is not None and draft.ids is None:
        whole: Rows = draft.dists[index]
        return whole
    row = np.zeros(vocab_size, np.float32)
    if draft.dists is None:
        row[draft.tokens[index]] = 1
    else:
        row[draft.ids] = draft.dists[index]
    return row


def emitted(p: Rows, draft: Draft, index: int) -> theory.Floats:
    """What the standard rule emits at a drafted token, over all draws and both routes: shape (vocab,).

    Args:
        p: the target's distribution there, shape (vocab,).
        draft: its token at `index` matters only where it is deterministic.
    """
    q = proposal(draft, index, len(p)).astype(np.float64)
    accepted = q * acceptance_rates(p.astype(np.float64), q)
    rest = residual(p, draft, index).astype(np.float64)
    return np.asarray(accepted + (1 - accepted.sum()) * rest / rest.sum())


def check_identity(
    target: Scorer, drafter: Drafter, shaped_contexts: Iterable[tuple[Shaper, Tokens]], depth: int, seed: int
) -> Identity | None:
    """Draft after each context, score the drafts, and compare every row; `None` where nothing is drafted.

    Args:
        shaped_contexts: how tokens are chosen, and after which text of shape (n,).
        depth: tokens drafted after each.
        seed: of the noise that the drafter draws with.
    """
    errors, standard, coupled = [], [], []
    for shaper, context in shaped_contexts:
        draft = drafter.propose(context, depth, shaper, Noise(seed))
        logits = target.forward(np.concatenate([target.sync(context), draft.tokens]), len(draft) + 1)
        rows = shaper.shape(logits, context, draft.tokens)
        for index, p in enumerate(rows[:-1]):
            q = proposal(draft, index, len(p))
            errors.append(float(np.abs(emitted(p, draft, index) - p).max()))
            standard.append(float(theory.acceptance(p, q)))
            coupled.append(theory.coupled_acceptance(p, q))
    if not errors:
        return None
    return Identity(len(errors), max(errors), float(np.mean(standard)), float(np.mean(coupled)))
