"""What a caller may choose. Every default of the project is written here, once. Knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.errors import ConfigError

DrafterName = Literal["auto", "model", "ngram", "none"]
Spinning = Literal["auto", "on", "off", "stop"]
RowInvariance = Literal[">=2", "even", "none"]


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the text of one answer is chosen.

    The order is temperature, top-k, top-p, min-p, as in transformers; each works on what the one before left,
    renormalised. All of them apply to the target's and to the draft's distribution alike.

    Attributes:
        temperature: 0 is greedy (arg max, a path of its own); otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass is at least this; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        seed: of the noise; `None` takes a fresh one from the operating system for each answer.
        max_new_tokens: the answer has at most this many tokens, the end token included.
        stop: the answer ends before the first of these strings.
        ignore_eos: go on past the model's end tokens (for measuring).

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 512
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        number = _is_number
        _require(
            number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        _require(_is_count(self.top_k, 0), "top_k", self.top_k, "0 (off) or a positive integer")
        _require(number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 (off) to 1")
        _require(
            self.seed is None or (_is_count(self.seed, 0) and self.seed < 2**64),
            "seed",
            self.seed,
            "None or an integer from 0 to 2**64 - 1",
        )
        _require(_is_count(self.max_new_tokens, 1), "max_new_tokens", self.max_new_tokens, "a positive integer")
        _require(
            not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "a list of non-empty strings",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class SpecParams:
    """How drafts are made.

    Attributes:
        drafter: `model` (the bundle's draft), `ngram` (prompt lookup), `none` (plain decoding), or `auto`: the
            model where the bundle has one, prompt lookup otherwise.
        num_draft_tokens: tokens proposed per round at most; gamma in the papers. 0 is plain decoding.
        max_ngram: longest suffix that prompt lookup searches for.
    """

    drafter: DrafterName = "auto"
    num_draft_tokens: int = 4
    max_ngram: int = 4

    def __post_init__(self) -> None:
        names = ("auto", "model", "ngram", "none")
        _require(self.drafter in names, "drafter", self.drafter, "one of " + ", ".join(names))
        _require(
            _is_count(self.num_draft_tokens, 0) and self.num_draft_tokens <= 64,
            "num_draft_tokens",
            self.num_draft_tokens,
            "an integer from 0 to 64",
        )
        _require(_is_count(self.max_ngram, 1), "max_ngram", self.max_ngram, "a positive integer")


@dataclass(frozen=True, slots=True)
class RuntimeParams:
    """How ONNX Runtime runs the graphs.

    Attributes:
        provider: execution provider by short name (`cpu`, `cuda`) or by ONNX Runtime's own
            (`CPUExecutionProvider`). There is no fall-back: one that cannot be used is an error.
        threads: worker threads inside an operator; `None` lets ONNX Runtime take the physical cores.
        spinning: whether idle workers spin. `on` is ONNX Runtime's default, `stop` ends it with each run, `off`
            never spins. `auto` is `stop` for one session and `off` where a draft session shares the cores.
        exact: never call the target with one row (with an odd number, where the bundle needs it), so that
            speculative greedy text is bit-identical to plain greedy text. Proved by a self-check at load.
        prefill_chunk: prompt tokens per call; even. Bounds memory, and the time until a cancel is noticed.
        initial_capacity: tokens that a cache holds at first; it doubles when full.
        verify_hashes: check the sha256 of every file of the bundle at load.
    """

    provider: str = "cpu"
    threads: int | None = None
    spinning: Spinning = "auto"
    exact: bool = False
    prefill_chunk: int = 256
    initial_capacity: int = 512
    verify_hashes: bool = True

    def __post_init__(self) -> None:
        _require(
            self.threads is None or (_is_count(self.threads, 1) and self.threads <= 1024),
            "threads",
            self.threads,
            "None or an integer from 1 to 1024",
        )
        names = ("auto", "on", "off", "stop")
        _require(self.spinning in names, "spinning", self.spinning, "one of " + ", ".join(names))
        _require(
            _is_count(self.prefill_chunk, 2) and self.prefill_chunk % 2 == 0,
            "prefill_chunk",
            self.prefill_chunk,
            "an even integer of at least 2",
        )
        _require(_is_count(self.initial_capacity, 8), "initial_capacity", self.initial_capacity, "at least 8")
