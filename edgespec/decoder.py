"""The speculative loop: draft, check, emit. Draft length 0 is plain decoding.

Owns the committed tokens while an answer is made; caches follow them by `sync`. Knows neither the runtime behind
a `Scorer` nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from edgespec.contracts import Drafter, DraftPolicy, Interrupted, Rows, Scorer, Tokens
from edgespec.errors import ConfigError, ContextOverflowError
from edgespec.logprobs import TokenLogprobs, token_logprobs
from edgespec.noise import Noise
from edgespec.params import SamplingParams, Verifier
from edgespec.policy import FixedPolicy
from edgespec.rounds import Check, Plan, decide, draft_round, learn_round
from edgespec.shaper import Constraint, Shaper
from edgespec.stats import GenerationStats
from edgespec.verify import Distributions, Draft, Verdict, verify_coupled, verify_greedy, verify_rejection

FinishReason = Literal["eos", "stop", "length", "context", "time", "cancelled"]


@dataclass(frozen=True, slots=True)
class Step:
    """One round of the loop.

    Attributes:
        tokens: emitted, at least one unless cancelled; an end token is included.
        drafted, accepted: proposed tokens, and those of them among `tokens`.
        finish: why the answer ends here, or `None`.
        logprobs: of each of `tokens`, if they were asked for.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class SpeculativeDecoder:
    """Generates tokens from a target model, checked drafts included.

    Args:
        target: scores; its distribution is what the output has.
        drafter: proposes; several by name, of which the policy picks one a round; `None` is plain decoding.
        num_draft_tokens: proposed each round where there is no `policy`.
        policy: decides who drafts and how much. Keeps what it has learnt from one answer to the next.
        eos_token_ids: tokens that end an answer.
        prefill_chunk: tokens of the prompt between two looks at `cancelled`; even.
        verifier: how sampled drafts are checked.
        near_tie: greedy rows whose best two logits are closer than this are computed again alone.
    """

    def __init__(
        self,
        target: Scorer,
        drafter: Drafter | Mapping[str, Drafter] | None,
        *,
        num_draft_tokens: int = 0,
        policy: DraftPolicy | None = None,
        eos_token_ids: tuple[int, ...],
        prefill_chunk: int,
        verifier: Verifier = "standard",
        near_tie: float = 0.0,
    ) -> None:
        self.target = target
        if drafter is None:
            self.drafters: Mapping[str, Drafter] = {}
        else:
            self.drafters = drafter if isinstance(drafter, Mapping) else {"draft": drafter}
        self.policy: DraftPolicy = policy or FixedPolicy(num_draft_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefill_chunk = prefill_chunk
        self.near_tie = near_tie
        self._check: Check = verify_coupled if verifier == "coupled" else verify_rejection

    def generate(
        self,
        prompt: Tokens,
        params: SamplingParams,
        stats: GenerationStats,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        draft_first: bool = False,
        constraint: Constraint | None = None,
    ) -> Iterator[Step]:
        """Yield rounds until the answer ends. Closing the iterator, or an error, leaves the decoder usable.

        Args:
            prompt: shape (n,), n >= 1.
            params: how tokens are chosen, and how many.
            stats: counted up while the answer is made.
            cancelled: asked before each call of a model.
            draft_first: draft from the first token on, instead of letting the first token wait for the prompt
                alone. Makes the law of a whole round testable at a context that is known.
            constraint: what the answer must match: `params.grammar`, made ready for the tokenizer.
        Raises:
            ContextOverflowError: the prompt leaves no room for an answer.
            ConfigError: a token id in `params` is outside the vocabulary, or what `params` ask for leaves nothing
                to choose from.
        """
        assert (params.grammar is None) == (constraint is None), params
        if len(prompt) >= self.target.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(prompt)} tokens and the model's context {self.target.context_length}: shorten it"
            )
        started = perf_counter()
        stats.prompt_tokens = len(prompt)
        context = _Context(prompt, params.max_new_tokens)
        shaper = Shaper(params, prompt, self.eos_token_ids, self.target.vocab_size, constraint)
        noise = Noise(params.seed)
        # The first token waits for the prompt alone: a draft model reads it when it is first asked.
        may_draft = draft_first
        finish: FinishReason | None = None
        try:
            is_read = self._read(context.tokens, stats, cancelled)
            while finish is None:
                if not is_read or cancelled():
                    raise Interrupted
                step = self._round(context, may_draft, shaper, noise, stats)
                may_draft, finish = True, step.finish
                _count(stats, step, perf_counter() - started)
                yield step
                started = perf_counter()
        except Interrupted:
            yield Step((), 0, 0, "cancelled")
        finally:  # also where a stop string ended the answer, which closes this generator
            for drafter in self.drafters.values():
                drafter.learn(context.tokens)

    def _read(self, context: Tokens, stats: GenerationStats, cancelled: Callable[[], bool]) -> bool:
        """Feed the target all but the last chunk of the prompt. False when cancelled midway."""
        pending = self.target.sync(context)
        stats.cached_tokens = stats.read_tokens = len(context) - len(pending)
        while len(pending) > self.prefill_chunk:
            if cancelled():
                return False
            self.target.forward(pending[: self.prefill_chunk], 1)
            pending = pending[self.prefill_chunk :]
            stats.read_tokens += self.prefill_chunk
        return True

    def _round(self, context: _Context, may_draft: bool, shaper: Shaper, noise: Noise, stats: GenerationStats) -> Step:
        begun = perf_counter()
        plan = self._draft(context, may_draft, shaper, noise)
        draft = plan.draft
        pending = self.target.sync(context.tokens)
        started = perf_counter()
        rows = self.target.forward(np.concatenate([pending, draft.tokens]), len(draft) + 1)
        target_s = perf_counter() - started
        raw = None if shaper.params.logprobs is None else rows.copy()
        choices, verdict = self._decide(rows, draft, shaper, noise, context.tokens)
        emitted = [*draft.tokens[: verdict.accepted].tolist(), verdict.token]
        other_s = perf_counter() - begun - plan.seconds - target_s
        learn_round(self.policy, plan, emitted, verdict.accepted, len(context.tokens), len(pending), target_s, other_s)
        possible = [shaper.is_possible(choices[i], token) for i, token in enumerate(emitted)]
        if not possible[0]:
            raise ConfigError(
                f"no token is left to choose behind the {len(context.tokens)} tokens so far: the bans, the "
                "logits_processor and the grammar of this answer exclude each other"
            )
        if not all(possible):  # the next round finds out whether the text really gets there
            del emitted[possible.index(False) :]
        finish = self._cut(emitted, context, shaper.params)
        context.extend(emitted)
        stats.draft_s += plan.seconds
        logprobs = () if raw is None else token_logprobs(raw[: len(emitted)], emitted, shaper.params.logprobs or 0)
        return Step(tuple(emitted), len(draft), min(verdict.accepted, len(emitted)), finish, logprobs)

    def _draft(self, context: _Context, may_draft: bool, shaper: Shaper, noise: Noise) -> Plan:
        tokens = context.tokens
        # One token less than there is room for: the pass itself emits one more.
        room = min(context.room, self.target.context_length - len(tokens)) - 1
        return draft_round(self.drafters, self.policy, tokens, room if may_draft else 0, shaper, noise)

    def _decide(
        self, rows: Rows, draft: Draft, shaper: Shaper, noise: Noise, context: Tokens
    ) -> tuple[Distributions, Verdict]:
        """What tokens are chosen from, by the number of drafted tokens before it, and what was chosen."""
        if not (shaper.is_greedy and self.near_tie and len(draft)):
            return decide(rows, draft, shaper, noise, context, self._check)
        rows = self._without_ties(shaper.adjust(rows, context, draft.tokens), draft, shaper, context)
        return rows, verify_greedy(rows, draft)

    def _without_ties(self, rows: Rows, draft: Draft, shaper: Shaper, context: Tokens) -> Rows:
        """The rows that decide, near-ties among them as they are when computed alone."""
        rows = rows.copy()  # further calls use the buffer again
        text = np.concatenate([context, draft.tokens])
        for i in range(len(rows)):
            second, best = np.partition(rows[i], -2)[-2:]
            if best - second < self.near_tie:
                end = len(context) + i
                alone = self.target.forward(self.target.sync(text[:end]), 1)
                rows[i] = shaper.adjust(alone, text[:end], draft.tokens[:0])[0]
            if i == len(draft) or rows[i].argmax() != draft.tokens[i]:
                break
        return rows

    def _cut(self, emitted: list[int], context: _Context, params: SamplingParams) -> FinishReason | None:
        """Cut `emitted` behind an end token, and say whether the answer ends."""
        if not params.ignore_eos:
            for i, token in enumerate(emitted):
                if token in self.eos_token_ids:
                    del emitted[i + 1 :]
                    return "eos"
        if len(emitted) >= context.room:
            return "length"
        return "context" if len(context.tokens) + len(emitted) >= self.target.context_length else None


class _Context:
    """The committed tokens: the prompt and what was emitted, in one buffer."""

    def __init__(self, prompt: Tokens, max_new_tokens: int) -> None:
        self._end = len(prompt) + max_new_tokens
        self._buffer = np.concatenate([prompt, np.empty(min(max_new_tokens, 1024), np.int64)])
        self._length = len(prompt)

    @property
    def tokens(self) -> Tokens:
        return self._buffer[: self._length]

    @property
    def room(self) -> int:
        """How many more tokens the answer may have."""
        return self._end - self._length

    def extend(self, tokens: list[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.tokens, np.empty(end, np.int64)])
        self._buffer[self._length : end] = tokens
        self._length = end


def _count(stats: GenerationStats, step: Step, seconds: float) -> None:
    if stats.target_passes == 0:
        stats.prefill_s = seconds
        stats.read_tokens = stats.prompt_tokens
    else:
        stats.decode_s += seconds
    stats.target_passes += 1
    stats.rounds_drafted += step.drafted > 0
    stats.drafted += step.drafted
    stats.accepted += step.accepted
    stats.new_tokens += len(step.tokens)
