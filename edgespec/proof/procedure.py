"""The whole losslessness test in a time budget. Knows neither the terminal nor where the models come from."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgespec.contracts import Drafter, Rows, Scorer, Tokens
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter, StagedDrafter
from edgespec.noise import Noise
from edgespec.params import Grammar, RuntimeParams, SamplingParams, Verifier
from edgespec.policy import FixedPolicy
from edgespec.proof.differences import Difference, Width, answer, compare, measure_widths, merge
from edgespec.proof.fit import Fit
from edgespec.proof.identity import check_identity, proposal
from edgespec.proof.laws import KINDS, Kind, PlainRows, Reference, Sample, draw_samples, fit_samples
from edgespec.proof.replay import RecurrentReplay, ReplayScorer
from edgespec.proof.report import FitCheck, IdentityCheck, Report, TextCheck, correct_fits
from edgespec.proof.subject import Stages, Subject
from edgespec.recurrent import RecurrentSession
from edgespec.shaper import Constraint, Shaper

WIDTHS = tuple(range(2, 10))
_TEXT_TOKENS = 48
# Of the budget: widths, identity, texts, samples.
_SHARES = (0.06, 0.06, 0.18, 0.7)
# Of the time for samples after one prompt; the rest goes into reference rows.
_SAMPLING_SHARE = 0.65
_SECONDS_PER_PROMPT = 1.7
# A sample with a draft model takes longer.
_WEIGHTS = {"ngram": 1, "model": 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """How tokens are chosen, with a name for the table."""

    name: str
    params: SamplingParams


GREEDY = Setting("greedy", SamplingParams())
SAMPLED = (
    Setting("T 1", SamplingParams(temperature=1)),
    Setting("T 0.7, top-p 0.9", SamplingParams(temperature=0.7, top_p=0.9)),
    Setting(
        "T 1, top-k 40, min-p 0.05, repetition 1.1",
        SamplingParams(temperature=1, top_k=40, min_p=0.05, repetition_penalty=1.1),
    ),
)
# Values of several kinds, so that the first token is not certain.
STRUCTURED = Setting(
    "T 1, JSON schema",
    SamplingParams(
        temperature=1,
        grammar=Grammar.json_schema({"type": ["string", "integer", "boolean", "array"], "items": {"type": "integer"}}),
    ),
)


class Proof:
    """One run of the test.

    Args:
        subject: what is tested.
        settings: greedy and sampled ones.
        drafters: `model`, `ngram` or both.
        num_draft_tokens: drafted a round.
        verifier: the rule that is tested.
        budget: seconds.
        seed: of the samples.
        progress: told what is done next and which fraction of the budget is used.
        max_samples: after one prompt, for tests that must not depend on the clock.
    """

    def __init__(
        self,
        subject: Subject,
        settings: Sequence[Setting] = (GREEDY, *SAMPLED),
        *,
        drafters: Sequence[str],
        num_draft_tokens: int = 2,
        verifier: Verifier = "standard",
        budget: float = 60.0,
        seed: int = 0,
        progress: Callable[[str, float], None] = lambda text, fraction: None,
        max_samples: int = 100_000,
    ) -> None:
        self.subject = subject
        self.greedy = [s for s in settings if s.params.is_greedy]
        self.sampled = [replace(s, params=_endless(s.params)) for s in settings if s not in self.greedy]
        self.drafters = drafters
        self.depth = num_draft_tokens
        self.verifier: Verifier = verifier
        self.budget, self.seed, self.max_samples = budget, seed, max_samples
        self._progress = progress
        self._started = perf_counter()

    def run(self) -> Report:
        """Do everything that the budget allows, each part at least once."""
        self._started = perf_counter()
        ends = [self._started + self.budget * share for share in itertools.accumulate(_SHARES)]
        widths = self._widths(ends[0])
        identities = self._identities(ends[1])
        texts = self._texts(ends[2], 2 * max((w.max_change for w in widths), default=0.0))
        replays = self._replays()
        fits = self._fits(ends[3], *replays)
        return Report(
            bundle=self.subject.name,
            verifier=self.verifier,
            num_draft_tokens=self.depth,
            seed=self.seed,
            row_rule=self.subject.row_rule,
            seconds=perf_counter() - self._started,
            identities=tuple(identities),
            fits=tuple(fits),
            texts=tuple(texts),
            widths=tuple(widths),
            rows_rechecked=replays[0].num_rechecked,
            rows_changed=replays[0].num_changed,
        )

    # (d) rows alone and in company

    def _widths(self, end: float) -> list[Width]:
        subject = self.subject
        parts: list[list[Width]] = []
        for prompt in self._while_before(end, "rows alone and in company", subject.prompts):
            plain = self._loop(subject.target, None)
            text = np.concatenate([prompt, answer(plain, prompt, SamplingParams(max_new_tokens=12, ignore_eos=True))])
            with self._without_rule():
                parts.append(measure_widths(subject.target, text, WIDTHS))
        return [merge(same) for same in zip(*parts, strict=True)]

    # (a) identity

    def _identities(self, end: float) -> list[IdentityCheck]:
        checks = []
        for setting, name, deadline in self._cases(end):
            drafter = self._drafter(name, self.subject.stages, is_coupled=False)
            prompts = self._while_before(deadline, f"identity: {setting.name}, {name}", self.subject.prompts)
            contexts = ((self._shaper(setting.params, prompt), prompt) for prompt in prompts)
            result = check_identity(self.subject.target, drafter, contexts, self.depth, self.seed)
            if result is not None:
                checks.append(IdentityCheck(setting.name, name, result))
        return checks

    # (c) texts

    def _texts(self, end: float, tolerance: float) -> list[TextCheck]:
        has_rule = self.subject.row_rule != "none"
        settings = self.greedy + (self.sampled if self.verifier == "coupled" else [])
        jobs = [(setting, True) for setting in settings] + [(setting, False) for setting in self.greedy if has_rule]
        checks: list[TextCheck] = []
        for number, (setting, in_force) in enumerate(jobs):
            deadline = _share(end, len(jobs) - number)
            exact = in_force and has_rule
            with contextlib.nullcontext() if exact else self._without_rule():
                checks += self._compare(setting, deadline, is_exact=exact, tolerance=0.0 if exact else tolerance)
        return checks

    def _compare(self, setting: Setting, deadline: float, *, is_exact: bool, tolerance: float) -> list[TextCheck]:
        """Plain answers against those with each drafter, prompt after prompt."""
        target = self.subject.target
        loops = {name: self._loop(target, self._drafter(name, self.subject.stages)) for name in self.drafters}
        found: dict[str, list[Difference]] = {name: [] for name in loops}
        texts = tokens = 0
        rule = "exact mode" if is_exact else "without exact mode"
        for number, prompt in enumerate(
            self._while_before(deadline, f"texts: {setting.name}, {rule}", self.subject.prompts)
        ):
            params = replace(_endless(setting.params), seed=self.seed, max_new_tokens=_TEXT_TOKENS)
            constraint = self._constraint(params)
            plain = answer(self._loop(target, None), prompt, params, constraint)
            texts, tokens = texts + 1, tokens + len(plain)
            for name, loop in loops.items():
                difference = compare(plain, loop, prompt, params, constraint, number)
                found[name] += [difference] if difference else []
        return [TextCheck(setting.name, name, is_exact, texts, tokens, tuple(found[name]), tolerance) for name in loops]

    # (b) end to end

    def _fits(self, end: float, target: ReplayScorer, stages: Stages) -> list[FitCheck]:
        """Prompt after prompt, so that rows which were scored for one setting serve the next."""
        cases = list(itertools.product(self.sampled, self.drafters))
        found = {(setting.name, name, kind): Fit() for setting, name in cases for kind in KINDS}
        for number, (prompt, until) in enumerate(self._prompts_in_time(end, len(cases))):
            rows = PlainRows(self.subject.target, prompt)
            for setting, name, deadline in self._cases(until):
                self._tell(f"samples: {setting.name}, {name}")
                samples = self._samples(setting.params, name, prompt, number, deadline, target, stages)
                for kind, fit in self._fit(samples, rows, setting.params, name, stages, deadline).items():
                    found[setting.name, name, kind] += fit
        return correct_fits(found)

    def _prompts_in_time(self, end: float, num_cases: int) -> Iterator[tuple[Tokens, float]]:
        """As many prompts as there is time for, and when each should be done."""
        seconds = (end - perf_counter()) / max(num_cases, 1)
        wanted = min(max(round(seconds / _SECONDS_PER_PROMPT), 1), len(self.subject.prompts))
        for number, prompt in enumerate(self.subject.prompts[:wanted]):
            yield prompt, _share(end, wanted - number)

    def _samples(
        self,
        params: SamplingParams,
        name: str,
        prompt: Tokens,
        number: int,
        end: float,
        target: ReplayScorer,
        stages: Stages,
    ) -> list[Sample]:
        loop = self._loop(target, self._drafter(name, stages))
        stop = perf_counter() + (end - perf_counter()) * _SAMPLING_SHARE
        seeds = itertools.count(self.seed * 10**12 % 2**62 + number * 10**9)
        samples: list[Sample] = []
        for sample in draw_samples(loop, prompt, params, seeds, self._constraint(params)):
            samples.append(sample)
            if len(samples) >= self.max_samples or perf_counter() > stop:
                break
        return samples

    def _fit(
        self,
        samples: Sequence[Sample],
        rows: PlainRows,
        params: SamplingParams,
        name: str,
        stages: Stages,
        end: float,
    ) -> dict[Kind, Fit]:
        shaper = self._shaper(params, rows.context)
        q = self._first_q(self._drafter(name, stages, is_coupled=False), rows.context, shaper)
        reference = Reference(rows, shaper)
        return fit_samples(
            samples, reference, q, verifier=self.verifier, seed=self.seed, is_late=lambda: perf_counter() > end
        )

    def _first_q(self, drafter: Drafter, prompt: Tokens, shaper: Shaper) -> Rows | None:
        draft = drafter.propose(prompt, self.depth, shaper, Noise(self.seed))
        return proposal(draft, 0, self.subject.target.vocab_size) if len(draft) else None

    # what the parts share

    def _cases(self, end: float) -> Iterator[tuple[Setting, str, float]]:
        """Sampled settings with each drafter, and when each should be done."""
        cases = list(itertools.product(self.sampled, self.drafters))
        while cases:
            (setting, name), weights = cases[0], [_WEIGHTS[name] for _, name in cases]
            yield setting, name, _share(end, sum(weights) / weights[0])
            cases.pop(0)

    def _while_before(self, end: float, text: str, prompts: Sequence[Tokens]) -> Iterator[Tokens]:
        """The first prompt, and further ones as long as there is time."""
        for number, prompt in enumerate(prompts):
            if number and perf_counter() > end:
                return
            self._tell(text)
            yield prompt

    def _tell(self, text: str) -> None:
        self._progress(text, min((perf_counter() - self._started) / self.budget, 1.0))

    @contextlib.contextmanager
    def _without_rule(self) -> Iterator[None]:
        self.subject.set_row_rule(None)
        try:
            yield
        finally:
            self.subject.set_row_rule(self.subject.row_rule)

    def _replays(self) -> tuple[ReplayScorer, Stages]:
        return ReplayScorer(self.subject.target), Stages(*map(_replay, self.subject.stages))

    def _loop(self, target: Scorer, drafter: Drafter | None) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target,
            drafter,
            num_draft_tokens=self.depth,
            eos_token_ids=self.subject.eos_token_ids,
            prefill_chunk=RuntimeParams().prefill_chunk,
            verifier=self.verifier,
        )

    def _drafter(self, name: str, stages: Stages, *, is_coupled: bool | None = None) -> Drafter:
        if name == "ngram":
            return NgramDrafter(self.subject.max_ngram)
        draft, inner = stages
        assert draft is not None, name
        is_coupled = self.verifier == "coupled" if is_coupled is None else is_coupled
        width = self.subject.target.vocab_size
        if draft.head is not None or isinstance(draft, RecurrentSession | RecurrentReplay):
            return ModelDrafter(draft, width, is_coupled=is_coupled)
        drafters: dict[str, Drafter] = {"ngram": NgramDrafter(self.subject.max_ngram)}  # as in an engine
        if inner is not None:
            drafters["model"] = ModelDrafter(inner, min(width, draft.vocab_size), is_coupled=is_coupled)
        return StagedDrafter(draft, width, drafters, FixedPolicy(self.depth), is_coupled=is_coupled)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.grammar is None:
            return None
        assert self.subject.make_constraint is not None, params
        return self.subject.make_constraint(params.grammar)

    def _shaper(self, params: SamplingParams, prompt: Tokens) -> Shaper:
        subject = self.subject
        return Shaper(params, prompt, subject.eos_token_ids, subject.target.vocab_size, self._constraint(params))


def _replay(scorer: Scorer | None) -> ReplayScorer | None:
    if scorer is None:
        return None
    return RecurrentReplay(scorer) if isinstance(scorer, RecurrentSession) else ReplayScorer(scorer)


def _endless(params: SamplingParams) -> SamplingParams:
    """Without an early end, except where a grammar asks for one."""
    return replace(params, ignore_eos=params.grammar is None)


def _share(end: float, parts: float) -> float:
    """When the first of so many equal parts of the time until `end` is over."""
    now = perf_counter()
    return now + max(end - now, 0.0) / parts
