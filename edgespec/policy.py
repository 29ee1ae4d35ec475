"""How many tokens to draft next, and by whom: from measured costs and observed acceptance.

The text is what it is; what can be chosen is how long each stretch of it takes. So the round is taken that is
expected to emit most tokens per second, and one more token is drafted as long as what it is expected to add, per
second of its own cost, is above that rate. A draft of length 0 is plain decoding and always among the choices.

Knows no clocks, sessions or tokens: it is told what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.acceptance import AcceptanceModel
from edgespec.costs import CostCurve

# Share of the time that may be spent on trying drafters which are thought to lose: what being wrong about them may
# cost at most, and so the most by which speculation is slower than plain decoding in the long run.
PROBE_SHARE = 0.01
_OUTLIER = 4.0  # times the usual: what is longer was interrupted, and says little about the others
_NOTHING: tuple[str, tuple[float, ...], float] = ("", (), 1.0)  # drafted by nobody
_STEP_HORIZON = 8  # rounds over which what was not measured beforehand is averaged


@dataclass(frozen=True, slots=True)
class Offer:
    """What a drafter can do in this round.

    Attributes:
        name: of the drafter.
        confidences: of each token that it already proposes; `None` if it drafts on demand, token by token.
        backlog: tokens that it would have to read first.
    """

    name: str
    confidences: Sequence[float] | None
    backlog: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Which drafter, and how many tokens at most. `PLAIN` is none."""

    name: str | None
    depth: int


