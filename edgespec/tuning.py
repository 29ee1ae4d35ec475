"""Finds out how a bundle runs best on this machine, and from what acceptance on drafting pays there.

Measures threads, spinning and what calls cost, and stores both where an engine looks for them. Prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec import theory
from edgespec.bundle import Bundle
from edgespec.costs import CostCurve, CostTable
from edgespec.invariance import probe_tokens
from edgespec.models import DraftSession, open_draft, open_target
from edgespec.ort import provider_name
from edgespec.params import RuntimeParams, Spinning
from edgespec.probe import is_steady, leveled, measure_costs, measure_pair, median_error
from edgespec.profile import MOST_TRIES, Advice, Profile, read_advice, write_profile
from edgespec.session import DecoderSession
from edgespec.speculation import MAX_ROWS, advice_name, profile_name

Tell = Callable[[str, float], None]

ALL_ROWS = tuple(range(1, MAX_ROWS + 1))
PASTS = (16, 256, 1024)
_GENTLE: tuple[Spinning, ...] = ("off", "stop")  # what does not take the cores from others between two calls
_SPINNINGS: tuple[Spinning, ...] = (*_GENTLE, "on")  # the gentlest first
_FIRST_S = 0.6  # for the first load
# A round of the sweep: so many single rows (of the draft model where there is one), then a call over one row more.
_DRAFTED = 4
_SWEEP_PAST = 256
# Shares of the budget: the sweep, then the curve of the target alone, the rest for those of the pair.
_SWEEP_SHARE, _TARGET_SHARE = 0.5, 0.175
_PREFILL_TOKENS = 256
# Sessions that are open at once for the sake of taking turns, in bytes of their files.
_MOST_BYTES = 2 << 30
# Ways that differ by less than this, or than the measurement can tell, are as good: the gentler one is taken.
_ALIKE = 1.03


@dataclass(slots=True)
class Candidate:
    """Threads and spinning, and seconds of rounds with one session and with two.

    Attributes:
        single_s: four steps and a five-row call of the target.
        pair_s: four steps of the draft model and a five-row call of the target; empty without a draft model. Both at
            the level of the quiet rounds, see `probe.leveled`.
    """

    threads: int
    spinning: Spinning
    single_s: list[float] = field(default_factory=list)
    pair_s: list[float] = field(default_factory=list)

    @property
    def advice(self) -> Advice:
        return Advice(self.threads, self.spinning)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Acceptance above which a draft of so many tokens is faster than plain decoding; `None` where none is enough.

    Attributes:
        past: cached tokens.
        draft_tokens: drafted a round.
        lookup: where drafting costs nothing.
        model: where the draft model makes the draft; `None` also without one.
    """

    past: int
    draft_tokens: int
    lookup: float | None
    model: float | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found out about a bundle.

    Attributes:
        candidates: all ways that were tried.
        single, pair: the best way for the target alone, and for both models.
        target, draft: costs of calls as `single` and, for the draft, as `pair` run.
        paired_target: costs of the target's calls as `pair` runs it.
        prefill_tokens_per_s: of the target.
        break_even: by cached tokens and draft length.
        is_stored: whether engines will find it: not where the cache folder cannot be written.
    """

    candidates: list[Candidate]
    single: Advice
    pair: Advice | None
    target: CostTable
    paired_target: CostTable | None
    draft: CostTable | None
    prefill_tokens_per_s: float
    break_even: list[BreakEven]
    is_stored: bool

    @property
    def uncertainty(self) -> float:
        """Share by which figures may be wrong, as for most of a kind: candidates, calls. Large on a busy machine."""
        lines = [line for c in self.candidates for line in (c.single_s, c.pair_s) if line]
        tables = [table for table in (self.target, self.paired_target, self.draft) if table is not None]
        return max(median(median_error(line) / median(line) for line in lines), *(t.uncertainty for t in tables))


def tune(bundle: Bundle, budget_s: float, runtime: RuntimeParams, tell: Tell) -> Tuning:
    """Measure a bundle, and store what was found for engines to come.

    Takes about `budget_s` seconds besides the loading of models, longer where one round of everything does.

    Args:
        bundle: checked.
        budget_s: seconds to spend on measuring.
        runtime: execution providers; threads and spinning are what is looked for.
        tell: called with what is being done and the share of it that is done.
    Raises:
        SessionError, ConfigError: a model cannot be run.
    """
    manifest = bundle.manifest
    candidates = [Candidate(n, spinning) for n in thread_counts(physical_cores()) for spinning in _SPINNINGS]
    _sweep(bundle, candidates, budget_s * _SWEEP_SHARE, runtime, tell, with_draft=manifest.draft is not None)
    single = gentlest(candidates, lambda c: c.single_s)
    pair = gentlest(candidates, lambda c: c.pair_s) if manifest.draft is not None else None
    tell("cost of calls", _SWEEP_SHARE)
    target_s = budget_s * (_TARGET_SHARE if pair is not None else 1 - _SWEEP_SHARE)
    with _sessions(bundle, single, runtime, with_draft=False) as (target, _):
        provider = target.provider
        table = measure_costs(target, target_s, ALL_ROWS, PASTS)
        prefill = _prefill_rate(target)
    is_stored = _store(bundle, single, runtime, provider, Profile(table, None, MOST_TRIES))
    paired, draft_table = None, None
    if pair is not None:
        tell("cost of calls of both models", _SWEEP_SHARE + _TARGET_SHARE)
        with _sessions(bundle, pair, runtime, with_draft=True) as (target, draft):
            assert draft is not None
            pair_s = budget_s * (1 - _SWEEP_SHARE - _TARGET_SHARE)
            paired, draft_table = measure_pair(target, draft, pair_s, ALL_ROWS, PASTS)
        is_stored &= _store(bundle, pair, runtime, provider, Profile(paired, draft_table, MOST_TRIES))
    even = break_even(table, paired, draft_table)
    return Tuning(candidates, single, pair, table, paired, draft_table, prefill, even, is_stored)


def advise_at_first_load(bundle: Bundle, runtime: RuntimeParams, *, has_draft: bool) -> None:
    """Find out whether threads that spin within a call are faster here, where nobody has run `tune`, and store it.

    Nothing is measured where the answer is known or makes no difference, where it could not be kept, or where two more
    loads of the models would take long.

    Args:
        bundle: checked.
        runtime: with spinning left open.
        has_draft: whether the draft model is going to be open beside the target.
    Raises:
        SessionError, ConfigError: a model cannot be run.
    """
    provider = provider_name(runtime.provider)
    name = advice_name(bundle.manifest, runtime, provider, has_draft=has_draft)
    if provider != provider_name("cpu") or read_advice(name) is not None:
        return
    cores, size = physical_cores(), sum(file.size for file in bundle.manifest.files.values())
    if cores == 1 or size > _MOST_BYTES // 2 or not write_profile(name, Advice(cores, "off")):
        return
    candidates = [Candidate(cores, spinning) for spinning in _GENTLE]
    _sweep(bundle, candidates, _FIRST_S, runtime, lambda *_: None, with_draft=has_draft)
    write_profile(name, gentlest(candidates, lambda c: c.pair_s if has_draft else c.single_s))


def thread_counts(cores: int) -> list[int]:
    """1 to the number of cores; of many only powers of two, and all of them together."""
    if cores <= 4:
        return list(range(1, cores + 1))
    return [n for n in (2**k for k in range(cores.bit_length())) if n < cores] + [cores]


def physical_cores() -> int:
    """Physical cores that this process may use; where the system does not tell, logical ones."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    if sys.platform == "darwin":
        found = subprocess.run(["sysctl", "-n", "hw.physicalcpu"], capture_output=True, text=True, check=False)
        return int(found.stdout) if found.stdout.strip().isdigit() else len(usable)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in usable)
    try:
        return len({path.read_text(encoding="ascii") for path in siblings}) or len(usable)
    except OSError:
        return len(usable)


