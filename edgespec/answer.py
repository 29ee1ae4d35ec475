"""`Answer`: what is made of one request, piece by piece. Knows the loop and text; neither ONNX Runtime nor bundles.

`TextStream` and `AsyncTextStream` are the two ways to take it. An answer does not refer to either, so that a stream
which is dropped half read ends at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from edgespec.chat import Message
from edgespec.decoder import FinishReason, Step
from edgespec.gate import Closable, Gate
from edgespec.logprobs import TokenLogprobs
from edgespec.params import RequestParams, SamplingParams
from edgespec.prompts import Prompt
from edgespec.stats import GenerationStats
from edgespec.tokens import StreamDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of an answer.

    Attributes:
        text: never empty.
        is_drafted: whether the token that completed it was drafted and accepted, or came from the target alone.
    """

    text: str
    is_drafted: bool


class Interrupt(Protocol):
    """A flag that ends calls of a model which are under way."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class Host(Protocol):
    """What an answer needs of its engine."""

    tokenizer: Tokenizer
    gate: Gate

    def new_interrupt(self) -> Interrupt: ...

    def steps(
        self, prompt: Prompt, params: SamplingParams, stats: GenerationStats, poll: Callable[[], bool], interrupt: Any
    ) -> Generator[Step, None, None]: ...


class Answer:
    """One answer. Its attributes are described in `AnswerView`.

    Args:
        host: the engine.
        make_prompt: called once, by the thread that iterates.
        params: how the text is chosen.
        request: what happens where the engine is busy.
        on_end: called once when the answer has ended in whatever way, and the engine is free.
    """

    def __init__(
        self,
        host: Host,
        make_prompt: Callable[[], Prompt],
        params: SamplingParams,
        request: RequestParams,
        on_end: Callable[[Answer], None] | None = None,
    ) -> None:
        self.stats = GenerationStats()
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.prompt: Prompt | None = None
        self.is_over = False
        self.interrupt = host.new_interrupt()
        self._host, self._make_prompt, self._params, self._request = host, make_prompt, params, request
        self._on_end = on_end
        self._pieces: list[str] = []
        self._started = 0.0
        self._is_late = False
        self._num_reported = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def run(self, visitor: Callable[[], Closable | None]) -> Generator[TextPiece, None, None]:
        """The pieces. `visitor` finds who can be asked to close it, without keeping him alive."""
        gate = self._host.gate
        try:
            gate.check()
            self.prompt = self._make_prompt()
            if gate.enter(visitor, self._request, self.interrupt.is_set):
                try:
                    yield from self._steps(self.prompt)
                finally:
                    gate.leave()
        except GeneratorExit:
            self.end("cancelled")
            raise
        except BaseException:
            self.end(None)
            raise
        self.end("cancelled")

    def end(self, reason: FinishReason | None) -> None:
        """Once: keep the reason unless there is one, and tell whoever keeps the conversation."""
        if self.is_over:
            return
        self.is_over = True
        self.finish_reason = self.finish_reason or reason
        if self._on_end is not None:
            self._on_end(self)

    def _steps(self, prompt: Prompt) -> Generator[TextPiece, None, None]:
        self._started = perf_counter()
        text = StreamDecoder(self._host.tokenizer, self._params.stop, prompt.context)
        steps = self._host.steps(prompt, self._params, self.stats, self._poll, self.interrupt)
        with contextlib.closing(steps):
            for step in steps:
                self._report()
                yield from self._take(step, text)
                if self.finish_reason is not None:
                    return

    def _take(self, step: Step, text: StreamDecoder) -> Generator[TextPiece, None, None]:
        self.token_ids += step.tokens
        self.logprobs += step.logprobs
        drafted, own = text.push(step.tokens[: step.accepted]), text.push(step.tokens[step.accepted :])
        finish = self._cut(text) or step.finish
        if finish is not None:
            own += text.flush()
            self.finish_reason = "time" if finish == "cancelled" and self._is_late else finish
        for piece in (TextPiece(drafted, True), TextPiece(own, False)):
            if piece.text:
                self._pieces.append(piece.text)
                yield piece

    def _cut(self, text: StreamDecoder) -> FinishReason | None:
        """Forget tokens behind a stop string."""
        if not text.stopped:
            return None
        del self.token_ids[text.num_tokens :], self.logprobs[text.num_tokens :]
        self.stats.new_tokens = len(self.token_ids)
        return "stop"

    def _poll(self) -> bool:
        """Asked before each call of a model: is that enough?"""
        self._report()
        limit = self._params.max_time
        self._is_late = limit is not None and perf_counter() - self._started > limit
        return self._is_late or self.interrupt.is_set()

    def _report(self) -> None:
        """Tell the caller how much of the prompt has been read, when it has become more."""
        hook, read = self._request.on_prefill, self.stats.read_tokens
        if hook is not None and read > self._num_reported:
            self._num_reported = read
            hook(read, self.stats.prompt_tokens)


class AnswerView:
    """What can be known of an answer at any time, from any thread, and how it is cancelled."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    @property
    def stats(self) -> GenerationStats:
        """Counters and rates."""
        return self._answer.stats

    @property
    def token_ids(self) -> list[int]:
        """Of the answer so far, an end token included."""
        return self._answer.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of each of `token_ids`, if `SamplingParams.logprobs` asks for them; else empty."""
        return self._answer.logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """`eos`, `stop`, `length`, `context` (it is full), `time` or `cancelled`; `None` until the end, and after
        an error."""
        return self._answer.finish_reason

    @property
    def dropped(self) -> tuple[Message, ...]:
        """Messages that were left out of the prompt because it did not fit, oldest first; known at the first piece."""
        return () if self._answer.prompt is None else self._answer.prompt.dropped

    @property
    def prefill_progress(self) -> float:
        """Share of the prompt that has been read, cached tokens included: from 0 to 1."""
        stats = self._answer.stats
        return stats.read_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0

    @property
    def text_so_far(self) -> str:
        """What has been made of the text."""
        return self._answer.text

    @property
    def is_over(self) -> bool:
        """Whether it has ended: finished, closed or failed."""
        return self._answer.is_over

    def cancel(self) -> None:
        """End the answer. Takes no lock and returns at once, so it may be called from a signal handler, too.

        ONNX Runtime stops between two operators, while it reads the prompt as well. The engine is free when the
        thread that iterates has noticed, or when the stream is closed.
        """
        self._answer.interrupt.set()
