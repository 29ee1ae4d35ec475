"""The parts of a round that do not depend on whose round it is: who drafts, what is emitted, what is learnt.

The target's rounds make the text; a draft model that has drafters of its own makes its proposals in such rounds, too.
Knows no clocks but its own stopwatch, no sessions and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

from edgespec.contracts import Drafter, DraftPolicy, Rows, Tokens
from edgespec.noise import Noise
from edgespec.policy import Offer, Outcome
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Distributions, Draft, Verdict, verify_greedy

Check: TypeAlias = Callable[[Distributions, Draft, Noise, int], Verdict]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be checked in a round, who drafted it and how long that took, and what lookups proposed."""

    draft: Draft
    name: str | None = None
    proposals: Mapping[str, Draft] = field(default_factory=dict)
    seconds: float = 0.0
    backlog: int = 0


NO_DRAFT = Plan(EMPTY_DRAFT)


def draft_round(
    drafters: Mapping[str, Drafter], policy: DraftPolicy, tokens: Tokens, limit: int, shaper: Shaper, noise: Noise
) -> Plan:
    """Ask the policy, and the drafter that it picks. Lookups propose first: that is free, and tells it more.

    Args:
        tokens: the text, shape (n,).
        limit: most tokens to draft; 0 is none.
    """
    limit = min(limit, policy.max_depth)
    if limit < 1 or not drafters:
        return NO_DRAFT
    started = perf_counter()
    proposals = {
        name: _possible(drafter.propose(tokens, limit, shaper, noise), tokens, shaper)
        for name, drafter in drafters.items()
        if drafter.is_lookup
    }
    offers = [
        Offer(name, confidences(proposals[name])) if name in proposals else Offer(name, None, d.backlog(tokens))
        for name, d in drafters.items()
    ]
    choice = policy.choose(offers, len(tokens), limit)
    if choice.name is None:
        return Plan(EMPTY_DRAFT, proposals=proposals, seconds=perf_counter() - started)
    if choice.name in proposals:
        draft = proposals[choice.name].first(choice.depth)
        return Plan(draft, choice.name, proposals, perf_counter() - started)
    name, past = choice.name, len(tokens)
    backlog = next(offer.backlog for offer in offers if offer.name == name)
    draft = drafters[name].propose(tokens, choice.depth, shaper, noise, lambda found: policy.goes_on(name, found, past))
    assert len(draft) <= choice.depth, (len(draft), choice)
    return Plan(draft, name, proposals, perf_counter() - started, backlog)


def decide(
    rows: Rows, draft: Draft, shaper: Shaper, noise: Noise, tokens: Tokens, check: Check
) -> tuple[Distributions, Verdict]:
    """What tokens are chosen from, by the number of drafted tokens before it, and what was chosen.

    Args:
        rows: logits after 0, 1, ... drafted tokens; overwritten.
        tokens: the text before the draft, shape (n,).
        check: the rule for sampled tokens.
    """
    if shaper.is_greedy:
        rows = shaper.adjust(rows, tokens, draft.tokens)
        return rows, verify_greedy(rows, draft)
    probs = shaper.distributions(rows, tokens, draft.tokens)
    return probs, check(probs, draft, noise, len(tokens))


def learn_round(
    policy: DraftPolicy,
    plan: Plan,
    emitted: list[int],
    num_accepted: int,
    past: int,
    num_pending: int,
    target_s: float,
    other_s: float,
) -> None:
    """Tell the policy what the round did, and what lookups that were not checked would have done.

    Args:
        emitted: the accepted tokens and the one behind them.
        past: tokens before the draft.
        num_pending: of them, those that the checking model had not read yet.
        target_s, other_s: seconds of its call, and of what is neither that nor drafting.
    """
    outcome = Outcome(
        plan.name,
        confidences(plan.draft),
        num_accepted,
        len(emitted),
        past,
        # More than one pending token is text being read: no round like the others.
        len(plan.draft) + 1 if num_pending == 1 else 0,
        target_s,
        plan.seconds,
        plan.backlog,
        other_s,
    )
    policy.learn(outcome)
    for name, proposal in plan.proposals.items():
        if name != plan.name and len(proposal):
            seen = list(zip(proposal.tokens.tolist(), emitted, strict=False))
            agreed = next((i for i, (one, other) in enumerate(seen) if one != other), len(seen))
            policy.learn_shadow(name, confidences(proposal)[: len(seen)], agreed)


def confidences(draft: Draft) -> tuple[float, ...]:
    """One for each token; a drafter that says nothing is as sure of one as of another."""
    return draft.confidences or (0.0,) * len(draft)


def _possible(draft: Draft, tokens: Tokens, shaper: Shaper) -> Draft:
    """A deterministic proposal up to the first token that the grammar refuses."""
    return draft.first(shaper.num_possible(tokens, draft.tokens)) if len(draft) else draft
