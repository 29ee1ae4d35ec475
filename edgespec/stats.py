"""Counters and timers of one answer, and the rates that follow from them. Knows nothing of models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class GenerationStats:
    """What happened while one answer was made. Rates are `None` while they are unknown, never 0.

    Attributes:
        prompt_tokens: tokens of the prompt, those that were still cached included.
        cached_tokens: tokens of the prompt that the target had already read.
        read_tokens: tokens of the prompt that the target has read by now, cached ones included.
        new_tokens: tokens of the answer.
        target_passes: calls of the target that decided tokens.
        rounds_drafted: those of them that checked at least one drafted token.
        drafted: tokens proposed.
        accepted: tokens proposed and emitted.
        prefill_s: seconds until the first token was decided.
        decode_s: seconds after that, the time the consumer took between tokens excluded.
        draft_s: seconds of these that the drafter took.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    rounds_drafted: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, per second of decoding."""
        return _ratio(self.new_tokens - 1, self.decode_s) if self.new_tokens > 1 else None

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens per drafted token."""
        return _ratio(self.accepted, self.drafted)

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens of the answer per call of the target."""
        return _ratio(self.new_tokens, self.target_passes)

    def as_dict(self) -> dict[str, Any]:
        """Counters, timers and rates, ready for JSON."""
        rates = ("tokens_per_s", "acceptance", "tokens_per_pass")
        return asdict(self) | {name: getattr(self, name) for name in rates}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
