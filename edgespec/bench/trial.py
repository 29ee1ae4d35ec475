"""`Trial`: one answer as a record, and how it is measured on an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any, Literal

from edgespec.bench.recorder import Recorder, accepted_lengths, expected_rate
from edgespec.contracts import Tokens
from edgespec.engine import Engine
from edgespec.params import SamplingParams

# Whether the text is that of plain decoding; sampled texts differ by chance, not by mistake.
Equality = bool | Literal["not comparable"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer to one prompt by one setting.

    Attributes:
        setting, family, prompt_id: what was run on what.
        repetition, turn: which pass over the prompts, and at which turn among the settings.
        prompt_tokens, new_tokens, cached_tokens: tokens; cached are those of the prompt that were not read anew.
        seconds: from the request to the end of the text, detokenising included.
        first_token_s: of them until the first token was decided.
        target_passes, drafted, accepted: as in `GenerationStats`.
        accepted_lengths: how many rounds with a draft had 0, 1, 2, ... of its tokens accepted.
        predicted_tokens_per_s: what the controller expected of its choices, on average over time.
        finish_reason: why the text ended.
        text_digest: of the token ids; equal texts have equal ones.
        equal: to the text of plain decoding in the same repetition.
        first_difference: index of the first token that differs from it.
    """

    setting: str
    family: str
    prompt_id: str
    repetition: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    seconds: float
    first_token_s: float
    target_passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_lengths: tuple[int, ...] = ()
    predicted_tokens_per_s: float | None = None
    finish_reason: str | None = None
    text_digest: str = ""
    equal: Equality = "not comparable"
    first_difference: int | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first; `None` where there are none."""
        if self.new_tokens < 2:
            return None
        return (self.seconds - self.first_token_s) / (self.new_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.seconds_per_token is None else 1 / self.seconds_per_token

    @property
    def acceptance(self) -> float | None:
        return None if not self.drafted or self.accepted is None else self.accepted / self.drafted

    @property
    def tokens_per_pass(self) -> float | None:
        return None if not self.target_passes else self.new_tokens / self.target_passes

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates, ready for JSON."""
        rates = ("tokens_per_s", "acceptance", "tokens_per_pass")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        """The inverse of `as_dict`, other keys ignored."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known | {"accepted_lengths": tuple(data["accepted_lengths"])})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trial stands in the run: prompt, repetition and turn."""

    family: str
    prompt_id: str
    repetition: int
    turn: int


def run_trial(
    engine: Engine, setting: str, prompt: Tokens, params: SamplingParams, place: Place
) -> tuple[Trial, list[int]]:
    """Answer a prompt with a cold cache: the record, but for the comparison, and the token ids."""
    recorder = engine.policy
    assert isinstance(recorder, Recorder)
    forget(engine, prompt)
    recorder.take()
    stream = engine.generate(prompt, params)
    started = perf_counter()
    stream.text()
    seconds = perf_counter() - started
    rounds, stats = recorder.take(), stream.stats
    trial = Trial(
        setting,
        place.family,
        place.prompt_id,
        place.repetition,
        place.turn,
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.new_tokens,
        seconds,
        stats.prefill_s,
        stats.target_passes,
        stats.drafted,
        stats.accepted,
        accepted_lengths(rounds),
        expected_rate(rounds),
        stream.finish_reason,
        digest(stream.token_ids),
    )
    return trial, stream.token_ids


def forget(engine: Engine, prompt: Tokens) -> None:
    """Let the caches hold another text, which shares no token with the beginning of `prompt`."""
    other = (int(prompt[0]) + 1) % engine.bundle.manifest.target.vocab_size
    engine.generate([other], SamplingParams(max_new_tokens=1)).text()


def digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that is not the same, or `None` for equal texts."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
