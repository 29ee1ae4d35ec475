"""Deliberately wrong rules and loops, as others have shipped them. Each is a change that `monkeypatch` undoes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from edgespec import decoder
from edgespec.drafters import StagedDrafter, staged
from edgespec.noise import Noise, Purpose
from edgespec.params import SamplingParams
from edgespec.proof import procedure
from edgespec.proof.replay import ReplayScorer
from edgespec.sampling import draw
from edgespec.shaper import Shaper
from edgespec.testing import TableScorer
from edgespec.verify import Distributions, Draft, Verdict, acceptance_rates, residual

Fault = Callable[[pytest.MonkeyPatch], None]
Rule = Callable[[np.ndarray, Draft, Noise, int], Verdict]


def _rule(rule: Rule, module: ModuleType = decoder) -> Fault:
    def over_all_rows(probs: Distributions, draft: Draft, noise: Noise, start: int) -> Verdict:
        return rule(np.stack([probs[i] for i in range(len(draft) + 1)]), draft, noise, start)

    return lambda patch: patch.setattr(module, "verify_rejection", over_all_rows)


def _accepted(probs: np.ndarray, draft: Draft, uniforms: np.ndarray) -> int:
    """As the right rule does, with the given numbers."""
    steps = np.arange(len(draft))
    p, q = (rows[steps, draft.tokens].astype(np.float64) for rows in (probs, draft.dists))
    return int(np.append(uniforms < acceptance_rates(p, q), False).argmin())


def _emit(row: np.ndarray, noise: Noise, start: int) -> int:
    return draw(row, float(noise.uniforms(start, Purpose.EMIT, 1)[0]))


def _always(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    return Verdict(len(draft), _emit(probs[-1], noise, start))


def _arg_max(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    accepted = int(np.append(probs[:-1].argmax(axis=1) == draft.tokens, False).argmin())
    return Verdict(accepted, _emit(probs[accepted], noise, start))


def _drawn_twice(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    uniforms = noise.uniforms(start, Purpose.ACCEPT, len(draft))
    drawn = [draw(row, float(u)) for row, u in zip(probs[:-1], uniforms, strict=True)]
    accepted = int(np.append(np.array(drawn) == draft.tokens, False).argmin())
    return Verdict(accepted, _emit(probs[accepted], noise, start))


def _not_renormalised(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    accepted = _accepted(probs, draft, noise.uniforms(start, Purpose.ACCEPT, len(draft)))
    if accepted == len(draft):
        return Verdict(accepted, _emit(probs[-1], noise, start))
    heights = np.cumsum(residual(probs[accepted], draft, accepted), dtype=np.float64)
    place = np.searchsorted(heights, noise.uniforms(start, Purpose.EMIT, 1)[0], side="right")
    return Verdict(accepted, min(int(place), len(heights) - 1))


def _next_row(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    accepted = _accepted(probs, draft, noise.uniforms(start, Purpose.ACCEPT, len(draft)))
    if accepted == len(draft):
        return Verdict(accepted, _emit(probs[-1], noise, start))
    return Verdict(accepted, _emit(residual(probs[accepted + 1], draft, accepted), noise, start))


def _same_number(probs: np.ndarray, draft: Draft, noise: Noise, start: int) -> Verdict:
    accepted = _accepted(probs, draft, np.repeat(noise.uniforms(start, Purpose.ACCEPT, 1), len(draft)))
    row = probs[accepted] if accepted == len(draft) else residual(probs[accepted], draft, accepted)
    return Verdict(accepted, _emit(row, noise, start))


class _UnfilteredDrafter(StagedDrafter):
    """Draws from the shaped distribution, but hands on the raw one."""

    def propose(self, context: np.ndarray, limit: int, shaper: Shaper, noise: Noise, *more: object) -> Draft:
        draft = super().propose(context, limit, shaper, noise)
        raw = Shaper(SamplingParams(temperature=1))
        text = np.concatenate([context, draft.tokens])
        ends = range(len(context), len(text))
        rows = [self.scorer.forward(self.scorer.sync(text[:end]), 1)[0].copy() for end in ends]
        return Draft(draft.tokens, raw.shape(np.stack(rows), context, draft.tokens[:-1]))


class _BlindShaper(Shaper):
    """Every row sees the committed text only."""

    def adjust(self, logits: np.ndarray, context: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        return np.concatenate([super(_BlindShaper, self).adjust(row[None], context, drafted[:0]) for row in logits])


def _keep_one(kind: type) -> Fault:
    """Rewinding leaves one token too many."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        right = kind.rewind
        patch.setattr(kind, "rewind", lambda self, length: right(self, length + (0 < length < len(self._tokens))))

    return fault


FAULTS: dict[str, Fault] = {
    "always accept": _rule(_always),
    "accept what is the arg max": _rule(_arg_max),
    "accept what a draw gives, then draw again": _rule(_drawn_twice),
    "residual not renormalised": _rule(_not_renormalised),
    "residual of the row after": _rule(_next_row),
    "q of unfiltered logits": lambda patch: patch.setattr(procedure, "StagedDrafter", _UnfilteredDrafter),
    "penalty blind to the draft": lambda patch: patch.setattr(decoder, "Shaper", _BlindShaper),
    "model's cache not rewound by one": _keep_one(TableScorer),
    "loop's cache not rewound by one": _keep_one(ReplayScorer),
    "one random number for the whole draft": _rule(_same_number),
    "always accept inside the draft": _rule(_always, staged),
    "the numbers of the round inside it": lambda patch: patch.setattr(Noise, "inside", lambda self, start: self),
}
