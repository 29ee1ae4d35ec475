"""What a caller may choose. Every default of the project is written here, once. Knows nothing of models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal

from edgespec.errors import ConfigError

DrafterName = Literal["auto", "model", "ngram", "history", "none"] | str
Verifier = Literal["standard", "coupled"]
Spinning = Literal["auto", "on", "off", "stop"]
RowInvariance = Literal[">=2", "even", "none"]
GrammarKind = Literal["json_schema", "regex", "lark"]
Overflow = Literal["stop", "refuse", "drop_oldest"]
Busy = Literal["raise", "wait"]
# (tokens of the text so far, shape (n,); row of logits that follows it) -> row. Arrays; this file knows no NumPy.
LogitsProcessor = Callable[[Any, Any], Any]


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match as a whole: a JSON schema, a regular expression or a Lark grammar.

    Only tokens that keep a match possible can be chosen, and the end token only where the text is a match; where
    nothing can be added to it, the answer ends. An answer that is cut by `max_new_tokens` or a stop string is the
    beginning of a match. Needs the extra `structured` (llguidance, whose dialects of the three are accepted).

    Attributes:
        kind: `json_schema`, `regex` or `lark`.
        source: the schema, the expression or the grammar, as text.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        kinds = ("json_schema", "regex", "lark")
        _require(self.kind in kinds, "the kind of grammar", self.kind, "one of " + ", ".join(kinds))
        wanted = "text that is not empty"
        _require(isinstance(self.source, str) and bool(self.source.strip()), f"the {self.kind}", self.source, wanted)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """JSON that a schema (its text, or what that parses to) accepts, written without white space.

        Raises:
            ConfigError: it is not a JSON object.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(parsed)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the JSON schema is not valid JSON: {error}") from error
        if not isinstance(parsed, Mapping):
            raise ConfigError(f"the JSON schema is not a JSON object: {source[:80]}")
        return cls("json_schema", source)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression (of Rust's dialect: no look-around, no back references) matches whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text that a context-free grammar in Lark's notation derives from its rule `start`."""
        return cls("lark", grammar)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the text of one answer is chosen.

    First the logits are changed, in this order: logit bias, repetition penalty, frequency and presence penalty,
    no-repeat n-gram, minimum of new tokens, banned tokens, the caller's own processor, grammar. Greedy decoding
    takes the arg max of the result. Otherwise follow temperature, top-k, top-p, min-p and typical-p, each working
    on what the one before left, renormalised. The order is that of transformers, which has no presence and no
    frequency penalty, and where a grammar is a processor of the caller.

    All of it applies to the target's and to the draft's rows alike, and what depends on the text sees the text as
    it is at that row, drafted tokens included.

    Attributes:
        temperature: 0 is greedy (arg max, a path of its own); otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass is at least this; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        typical_p: keep the tokens whose surprise is closest to the entropy, up to this mass; 1 keeps all.
        repetition_penalty: for tokens of the prompt or the answer, positive logits are divided by it and
            negative ones multiplied; 1 changes nothing, below 1 rewards repetition.
        frequency_penalty: subtracted from a token's logit for each time that it occurs in the answer; from -2 to 2.
        presence_penalty: subtracted once if it occurs in the answer at all; from -2 to 2. As in OpenAI's API:
            logit[t] - count[t] * frequency_penalty - (count[t] > 0) * presence_penalty, prompt not counted.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in prompt and answer; 0 is off.
        logit_bias: added to the logits of these token ids.
        banned_tokens: ids that are never chosen.
        min_new_tokens: no end token before the answer has this many tokens.
        logits_processor: `(context, row) -> row`, called for every row: `context` are the ids before it, shape
            (n,), read only; `row` is shape (columns,), float32, and may be changed and returned. It must depend
            on nothing else, or target and draft see different rules. A draft model may have more or fewer
            columns (padding) than the target.
        grammar: what the text must match.
        seed: of the noise; `None` takes a fresh one from the operating system for each answer.
        max_new_tokens: the answer has at most this many tokens, the end token included.
        stop: the answer ends before the first of these strings.
        ignore_eos: go on past the model's end tokens (for measuring).
        max_time: seconds from the start of the work (waiting for a busy engine not counted) after which no further
            call of a model is begun; the answer ends with the reason `time`. `None` is no limit.
        logprobs: for each token of the answer, its log-probability and those of this many most probable tokens;
            0 gives only its own, `None` nothing. They are the target's own, the log-softmax of its logits at that
            position before anything above (bias, penalties, temperature, cuts, grammar) changes them.

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
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    logits_processor: LogitsProcessor | None = None
    grammar: Grammar | None = None
    max_time: float | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_cuts()
        self._check_penalties()
        self._check_tokens()
        self._check_text()

    def _check_cuts(self) -> None:
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
        typical = number(self.typical_p) and 0 < self.typical_p <= 1
        _require(typical, "typical_p", self.typical_p, "above 0 and at most 1 (off)")

    def _check_penalties(self) -> None:
        factor = self.repetition_penalty
        wanted = "a number above 0, at most 100; 1 is off"
        _require(_is_number(factor) and 0 < factor <= 100, "repetition_penalty", factor, wanted)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "a number from -2 to 2; 0 is off")
        size = self.no_repeat_ngram_size
        _require(_is_count(size, 0), "no_repeat_ngram_size", size, "0 (off) or a positive integer")

    def _check_tokens(self) -> None:
        bias, banned = self.logit_bias, self.banned_tokens
        _require(
            isinstance(bias, Mapping) and all(_is_count(t, 0) and _is_number(b) for t, b in bias.items()),
            "logit_bias",
            bias,
            "a mapping of token ids to finite numbers",
        )
        is_list = isinstance(banned, Sequence) and not isinstance(banned, str)
        _require(is_list and all(_is_count(t, 0) for t in banned), "banned_tokens", banned, "a list of token ids")
        _require(_is_count(self.min_new_tokens, 0), "min_new_tokens", self.min_new_tokens, "0 or a positive integer")

    def _check_text(self) -> None:
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
        seconds, count = self.max_time, self.logprobs
        is_time = seconds is None or (_is_number(seconds) and seconds > 0)
        _require(is_time, "max_time", seconds, "None or a number of seconds above 0")
        is_few = count is None or (_is_count(count, 0) and count <= 100)
        _require(is_few, "logprobs", count, "None or an integer from 0 to 100")
        hook, grammar = self.logits_processor, self.grammar
        _require(hook is None or callable(hook), "logits_processor", hook, "None or a function (context, row) -> row")
        made = "None or made by Grammar.json_schema, Grammar.regex or Grammar.lark"
        _require(grammar is None or isinstance(grammar, Grammar), "grammar", grammar, made)
        _require(grammar is None or not self.ignore_eos, "ignore_eos", self.ignore_eos, "False with a grammar")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How one answer is asked for: what happens when the engine is busy or the text too long.

    Attributes:
        overflow: what a conversation that outgrows the context does. `stop`: the answer ends where the context
            does, with the reason `context`; a prompt that leaves no room at all is refused. `refuse`: the prompt and
            `max_new_tokens` must fit together, or nothing is begun. `drop_oldest` (chats only): the oldest turns are
            left out, never the system prompt nor the last turn, until there is room for `max_new_tokens` or a
            quarter of the context, whichever is less; `TextStream.dropped` says what was left out. The cache holds
            keys rotated by their position, so all that comes after a gap has to be read again: the cost is a prompt
            of the turns that are kept. Therefore more is dropped than must be, up to a quarter of the context, and the
            turns after that find the cache as they need it.
        busy: `raise` raises BusyError at once where the engine is making another answer, `wait` waits for its end.
        timeout: seconds that `wait` waits at most before it raises BusyError; `None` is for ever. A thread that
            waits for a stream which it left half read itself waits in vain.
        on_prefill: `(read, total)`, called while the prompt is read, in the thread that iterates, after every
            `RuntimeParams.prefill_chunk` tokens and at the end; both count tokens, cached ones included. It may
            cancel the stream.

    Raises:
        ConfigError: a value is out of its range.
    """

    overflow: Overflow = "stop"
    busy: Busy = "raise"
    timeout: float | None = None
    on_prefill: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        for name, choices in (("overflow", ("stop", "refuse", "drop_oldest")), ("busy", ("raise", "wait"))):
            value = getattr(self, name)
            _require(value in choices, name, value, "one of " + ", ".join(choices))
        seconds, hook = self.timeout, self.on_prefill
        is_time = seconds is None or (_is_number(seconds) and seconds >= 0)
        _require(is_time, "timeout", seconds, "None or a number of seconds, 0 or more")
        _require(hook is None or callable(hook), "on_prefill", hook, "None or a function (read, total)")


@dataclass(frozen=True, slots=True)
class SpecParams:
    """How drafts are made.

    Attributes:
        drafter: `model` (the bundle's draft), `ngram` (prompt lookup), `none` (plain decoding), or `auto`: both, as
            far as the bundle has a draft, one of them in a round (the model alone with a fixed number of tokens).
        num_draft_tokens: tokens proposed per round; gamma in the papers. 0 is plain decoding. `None` drafts as long
            as it pays by what calls cost on this machine, which may be not at all.
        max_ngram: longest suffix that prompt lookup searches for.
        history: file in which the token ids of earlier answers are kept, to look up in them, too: `history` among the
            drafters. "" keeps them in memory only. `None`, the default, keeps nothing.
        verifier: how sampled drafts are checked; greedy ones always by arg max. `standard` accepts the most;
            `coupled` shares noise between target and draft, so that the text for a seed is the same with any
            drafter or none (to the last bit in exact mode).
    """

    drafter: DrafterName = "auto"
    num_draft_tokens: int | None = None
    max_ngram: int = 8
    history: str | PathLike[str] | None = None
    verifier: Verifier = "standard"

    def __post_init__(self) -> None:
        _require(isinstance(self.drafter, str) and bool(self.drafter), "drafter", self.drafter, "a drafter's name")
        _require(
            self.num_draft_tokens is None or (_is_count(self.num_draft_tokens, 0) and self.num_draft_tokens <= 64),
            "num_draft_tokens",
            self.num_draft_tokens,
            "None or an integer from 0 to 64",
        )
        _require(_is_count(self.max_ngram, 1), "max_ngram", self.max_ngram, "a positive integer")
        _require(self.verifier in ("standard", "coupled"), "verifier", self.verifier, "standard or coupled")


@dataclass(frozen=True, slots=True)
class RuntimeParams:
    """How ONNX Runtime runs the graphs.

    Attributes:
        provider: execution provider by short name (`cpu`, `cuda`) or by ONNX Runtime's own
            (`CPUExecutionProvider`). There is no fall-back: one that cannot be used is an error.
        threads: worker threads inside an operator; `None` is what `edgespec tune` found best for the bundle, before
            that ONNX Runtime's choice, the physical cores.
        spinning: whether idle workers spin. `on` is ONNX Runtime's default, `stop` ends it with each run, `off`
            never spins. `auto` is what `edgespec tune` found best for the bundle; before that `stop` or `off`,
            whichever the first load found faster (on a busy machine, of a large bundle and with other providers `off`).
        exact: never call the target with one row (with an odd number, where the bundle needs it), so that
            speculative greedy text is bit-identical to plain greedy text. Proved by a self-check at load.
        near_tie: for machines on which exact mode cannot be had: where a greedy row that shared a call has its best
            two logits closer than this, the row is computed again alone, as plain decoding would. Keeps speculative
            text from parting at near-ties; 0 does not.
        prefill_chunk: prompt tokens per call; even. Bounds memory, and the time until a cancel is noticed.
        initial_capacity: tokens that a cache holds at first; it doubles when full.
        verify_hashes: check the sha256 of every file of the bundle at load.
        map_weights: on the CPU, map weights from a file in the cache folder, which the first load of a bundle writes,
            instead of copying them into the process. Takes up to 2.3 times the bundle's size on the disk; the
            results are the same to the last bit. What cannot be written is not mapped.
        pinned_logits: on CUDA, page-lock the host's memory into which rows of logits are copied. Not measured yet, so
            off; `benchmarks/gpu_smoke.py` measures it. Other providers have nothing to pin.
        draft_provider: execution provider of the draft model; `None` is that of the target. With another one the draft
            has a cache of its own, where it would have worked on the target's.
    """

    provider: str = "cpu"
    threads: int | None = None
    spinning: Spinning = "auto"
    exact: bool = False
    near_tie: float = 0.0
    prefill_chunk: int = 256
    initial_capacity: int = 512
    verify_hashes: bool = True
    map_weights: bool = True
    pinned_logits: bool = False
    draft_provider: str | None = None

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
        for name in ("provider", "draft_provider"):
            value = getattr(self, name)
            is_name = isinstance(value, str) and bool(value)
            _require(is_name or (value is None and name != "provider"), name, value, "a name")
        _require(
            _is_number(self.near_tie) and self.near_tie >= 0, "near_tie", self.near_tie, "0 (off) or a positive number"
        )
        for name in ("exact", "verify_hashes", "map_weights", "pinned_logits"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")

    def for_draft(self) -> RuntimeParams:
        """The same for the draft model."""
        return replace(self, provider=self.draft_provider or self.provider)