PLAIN = Choice(None, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round did.

    Attributes:
        name: of the drafter, or `None`.
        confidences: of the drafted tokens.
        num_accepted, num_emitted: tokens.
        past, rows: of the target's call.
        target_s, draft_s: seconds.
        backlog: tokens that the drafter read first.
        other_s: seconds of the rest of the round: choosing tokens, keeping the text.
    """

    name: str | None
    confidences: Sequence[float]
    num_accepted: int
    num_emitted: int
    past: int
    rows: int
    target_s: float
    draft_s: float
    backlog: int = 0
    other_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.target_s + self.draft_s + self.other_s


class FixedPolicy:
    """Always the same number of tokens, by the first drafter that has something to offer."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.max_depth = num_draft_tokens

    def choose(self, offers: Sequence[Offer], past: int, room: int) -> Choice:
        for offer in offers:
            depth = min(self.max_depth, room)
            if offer.confidences is not None:
                depth = min(depth, len(offer.confidences))
            if depth > 0:
                return Choice(offer.name, depth)
        return PLAIN

    def goes_on(self, name: str, confidences: Sequence[float], past: int) -> bool:
        return True

    def learn(self, outcome: Outcome) -> None:
        pass

    def learn_shadow(self, name: str, confidences: Sequence[float], num_accepted: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Plan:
    """A round: how many tokens are drafted, how many will be emitted on average, and how long it takes."""

    depth: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class AdaptivePolicy:
    """Chooses drafter and depth by marginal benefit.

    Args:
        target: cost of the target's calls; its `max_rows` bounds the depth.
        drafters: for each drafter the cost of its steps (`None` where it was not measured: it is then taken for free
            until it has been seen at work) and the acceptance to start from.
    """

    def __init__(self, target: CostCurve, drafters: Mapping[str, tuple[CostCurve | None, float]]) -> None:
        self._target = target
        self._steps = {name: curve for name, (curve, _) in drafters.items()}
        self._acceptance = {name: AcceptanceModel(prior) for name, (_, prior) in drafters.items()}
        self._seen_step_s: dict[str, float | None] = {n: None for n, (curve, _) in drafters.items() if curve is None}
        self._chances: dict[str, list[float]] = {}
        self._survived = _NOTHING
        self._other_s = 0.0  # of a round, beside the models
        self._foregone_s = dict.fromkeys(drafters, 0.0)
        self._elapsed_s = self._probing_s = 0.0
        self.tokens_per_s = 0.0
        """Expected of the last choice."""

    @property
    def max_depth(self) -> int:
        return self._target.max_rows - 1

    def choose(self, offers: Sequence[Offer], past: int, room: int) -> Choice:
        """The drafter and depth that emit most tokens per second.

        Args:
            offers: what the drafters can do.
            past: committed tokens.
            room: most tokens that may be drafted.
        """
        self._survived = _NOTHING
        costs = self._target.seconds(past)
        limit = min(room, self.max_depth)
        plans = {o.name: self._plan(o, costs, past, limit) for o in offers}
        best = _Plan(0, 1.0, costs.item(1) + self._other_s)
        choice = PLAIN
        for offer in sorted(offers, key=lambda o: o.backlog > 1):
            plan = plans[offer.name]
            if plan is not None and plan.rate > best.rate and self._is_worth_reading(offer, plan, best, past):
                # On demand the confidences decide, token by token, where to stop: it may be deeper than planned.
                best, choice = plan, Choice(offer.name, plan.depth if offer.confidences is not None else limit)
        self.tokens_per_s = best.rate
        if choice is PLAIN:
            choice = self._probe(offers, plans, best, past) or PLAIN
        return choice

    def goes_on(self, name: str, confidences: Sequence[float], past: int) -> bool:
        """Whether one more token is worth drafting after those with these confidences."""
        chances = self._chances.get(name, [])  # of the choice before: nothing was learnt since
        depth, deepest = len(confidences), len(chances)
        if depth >= deepest:
            return False
        costs = self._target.seconds(past)
        survival = self._survival(name, confidences)
        # Not the next token alone: the costs have steps, and one that does not pay may lead to some that do.
        tokens, spent, step_s = 0.0, costs.item(depth + 1), self._step_s(name, past)
        for more in range(1, deepest - depth + 1):
            survival *= chances[depth + more - 1]
            tokens += survival
            if tokens > self.tokens_per_s * (costs.item(depth + 1 + more) - spent + more * step_s):
                return True
        return False

    def _survival(self, name: str, confidences: Sequence[float]) -> float:
        """Probability that all drafted tokens are accepted. Asked after each of them: only the last ones are new."""
        drafter, known, survival = self._survived
        if drafter != name or known != tuple(confidences[: len(known)]):
            known, survival = (), 1.0
        for depth in range(len(known), len(confidences)):
            survival *= self._acceptance[name].at(depth, confidences[depth])
        self._survived = name, tuple(confidences), survival
        return survival

    def learn(self, outcome: Outcome) -> None:
        """Take in what a round did."""
        self._target.observe(outcome.rows, outcome.past, outcome.target_s)
        self._elapsed_s += outcome.seconds
        self._other_s = _followed(self._other_s, outcome.other_s)
        if outcome.name is None:
            return
        self._foregone_s[outcome.name] = 0.0
        self._acceptance[outcome.name].observe(outcome.confidences, outcome.num_accepted)
        if outcome.confidences and outcome.backlog <= 1:
            self._learn_step(outcome.name, outcome.past, outcome.draft_s / len(outcome.confidences))

    def _learn_step(self, name: str, past: int, seconds: float) -> None:
        curve = self._steps[name]
        if curve is not None:
            curve.observe(1, past, seconds)
        else:
            known = self._seen_step_s[name]
            # The first time includes what is done once.
            self._seen_step_s[name] = 0.0 if known is None else _followed(known, seconds)

    def learn_shadow(self, name: str, confidences: Sequence[float], num_accepted: int) -> None:
        """What would have become of a proposal that was not checked, as far as the emitted tokens tell."""
        self._acceptance[name].observe(confidences, num_accepted)

    def _plan(self, offer: Offer, costs: NDArray[np.float64], past: int, limit: int) -> _Plan | None:
        """The depth at which this drafter emits most tokens per second, or `None` where it has nothing to offer."""
        model = self._acceptance[offer.name]
        if offer.confidences is None:
            chances = self._chances[offer.name] = model.at_depths(limit)
        else:
            chances = model.at_each(offer.confidences[:limit])
        best, survival, tokens, step_s = None, 1.0, 1.0, self._step_s(offer.name, past)
        # A few numbers, once a round: arrays of them take longer.
        for depth, chance in enumerate(chances, 1):
            survival *= chance
            tokens += survival
            seconds = costs.item(depth + 1) + depth * step_s + self._other_s
            if best is None or tokens * best.seconds > best.tokens * seconds:
                best = _Plan(depth, tokens, seconds)
        return best

    def _step_s(self, name: str, past: int) -> float:
        curve = self._steps[name]
        return self._seen_step_s[name] or 0.0 if curve is None else curve.seconds(past).item(1)

    def _reading_s(self, offer: Offer, past: int) -> float:
        """Seconds that reading the backlog takes. The widest call that was measured reads cheapest a token."""
        curve = self._steps[offer.name]
        if curve is None or offer.backlog <= 1:
            return 0.0
        return offer.backlog * float(curve.seconds(past)[-1]) / curve.max_rows

    def _is_worth_reading(self, offer: Offer, plan: _Plan, best: _Plan, past: int) -> bool:
        """Whether the text that the drafter has not read yet should be read for its sake.

        How long the answer will be is unknown. Reading once as much was foregone as it costs is never worse than
        twice the best that could have been done knowing it (the ski-rental rule).
        """
        reading_s = self._reading_s(offer, past)
        if reading_s == 0:
            return True
        self._foregone_s[offer.name] += best.seconds - best.tokens / plan.rate
        return self._foregone_s[offer.name] >= reading_s

    def _probe(
        self, offers: Sequence[Offer], plans: Mapping[str, _Plan | None], best: _Plan, past: int
    ) -> Choice | None:
        """Try a drafter that is thought to lose, if what that costs is within the share for it.

        Lookups are not tried: what they propose is compared with what is emitted anyway.
        """
        for offer in offers:
            plan = plans[offer.name]
            if plan is None or offer.confidences is not None or plan.rate > best.rate:
                continue
            loss_s = plan.seconds - plan.tokens / best.rate + self._reading_s(offer, past)
            if self._probing_s + loss_s <= PROBE_SHARE * self._elapsed_s:
                self._probing_s += loss_s
                return Choice(offer.name, plan.depth)
        return None


def _followed(known: float, seconds: float) -> float:
    """An average over some rounds, 0 before the first, after one that took so long."""
    known = known or seconds
    return known + (min(seconds, _OUTLIER * known) - known) / _STEP_HORIZON
