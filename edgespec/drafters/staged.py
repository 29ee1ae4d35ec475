"""A draft model that is drafted for itself, by lookup or by a yet smaller model. Knows protocols only."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from edgespec.contracts import Drafter, DraftPolicy, GoesOn, Rows, Scorer, Tokens
from edgespec.drafters.model import confidence, enough_rows
from edgespec.noise import Noise
from edgespec.rounds import Check, decide, draft_round, learn_round
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft, verify_coupled, verify_rejection


class StagedDrafter(Drafter):
    """Drafts with a model that itself runs speculatively, in rounds like the target's.

    What it proposes is distributed exactly as the model's own choice would be, so that the target checks it against
    the model's distributions, whoever drafted for that. Whether a token is proposed at a place is known before it is
    drawn, which is all that the rule asks for.

    Args:
        scorer: the draft model, with a head of all tokens.
        vocab_size: columns of the target's logits.
        drafters: of the draft model, by name.
        policy: decides which of them drafts, and how much.
        is_coupled: as for `ModelDrafter`.
    """

    is_lookup = False

    def __init__(
        self,
        scorer: Scorer,
        vocab_size: int,
        drafters: Mapping[str, Drafter],
        policy: DraftPolicy,
        *,
        is_coupled: bool = False,
    ) -> None:
        self.scorer = scorer
        self.drafters = drafters
        self.policy = policy
        self._is_coupled = is_coupled
        self._check: Check = verify_coupled if is_coupled else verify_rejection
        # A draft may have more or fewer padding columns than the target, which must not be drafted.
        self._width = min(vocab_size, scorer.vocab_size)
        self._dists = np.zeros((0, vocab_size), np.float32)

    def backlog(self, context: Tokens) -> int:
        return len(self.scorer.sync(context))

    def learn(self, text: Tokens) -> None:
        for drafter in self.drafters.values():
            drafter.learn(text)

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        start = len(context)
        limit = min(limit, self.scorer.context_length - start)
        if limit < 1:
            return EMPTY_DRAFT
        text = np.concatenate([context, np.empty(limit, np.int64)])
        draws = not (shaper.is_greedy or self._is_coupled)
        if draws:
            self._dists = enough_rows(self._dists, limit, self._dists.shape[1])
        dists = self._dists if draws else None
        noise = noise.inside(start)
        confidences: list[float] = []
        end = start
        while end < start + limit:
            tokens, rows = self._round(text[:end], start + limit - end, shaper, noise)
            for token, row in zip(tokens, rows, strict=True):
                confidences.append(confidence(row, token, shaper.is_greedy))
                if dists is not None:
                    dists[end - start, : self._width] = row
                text[end] = token
                end += 1
            if not tokens or tokens[-1] in shaper.eos_token_ids or (goes_on is not None and not goes_on(confidences)):
                break
        return Draft(text[start:end], None if dists is None else dists[: end - start], tuple(confidences))

    def _round(self, text: Tokens, room: int, shaper: Shaper, noise: Noise) -> tuple[list[int], list[Rows]]:
        """The tokens of a round of the draft model, at most `room`, and the row that each was chosen from."""
        begun = perf_counter()
        plan = draft_round(self.drafters, self.policy, text, room - 1, shaper, noise)
        draft = plan.draft
        pending = self.scorer.sync(text)
        started = perf_counter()
        logits = self.scorer.forward(np.concatenate([pending, draft.tokens]), len(draft) + 1)[:, : self._width]
        model_s = perf_counter() - started
        choices, verdict = decide(logits, draft, shaper, noise, text, self._check)
        emitted = [*draft.tokens[: verdict.accepted].tolist(), verdict.token]
        other_s = perf_counter() - begun - plan.seconds - model_s
        learn_round(self.policy, plan, emitted, verdict.accepted, len(text), len(pending), model_s, other_s)
        rows: list[Rows] = []
        for i, token in enumerate(emitted):
            if not shaper.is_possible(choices[i], token):
                break
            rows.append(choices[i])
            if token in shaper.eos_token_ids:
                break
        return emitted[: len(rows)], rows
