"""`Bench`: runs the settings against each other, prompt by prompt, and hands out every trial as it is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from edgespec.bench.peers import Peer, PeerError
from edgespec.bench.prompts import BenchPrompt
from edgespec.bench.recorder import Recorder
from edgespec.bench.settings import PLAIN, Opponent, Setting, choose_settings
from edgespec.bench.trial import Place, Trial, digest, first_difference, run_trial
from edgespec.bundle import Bundle
from edgespec.contracts import Tokens
from edgespec.engine import Engine
from edgespec.errors import ConfigError, ContextOverflowError
from edgespec.params import RequestParams, RuntimeParams, SamplingParams, SpecParams
from edgespec.policy import FixedPolicy
from edgespec.profile import read_profile
from edgespec.speculation import profile_name

# Read and answered by every engine before it is measured; no prompt of a set.
_WARM_UP = "Warming up: 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8."
_WARM_UP_TOKENS = 16
_SETTLE_S = 0.1  # after the answer of a peer, whose threads may go on spinning

Tell = Callable[[str, float], None]
Answers = dict[str, tuple[Trial, list[int]]]
Job = Callable[[Place], tuple[Trial, list[int]] | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        against: opponents of the default drafter; plain decoding always is one.
        repetitions: passes over all prompts.
        params: how the answers are chosen; the seed grows by one with each repetition.
        runtime: of all sessions.
        spec: what all settings have in common.
        search: run every fixed drafter and length, too.
    """

    against: tuple[Opponent, ...] = ("none",)
    repetitions: int = 3
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=128, seed=1))
    runtime: RuntimeParams = field(default_factory=RuntimeParams)
    spec: SpecParams = field(default_factory=SpecParams)
    search: bool = False

    @property
    def is_comparable(self) -> bool:
        """Whether plain and speculative text must be the same."""
        return self.params.is_greedy or self.spec.verifier == "coupled"


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where a greedy text parted from the plain one.

    Attributes:
        setting, family, prompt_id: of the text.
        index: of the first token that differs.
        margin: between the log-probabilities of the plain path's two best tokens there.
        is_between_best: whether the two texts chose just these two.
    """

    setting: str
    family: str
    prompt_id: str
    index: int
    margin: float
    is_between_best: bool


class Bench:
    """A comparison on one bundle. A context manager, whose models are loaded within.

    Args:
        bundle: to be measured.
        prompts: in the order in which they are asked.
        plan: what is run.
        peers: other engines, running.

    Attributes:
        settings: what is compared, plain decoding first.
        skipped: prompts that leave no room for an answer of full length.
        near_ties: of the trials so far.
        failures: a line for each setting of a peer that was given up, as the peer failed in it.
        runtimes: setting -> threads and spinning that it runs with.
        costs: what calls cost, as the controller was told at first.
        longest: the longest prompt.

    Raises:
        ConfigError: the plan does not go with the bundle; when entered: no prompt fits its context.
    """

    def __init__(self, bundle: Bundle, prompts: Sequence[BenchPrompt], plan: Plan, peers: Sequence[Peer] = ()) -> None:
        self._bundle, self._plan, self._peers = bundle, plan, peers
        self._has_model = bundle.manifest.draft is not None
        self.settings = choose_settings(plan.against, plan.spec, has_model=self._has_model, search=plan.search)
        self._prompts = list(prompts)
        self.skipped: list[BenchPrompt] = []
        self.near_ties: dict[tuple[str, str, str, int], NearTie] = {}
        self.failures: dict[str, str] = {}
        self.runtimes: dict[str, RuntimeParams] = {}
        self.costs: dict[str, Any] | None = None
        self.longest: Tokens = np.empty(0, np.int64)

    @property
    def peer_settings(self) -> list[str]:
        """Names of the peers' settings."""
        return [f"{peer.name} {mode}" for peer in self._peers for mode in peer.modes]

    @property
    def described(self) -> dict[str, dict[str, Any]]:
        """Setting -> what it runs with, once the models are loaded."""
        return {
            s.name: {
                "drafter": s.spec.drafter,
                "num_draft_tokens": s.spec.num_draft_tokens,
                "threads": self.runtimes[s.name].threads,
                "spinning": self.runtimes[s.name].spinning,
            }
            for s in self.settings
        }

    def __enter__(self) -> Bench:
        """Load the models and encode the prompts."""
        with contextlib.ExitStack() as stack:
            self._parents = self._load(stack)
            self._encoded = self._encode(self._parents[False])
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def trials(self, tell: Tell) -> Iterator[Trial]:
        """Every trial, group by group. `tell` is called with what is being done and the share of it that is done."""
        count = len(self._encoded)
        for repetition in range(self._plan.repetitions):
            with contextlib.ExitStack() as forks:
                engines = self._fork(self._parents, forks)
                for i, (prompt, tokens) in enumerate(self._encoded):
                    done = (repetition * count + i) / (self._plan.repetitions * count)
                    tell(f"pass {repetition + 1} of {self._plan.repetitions}: {prompt.family}", done)
                    place = Place(prompt.family, prompt.id, repetition, 0)
                    yield from self._group(engines, place, tokens, first=i + repetition)

    def _load(self, stack: contextlib.ExitStack) -> dict[bool, Engine]:
        """Engines whose weights the others share: without the pair's draft model, and with it."""
        spec, runtime = self._plan.spec, self._plan.runtime
        parents = {False: stack.enter_context(Engine(self._bundle, replace(spec, drafter="none"), runtime, {}))}
        if any(setting.in_pair for setting in self.settings):
            parents[True] = stack.enter_context(Engine(self._bundle, replace(spec, drafter="auto"), runtime, {}))
        self.runtimes = {s.name: parents[s.in_pair].runtime for s in self.settings}
        return parents

    def _encode(self, engine: Engine) -> list[tuple[BenchPrompt, Tokens]]:
        room = engine.context_length - self._plan.params.max_new_tokens
        fitting = []
        self.skipped = []
        for prompt in self._prompts:
            tokens = try_encode(engine, prompt.text)
            if tokens is None or len(tokens) > room:
                self.skipped.append(prompt)
            else:
                fitting.append((prompt, tokens))
        if not fitting:
            raise ConfigError(
                f"no prompt fits the context of {engine.context_length} tokens together with an answer of "
                f"{self._plan.params.max_new_tokens}: give shorter prompts, or lower --max-new-tokens"
            )
        self.longest = max((tokens for _, tokens in fitting), key=len)
        return fitting

    def _fork(self, parents: dict[bool, Engine], forks: contextlib.ExitStack) -> dict[str, Engine]:
        """Engines that have learnt nothing yet, warmed up. Fixed lengths of a drafter share one: they never learn."""
        engines: dict[str, Engine] = {}
        shared: dict[str, Engine] = {}
        for setting in self.settings:
            spec = setting.spec
            if setting.is_fixed and spec.drafter in shared:
                engines[setting.name] = shared[spec.drafter]
                continue
            engine = forks.enter_context(parents[setting.in_pair].fork(spec))
            engine.generate(encode(engine, _WARM_UP), SamplingParams(max_new_tokens=_WARM_UP_TOKENS)).text()
            engine.policy = Recorder(engine.policy)
            engines[setting.name] = engine
            self.costs = stored_costs(engine) or self.costs
            if setting.is_fixed:
                shared[spec.drafter] = engine
        return engines

    def _group(self, engines: dict[str, Engine], place: Place, prompt: Tokens, first: int) -> list[Trial]:
        """All settings on one prompt, beginning with another one each time."""
        params = self._plan.params
        params = replace(params, seed=(params.seed or 0) + place.repetition)
        jobs: list[Job] = [partial(self._run_own, engines[s.name], s, prompt, params) for s in self.settings]
        jobs += [partial(self._run_peer, peer, mode, prompt, params) for peer in self._peers for mode in peer.modes]
        first %= len(jobs)
        answers: Answers = {}
        for turn, job in enumerate(jobs[first:] + jobs[:first]):
            answer = job(replace(place, turn=turn))
            if answer is not None:
                answers[answer[0].setting] = answer
        if self._plan.is_comparable:
            answers = {name: self._compare(trial, ids, answers) for name, (trial, ids) in answers.items()}
        if params.is_greedy:
            self._find_ties(engines[PLAIN], prompt, answers)
        names = [*(s.name for s in self.settings), *self.peer_settings]
        return [answers[name][0] for name in names if name in answers]

    def _run_own(
        self, engine: Engine, setting: Setting, prompt: Tokens, params: SamplingParams, place: Place
    ) -> tuple[Trial, list[int]]:
        if setting.is_fixed:
            engine.policy = Recorder(FixedPolicy(setting.spec.num_draft_tokens or 0))
        return run_trial(engine, setting.name, prompt, params, place)

    def _run_peer(
        self, peer: Peer, mode: str, prompt: Tokens, params: SamplingParams, place: Place
    ) -> tuple[Trial, list[int]] | None:
        """Nothing from where the peer has failed once: a failure must not end a run of an hour."""
        name = f"{peer.name} {mode}"
        if name in self.failures:
            return None
        try:
            answer = run_peer(peer, mode, prompt, params, place)
            time.sleep(_SETTLE_S)
            return answer
        except PeerError as error:
            self.failures[name] = f"{name}: {str(error).removeprefix(f'{peer.name}: ')}"
            return None

    def _compare(self, trial: Trial, token_ids: list[int], answers: Answers) -> tuple[Trial, list[int]]:
        """Compare with plain decoding by the same engine: ours, or the peer's own."""
        plain = next((f"{p.name} {p.modes[0]}" for p in self._peers if trial.setting.startswith(p.name)), PLAIN)
        if plain not in answers:
            return trial, token_ids
        at = first_difference(token_ids, answers[plain][1])
        return replace(trial, equal=at is None, first_difference=at), token_ids

    def _find_ties(self, plain: Engine, prompt: Tokens, answers: Answers) -> None:
        expected = answers[PLAIN][1]
        own = {setting.name for setting in self.settings}
        for trial, token_ids in answers.values():
            at = trial.first_difference
            if at is None or trial.setting not in own or at >= min(len(expected), len(token_ids)):
                continue
            key = (trial.setting, trial.family, trial.prompt_id, at)
            if key not in self.near_ties:
                margin, best = best_two(plain, [*prompt, *expected[:at]], self._plan.params)
                self.near_ties[key] = NearTie(*key, margin, best == {expected[at], token_ids[at]})


