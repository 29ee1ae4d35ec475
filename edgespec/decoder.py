"""The speculative loop: draft, check, emit. Draft length 0 is plain decoding.

Owns the committed tokens while an answer is made; caches follow them by `sync`. Knows neither the runtime behind
a `Scorer` nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from edgespec.contracts import Drafter, Rows, Scorer, Tokens
from edgespec.errors import ContextOverflowError
from edgespec.noise import Noise
from edgespec.params import SamplingParams
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.verify import EMPTY_DRAFT, Draft, Verdict, verify_greedy, verify_rejection

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Step:
    """One round of the loop.

    Attributes:
        tokens: emitted, at least one unless cancelled; an end token is included.
        drafted, accepted: proposed tokens, and those of them among `tokens`.
        finish: why the answer ends here, or `None`.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    finish: FinishReason | None


class SpeculativeDecoder:
    """Generates tokens from a target model, checked drafts included.

    Args:
        target: scores; its distribution is what the output has.
        drafter: proposes; `None` is plain decoding.
        num_draft_tokens: proposed per round at most.
        eos_token_ids: tokens that end an answer.
        prefill_chunk: tokens of the prompt between two looks at `cancelled`; even.
    """

    def __init__(
        self,
        target: Scorer,
        drafter: Drafter | None,
        *,
        num_draft_tokens: int,
        eos_token_ids: tuple[int, ...],
        prefill_chunk: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefill_chunk = prefill_chunk

    def generate(
        self,
        prompt: Tokens,
        params: SamplingParams,
        stats: GenerationStats,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Step]:
        """Yield rounds until the answer ends. Closing the iterator, or an error, leaves the decoder usable.

        Args:
            prompt: shape (n,), n >= 1.
            params: how tokens are chosen, and how many.
            stats: counted up while the answer is made.
            cancelled: asked before each call of a model.
        Raises:
            ContextOverflowError: the prompt leaves no room for an answer.
        """
        if len(prompt) >= self.target.context_length:
            raise ContextOverflowError(
                f"the prompt has {len(prompt)} tokens and the model's context {self.target.context_length}: shorten it"
            )
        started = perf_counter()
        stats.prompt_tokens = len(prompt)
        context = _Context(prompt, params.max_new_tokens)
        shaper, noise = Shaper(params), Noise(params.seed)
        is_read = self._read(context.tokens, stats, cancelled)
        # The first token waits for the prompt alone: the drafter reads it when it is first asked.
        limit = 0
        finish: FinishReason | None = None
        while finish is None:
            if not is_read or cancelled():
                yield Step((), 0, 0, "cancelled")
                return
            step = self._round(context, limit, shaper, noise, stats)
            limit, finish = self.num_draft_tokens, step.finish
            _count(stats, step, perf_counter() - started)
            yield step
            started = perf_counter()

    def _read(self, context: Tokens, stats: GenerationStats, cancelled: Callable[[], bool]) -> bool:
        """Feed the target all but the last chunk of the prompt. False when cancelled midway."""
        pending = self.target.sync(context)
        stats.cached_tokens = len(context) - len(pending)
        while len(pending) > self.prefill_chunk:
            if cancelled():
                return False
            self.target.forward(pending[: self.prefill_chunk], 1)
            pending = pending[self.prefill_chunk :]
        return True

    def _round(self, context: _Context, limit: int, shaper: Shaper, noise: Noise, stats: GenerationStats) -> Step:
        draft = self._draft(context, limit, shaper, noise, stats)
        pending = self.target.sync(context.tokens)
        rows = self.target.forward(np.concatenate([pending, draft.tokens]), len(draft) + 1)
        verdict = _decide(rows, draft, shaper, noise, context.tokens)
        emitted = [*draft.tokens[: verdict.accepted].tolist(), verdict.token]
        finish = self._cut(emitted, context, shaper.params)
        context.extend(emitted)
        return Step(tuple(emitted), len(draft), min(verdict.accepted, len(emitted)), finish)

    def _draft(self, context: _Context, limit: int, shaper: Shaper, noise: Noise, stats: GenerationStats) -> Draft:
        # One token less than there is room for: the pass itself emits one more.
        limit = min(limit, context.room - 1, self.target.context_length - len(context.tokens) - 1)
        if self.drafter is None or limit < 1:
            return EMPTY_DRAFT
        started = perf_counter()
        draft = self.drafter.propose(context.tokens, limit, shaper, noise)
        stats.draft_s += perf_counter() - started
        assert len(draft) <= limit, (len(draft), limit)
        return draft

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


def _decide(rows: Rows, draft: Draft, shaper: Shaper, noise: Noise, context: Tokens) -> Verdict:
    if shaper.is_greedy:
        return verify_greedy(shaper.adjust(rows, context, draft.tokens), draft)
    return verify_rejection(shaper.shape(rows, context, draft.tokens), draft, noise, len(context))


def _count(stats: GenerationStats, step: Step, seconds: float) -> None:
    if stats.target_passes == 0:
        stats.prefill_s = seconds
    else:
        stats.decode_s += seconds
    stats.target_passes += 1
    stats.rounds_drafted += step.drafted > 0
    stats.drafted += step.drafted
    stats.accepted += step.accepted
    stats.new_tokens += len(step.tokens)
