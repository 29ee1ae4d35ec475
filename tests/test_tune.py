"""Tuning: what is tried, what is chosen, when a draft pays, and that engines use what was found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import RuntimeParams, SpecParams, theory, tuning
from edgespec.bundle import read_bundle
from edgespec.costs import CostTable
from edgespec.params import DrafterName
from edgespec.profile import Advice, read_advice, read_profile, write_profile
from edgespec.speculation import advice_name, profile_name
from edgespec.tuning import Candidate, advise_at_first_load, gentlest, least_acceptance, thread_counts, tune


def quiet(text: str, fraction: float) -> None:
    assert 0 <= fraction < 1


def test_thread_counts() -> None:
    """All of few cores; of many powers of two and all together."""
    assert thread_counts(1) == [1]
    assert thread_counts(4) == [1, 2, 3, 4]
    assert thread_counts(8) == [1, 2, 4, 8]
    assert thread_counts(12) == [1, 2, 4, 8, 12]


def test_physical_cores() -> None:
    """At least one, at most the logical ones."""
    assert 1 <= tuning.physical_cores() <= (os.cpu_count() or 1)


def test_the_gentlest_of_equals() -> None:
    """Fewer threads and less spinning where the time is the same; the fastest where it is not."""
    times = {(1, "off"): 2.0, (1, "on"): 1.02, (2, "off"): 1.01, (2, "stop"): 1.0, (2, "on"): 1.3}
    candidates = [Candidate(n, spinning, [seconds] * 3) for (n, spinning), seconds in times.items()]  # type: ignore[arg-type]
    assert gentlest(candidates, lambda c: c.single_s) == Advice(1, "on")
    assert gentlest(candidates[2:], lambda c: c.single_s) == Advice(2, "off")
    candidates[3].single_s[:] = [0.5] * 3
    assert gentlest(candidates, lambda c: c.single_s) == Advice(2, "stop")


@pytest.mark.parametrize(
    ("spread", "share", "spinning"),
    [(0.01, -1, "on"), (0.3, -1, "off"), (0.3, 1, "on")],
    ids=["quiet", "busy", "common"],
)
def test_what_noise_can_explain_is_as_good(spread: float, share: int, spinning: str) -> None:
    """One that is a tenth slower is not taken where that is certain, and is where times vary by as much apart."""
    noise = np.array([-1, -0.5, 0, 0.5, 1]) * spread
    candidates = [Candidate(2, "off", list(1.1 + noise)), Candidate(2, "on", list(1 + share * noise))]
    assert gentlest(candidates, lambda c: c.single_s) == Advice(2, spinning)  # type: ignore[arg-type]


def test_break_even() -> None:
    """At that acceptance tokens per second are those of plain decoding; worked out by hand for one token."""
    costs = np.array([0.0, 10.0, 12.0, 14.0, 16.0])
    # One token: (1 + a) * 10 = 12 + d.
    assert least_acceptance(costs, 1, 0.0) == pytest.approx(0.2)
    assert least_acceptance(costs, 1, 5.0) == pytest.approx(0.7)
    # Two: (1 + a + a^2) * 10 = 14 + 2 d.
    assert least_acceptance(costs, 2, 2.0) == pytest.approx((-1 + (1 + 4 * 0.8) ** 0.5) / 2)
    alpha = least_acceptance(costs, 3, 4.0)
    assert alpha is not None
    assert theory.measured_speedup(alpha, 3, lambda rows: float(costs[rows]), 4.0) == pytest.approx(1)
    assert least_acceptance(costs, 1, 8.0) is None
    assert least_acceptance(np.array([0.0, 10.0, 9.0]), 1, 0.0) == pytest.approx(0.0, abs=1e-9)


def test_break_even_by_past() -> None:
    """Lookups by the target alone, the model by both together, at every past."""
    rows = tuple(range(1, 18))
    table = CostTable((16, 1024), rows, (tuple(10.0 + r for r in rows), tuple(10.0 + 2 * r for r in rows)))
    found = tuning.break_even(table, table, CostTable((16,), (1, 2), ((2.0, 3.0),)))
    assert [(e.past, e.draft_tokens) for e in found] == [(p, n) for p in (16, 1024) for n in range(1, 9)]
    assert found[0].lookup == pytest.approx(12 / 11 - 1)
    assert found[0].model == pytest.approx(14 / 11 - 1)
    assert found[8].lookup == pytest.approx(14 / 12 - 1)
    assert all(e.model is None for e in tuning.break_even(table, None, None))


def test_a_pair(tiny_pair: Path, empty_cache: Path) -> None:
    """Everything is measured once at least, and an engine that is loaded then runs as advised, with these costs."""
    bundle = read_bundle(tiny_pair)
    found = tune(bundle, 0.3, RuntimeParams(), quiet)
    assert len(found.candidates) == 3 * len(thread_counts(tuning.physical_cores()))
    assert all(c.single_s and c.pair_s for c in found.candidates)
    assert (found.target.rows, found.target.pasts[0]) == (tuple(range(1, 18)), 16)
    assert found.prefill_tokens_per_s > 0
    assert found.uncertainty >= 0
    assert found.pair is not None
    for spec, advice, has_draft in (("auto", found.pair, True), ("none", found.single, False)):
        with edgespec.load(tiny_pair, spec=SpecParams(drafter=spec)) as engine:
            assert (engine.runtime.threads, engine.runtime.spinning) == (advice.threads, advice.spinning)
            key = profile_name(bundle.manifest, engine.runtime, engine.providers[0], None, has_draft=has_draft)
        profile = read_profile(key)
        assert profile is not None
        assert profile.target.rows == tuple(range(1, 18))
        assert (profile.draft is not None) is has_draft


def test_another_provider_of_the_draft(tiny_pair: Path, empty_cache: Path) -> None:
    """What was found with it is for engines that have it, too, and for no others."""
    bundle, apart = read_bundle(tiny_pair), RuntimeParams(draft_provider="CPUExecutionProvider")
    found = tune(bundle, 0.3, apart, quiet)
    for runtime, is_stored in ((apart, True), (RuntimeParams(), False)):
        advice = read_advice(advice_name(bundle.manifest, runtime, "CPUExecutionProvider", has_draft=True))
        assert (advice is not None) is is_stored
    with edgespec.load(tiny_pair, spec=SpecParams(drafter="auto"), runtime=apart) as engine:
        assert found.pair == Advice(engine.runtime.threads or 0, engine.runtime.spinning)
        assert read_profile(profile_name(bundle.manifest, engine.runtime, engine.providers[0], None, has_draft=True))


def test_what_a_caller_says_goes_first(tiny_bundle: Path, empty_cache: Path) -> None:
    """Advice fills in only what was left open."""
    manifest = read_bundle(tiny_bundle).manifest
    write_profile(advice_name(manifest, RuntimeParams(), "CPUExecutionProvider", has_draft=False), Advice(1, "on"))
    for given, expected in (
        (RuntimeParams(), (1, "on")),
        (RuntimeParams(threads=2), (2, "on")),
        (RuntimeParams(spinning="off"), (1, "off")),
        (RuntimeParams(threads=2, spinning="stop"), (2, "stop")),
    ):
        with edgespec.load(tiny_bundle, runtime=given) as engine:
            assert (engine.runtime.threads, engine.runtime.spinning) == expected


@pytest.fixture
def first_load(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a round that the first load finds, by spinning; two cores, and an empty cache."""
    found: dict[str, float] = {}

    def take_turns(opened: list[tuple[Candidate, object, object]], budget_s: float) -> None:
        for candidate, _, draft in opened:
            candidate.single_s[:] = [found[candidate.spinning]] * 5
            candidate.pair_s[:] = [found[candidate.spinning]] * 5 if draft is not None else []

    monkeypatch.setattr(tuning, "_take_turns", take_turns)
    monkeypatch.setattr(tuning, "physical_cores", lambda: 2)
    monkeypatch.setattr(tuning, "advise_at_first_load", advise_at_first_load)
    return found