def gentlest(candidates: Sequence[Candidate], times: Callable[[Candidate], Sequence[float]]) -> Advice:
    """The candidate with the fewest threads, and then the least spinning, of those that are as fast as the best.

    Candidates are compared round by round. What is slower by less than the median of that may be wrong is as fast: on a
    busy machine that is much.
    """

    def is_as_fast(candidate: Candidate) -> bool:
        slower = [mine - other for mine, other in zip(times(candidate), best, strict=True)]
        return median(slower) <= median(best) * (_ALIKE - 1) + median_error(slower)

    best = min(map(times, candidates), key=median)
    return min(filter(is_as_fast, candidates), key=lambda c: (c.threads, _SPINNINGS.index(c.spinning))).advice


def break_even(target: CostTable, paired: CostTable | None, draft: CostTable | None) -> list[BreakEven]:
    """Where drafts of one to eight tokens begin to pay, at every past that was measured.

    Args:
        target: costs of the target alone, for lookups.
        paired, draft: costs of both models where both are open.
    """
    alone = CostCurve(target, MAX_ROWS)
    pair = None if paired is None or draft is None else (CostCurve(paired, MAX_ROWS), CostCurve(draft, MAX_ROWS))
    found = []
    for past in target.pasts:
        lookup = alone.seconds(past)
        both = None if pair is None else (pair[0].seconds(past), float(pair[1].seconds(past)[1]))
        for gamma in range(1, 9):
            model = None if both is None else least_acceptance(both[0], gamma, both[1])
            found.append(BreakEven(past, gamma, least_acceptance(lookup, gamma, 0.0), model))
    return found