def encode(engine: Engine, text: str) -> Tokens:
    """The prompt of a user's message; of the text itself where the bundle has no chat template."""
    params, request = SamplingParams(), RequestParams()
    if engine.bundle.manifest.chat_template is None:
        return engine.prompts.from_text(text, params, request).tokens
    return engine.prompts.from_messages([{"role": "user", "content": text}], params, request).tokens


def try_encode(engine: Engine, text: str) -> Tokens | None:
    """The same, or `None` where it alone does not fit the context."""
    try:
        return encode(engine, text)
    except ContextOverflowError:
        return None


def stored_costs(engine: Engine) -> dict[str, Any] | None:
    """The cost tables that the engine's controller was given, or `None` where it has none."""
    has_draft, manifest = "model" in engine.drafters, engine.bundle.manifest
    key = profile_name(manifest, engine.runtime, engine.providers[0], engine.row_rule, has_draft=has_draft)
    profile = read_profile(key)
    return None if profile is None else asdict(profile)


def best_two(engine: Engine, text: Sequence[int], params: SamplingParams) -> tuple[float, set[int]]:
    """The two tokens that the model finds most probable after a text.

    Args:
        text: the prompt and the plain answer in front of the place. It is read, not decoded anew: a second answer
            may part from the first before it gets there.
    Returns:
        By how much the first is ahead in log-probability (so also in logits), and both.
    """
    stream = engine.generate(text, replace(params, max_new_tokens=1, logprobs=2))
    stream.text()
    (first, p), (second, q) = stream.logprobs[0].top
    return p - q, {first, second}


def run_peer(peer: Peer, mode: str, prompt: Tokens, params: SamplingParams, place: Place) -> tuple[Trial, list[int]]:
    """One answer of another engine as a trial."""
    answer = peer.answer(mode, prompt, params)
    trial = Trial(
        f"{peer.name} {mode}",
        place.family,
        place.prompt_id,
        place.repetition,
        place.turn,
        len(prompt),
        0,
        len(answer.token_ids),
        answer.seconds,
        answer.first_token_s,
        answer.target_passes,
        answer.drafted,
        answer.accepted,
        text_digest=digest(answer.token_ids),
    )
    return trial, answer.token_ids