@pytest.mark.parametrize(("stop", "expected"), [(0.7, "stop"), (1.0, "off"), (1.3, "off")])
@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_the_first_load_chooses(
    tiny_pair: Path, first_load: dict[str, float], drafter: DrafterName, stop: float, expected: str
) -> None:
    """Spinning within calls where that is faster. It is measured once, and not where the caller has chosen."""
    first_load |= {"off": 1.0, "stop": stop}
    spec = SpecParams(drafter=drafter)
    with edgespec.load(tiny_pair, spec=spec) as engine:
        assert (engine.runtime.threads, engine.runtime.spinning) == (2, expected)
    first_load.clear()  # to measure again would be an error
    with edgespec.load(tiny_pair, spec=spec, runtime=RuntimeParams(threads=1)) as engine:
        assert (engine.runtime.threads, engine.runtime.spinning) == (1, expected)
    with edgespec.load(tiny_pair, spec=spec, runtime=RuntimeParams(spinning="on")) as engine:
        assert engine.runtime.spinning == "on"


@pytest.mark.parametrize("why", ["chosen", "one core", "large", "not kept"])
def test_what_the_first_load_does_not_measure(
    tiny_bundle: Path, first_load: dict[str, float], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Where the caller has chosen, nothing can spin, loading takes long, or the cache cannot be written."""
    runtime = RuntimeParams(spinning="on" if why == "chosen" else "auto")
    if why == "one core":
        monkeypatch.setattr(tuning, "physical_cores", lambda: 1)
    elif why == "large":
        monkeypatch.setattr(tuning, "_MOST_BYTES", 1)
    elif why == "not kept":
        monkeypatch.setattr(tuning, "write_profile", lambda *_: False)
    with edgespec.load(tiny_bundle, runtime=runtime) as engine:
        assert engine.runtime.spinning == ("on" if why == "chosen" else "off")


def test_the_first_load_measures(tiny_pair: Path, empty_cache: Path) -> None:
    """Really, and keeps what it found."""
    bundle = read_bundle(tiny_pair)
    advise_at_first_load(bundle, RuntimeParams(), has_draft=True)
    advice = read_advice(advice_name(bundle.manifest, RuntimeParams(), "CPUExecutionProvider", has_draft=True))
    assert (advice is None) is (tuning.physical_cores() == 1)
    assert advice is None or (advice.threads == tuning.physical_cores() and advice.spinning in ("off", "stop"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"threads": 0, "spinning": "on"}', '{"threads": 1, "spinning": "auto"}']
)
def test_damaged_advice_is_not_followed(empty_cache: Path, text: str) -> None:
    """As if there were none."""
    folder = empty_cache.parent.parent / "profiles"
    folder.mkdir(parents=True)
    (folder / "key.json").write_text(text, encoding="utf-8")
    assert read_advice("key") is None