def least_acceptance(pass_seconds: NDArray[np.float64], gamma: int, draft_seconds: float) -> float | None:
    """The acceptance at which a draft of `gamma` tokens neither gains nor loses; `None` if it always loses.

    Args:
        pass_seconds: seconds of a target pass over 0, 1, 2, ... rows, shape (n,), n >= gamma + 2.
        gamma: drafted tokens.
        draft_seconds: of each.
    """

    def gain(alpha: float) -> float:
        return theory.measured_speedup(alpha, gamma, lambda rows: float(pass_seconds[rows]), draft_seconds) - 1

    if gain(1.0) <= 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def _sweep(
    bundle: Bundle,
    candidates: list[Candidate],
    budget_s: float,
    runtime: RuntimeParams,
    tell: Tell,
    *,
    with_draft: bool,
) -> None:
    """Fill in the seconds of all candidates. As many as memory allows take turns."""
    size = sum(file.size for file in bundle.manifest.files.values())
    together = max(1, _MOST_BYTES // max(size, 1))
    groups = [candidates[i : i + together] for i in range(0, len(candidates), together)]
    for i, group in enumerate(groups):
        tell("threads and spinning", _SWEEP_SHARE * i / len(groups))
        with contextlib.ExitStack() as stack:
            opened = [
                (c, *stack.enter_context(_sessions(bundle, c.advice, runtime, with_draft=with_draft))) for c in group
            ]
            _take_turns(opened, budget_s / len(groups))


def _take_turns(opened: Sequence[tuple[Candidate, DecoderSession, DraftSession | None]], budget_s: float) -> None:
    """Rounds of all candidates, forwards and backwards, until the budget is spent or the medians are certain.

    Their times are then brought to one level: they were taken in turns.
    """
    started = perf_counter()
    while True:
        for candidate, target, draft in opened:
            # The first of two: threads of the one before may still spin.
            candidate.single_s.append([_round(target, target) for _ in range(2)][1])
            if draft is not None:
                candidate.pair_s.append([_round(target, draft) for _ in range(2)][1])
        opened = opened[::-1]
        lines = [line for c, _, _ in opened for line in (c.single_s, c.pair_s) if line]
        rounds = len(lines[0])
        is_late = (perf_counter() - started) * (rounds + 1) / rounds > budget_s
        if rounds > 1 and (is_late or all(map(is_steady, lines))):
            break
    for line, times in zip(lines, leveled(np.array(lines).T).T.tolist(), strict=True):
        line[:] = times


def _round(target: DecoderSession, drafter: DraftSession) -> float:
    """Seconds of single rows of one session and a call of the target that checks them."""
    past = min(_SWEEP_PAST, target.context_length // 2)
    tokens = probe_tokens(target.vocab_size, _DRAFTED + 1)
    drafter.pretend(past)
    started = perf_counter()
    for i in range(_DRAFTED):
        drafter.forward(tokens[i : i + 1], 1)
    seconds = perf_counter() - started
    target.pretend(past)
    started = perf_counter()
    target.forward(tokens, len(tokens))
    seconds += perf_counter() - started
    target.rewind(0)
    drafter.rewind(0)
    return seconds


@contextlib.contextmanager
def _sessions(
    bundle: Bundle, advice: Advice, runtime: RuntimeParams, *, with_draft: bool
) -> Iterator[tuple[DecoderSession, DraftSession | None]]:
    """The bundle's models as an engine opens them."""
    runtime, manifest = _advised(runtime, advice), bundle.manifest
    with contextlib.ExitStack() as stack:
        target = open_target(bundle, runtime)
        stack.callback(target.close)
        draft = None
        if with_draft and manifest.draft is not None:
            draft = open_draft(bundle, runtime, target)
            stack.callback(draft.close)
        yield target, draft


def _prefill_rate(session: DecoderSession) -> float:
    """Tokens per second of reading a prompt, the median of three after one."""
    count = min(_PREFILL_TOKENS, session.context_length // 2)
    tokens = probe_tokens(session.vocab_size, count)
    times = []
    for _ in range(4):
        started = perf_counter()
        session.forward(tokens, 1)
        times.append(perf_counter() - started)
        session.rewind(0)
    return count / median(times[1:])


def _advised(runtime: RuntimeParams, advice: Advice) -> RuntimeParams:
    return replace(runtime, threads=advice.threads, spinning=advice.spinning)


def _store(bundle: Bundle, advice: Advice, runtime: RuntimeParams, provider: str, profile: Profile) -> bool:
    """Where `speculation` finds them when an engine with as many models is loaded. False if that cannot be written."""
    manifest, has_draft = bundle.manifest, profile.draft is not None
    key = profile_name(manifest, _advised(runtime, advice), provider, None, has_draft=has_draft)
    name = advice_name(manifest, runtime, provider, has_draft=has_draft)
    return write_profile(name, advice) and write_profile(key, profile)
