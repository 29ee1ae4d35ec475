"""Measuring costs and keeping them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import probe
from edgespec.costs import CostTable
from edgespec.params import RuntimeParams, SpecParams
from edgespec.probe import leveled, measure_costs, measure_pair
from edgespec.profile import Profile, profile_key, read_profile, write_profile
from edgespec.session import DecoderSession
from tests.tiny import save_graph, tiny_model

TABLE = CostTable((16, 1024), (1, 5), ((0.1, 0.2), (0.3, 0.4)))


class Clock:
    """A session whose calls take `1 + 0.1 * rows + past / 1000` seconds of a clock of its own, sometimes ten more."""

    context_length, vocab_size = 5000, 100

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.length, self.calls = 0.0, 0, 0
        monkeypatch.setattr(probe, "perf_counter", lambda: self.now)

    def pretend(self, length: int) -> None:
        self.length = length

    def rewind(self, length: int) -> None:
        self.length = length

    def forward(self, tokens: np.ndarray, rows: int) -> None:
        self.calls += 1
        self.now += 1 + 0.1 * rows + self.length / 1000 + (10 if self.calls % 11 == 0 else 0)
        self.length += len(tokens)


def test_costs_are_medians_of_what_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every width at every past, undisturbed by interruptions, within the budget."""
    session = Clock(monkeypatch)
    table = measure_costs(session, budget_s=300)  # type: ignore[arg-type]
    assert table.rows == probe.ROWS
    assert table.pasts == (16, 1024)
    for past, line in zip(table.pasts, table.seconds, strict=True):
        assert line == pytest.approx([1 + 0.1 * rows + past / 1000 for rows in table.rows])
    assert session.now <= 300
    assert session.length == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_real_session_is_measured_and_left_empty(tmp_path: Path, shared: bool) -> None:
    """Both cache kinds; a short context is not overrun."""
    graph = save_graph(tiny_model(), tmp_path / "m.onnx", shared=shared)
    session = DecoderSession(graph, context_length=40, runtime=RuntimeParams(initial_capacity=8))
    table = measure_costs(session, 0.05)
    assert max(table.pasts) + max(table.rows) <= 40
    assert all(s > 0 for line in table.seconds for s in line)
    assert len(session.tokens) == 0


@pytest.mark.parametrize("length", [1, 10, 17])
def test_a_context_with_little_room_is_measured_as_far_as_it_goes(tmp_path: Path, length: int) -> None:
    """Calls of more rows than it has tokens are left out."""
    graph = save_graph(tiny_model(), tmp_path / "m.onnx", shared=True)
    session = DecoderSession(graph, context_length=length, runtime=RuntimeParams(initial_capacity=8))
    table = measure_costs(session, 0.01)
    assert table.rows == tuple(rows for rows in probe.ROWS if rows <= length)
    assert max(table.pasts) == length - max(table.rows)


class BusyClock(Clock):
    """Slows down by 1.8 for whole stretches of time, and interrupts every seventh call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__(monkeypatch)
        self.rng = np.random.default_rng(seed)
        self.slow = self.rng.random(1000) < 0.5

    def forward(self, tokens: np.ndarray, rows: int) -> None:
        quiet = 1 + 0.1 * rows + self.length / 1000
        self.now += quiet * (1.8 if self.slow[int(self.now / 60)] else 1) * (1 + 0.05 * self.rng.random())
        self.now += self.rng.exponential(2) * (self.rng.random() < 1 / 7)


@pytest.mark.parametrize("budget_s", [120, 500])
def test_load_that_comes_and_goes_does_not_bend_the_curve(monkeypatch: pytest.MonkeyPatch, budget_s: float) -> None:
    """Ratios to a call of one row are right to 5 % for nine calls of ten, though the load of the machine is not."""
    errors = []
    for seed in range(30):
        table = measure_costs(BusyClock(monkeypatch, seed), budget_s)  # type: ignore[arg-type]
        for past, line in zip(table.pasts, table.seconds, strict=True):
            quiet = [1 + 0.1 * rows + past / 1000 for rows in table.rows]
            errors += [abs(a / line[0] / (b / quiet[0]) - 1) for a, b in zip(line[1:], quiet[1:], strict=True)]
        assert table.uncertainty > 0.005
    assert np.quantile(errors, 0.9) < 0.05


def test_a_pair_is_measured_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the load from some time on: what the draft costs in calls of the target stays."""
    clock = BusyClock(monkeypatch, 1)
    clock.slow[:] = np.arange(1000) >= 4
    for _ in range(5):  # begins later and later
        target, draft = measure_pair(clock, clock, 300)  # type: ignore[arg-type]
        assert draft.seconds[0][0] == pytest.approx(target.seconds[0][0], rel=0.06)
        assert draft.pasts[0] == target.pasts[0]


def test_levels_are_what_rounds_have_in_common() -> None:
    """By hand: the second round is twice as slow in all, and one call of the third was interrupted."""
    times = leveled(np.array([[1.0, 2, 4], [2, 4, 8], [1, 20, 4], [1, 2, 4]]))
    assert times.tolist() == [[1, 2, 4], [1, 2, 4], [1, 20, 4], [1, 2, 4]]


def test_a_profile_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its key, with and without a draft; another key has none."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    for profile in (Profile(TABLE, None), Profile(TABLE, replace(TABLE, uncertainty=0.25), 2)):
        assert write_profile("a", profile)
        assert read_profile("a") == profile
    assert read_profile("b") is None
    assert profile_key("x", 1) != profile_key("x", 2)
    assert profile_key("x", 1) == profile_key("x", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"target": None},
        {"target": {"pasts": [1], "rows": [1], "seconds": [[-1.0]], "uncertainty": 0}},
        {"target": {"pasts": [1], "rows": [1, 1], "seconds": [[1.0, 2.0]], "uncertainty": 0}},
        {"target": {"pasts": [1], "rows": [1], "seconds": [[1.0, 2.0]], "uncertainty": 0}},
        {"target": {"pasts": [], "rows": [], "seconds": [], "uncertainty": 0}},
        {"target": {"pasts": [1], "rows": [1], "seconds": [[1.0]], "uncertainty": -1}},
        {"draft": "x"},
        {"tries": float("inf")},
    ],
    ids=str,
)
def test_a_profile_that_makes_no_sense_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """It is measured again instead."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    write_profile("a", Profile(TABLE, None))
    (path,) = (tmp_path / "profiles").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_profile("a") is None
    path.write_text("{")
    assert read_profile("a") is None


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be: nothing is stored, nothing raised."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    assert not write_profile("a", Profile(TABLE, None))
    assert read_profile("a") is None


def test_an_engine_measures_once(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second load reads what the first stored; a fixed number of tokens measures nothing."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    measured = measurements(monkeypatch, [0.01] * 3)
    edgespec.load(tiny_pair, spec=SpecParams(num_draft_tokens=4)).close()
    assert measured == []
    edgespec.load(tiny_pair).close()
    edgespec.load(tiny_pair).close()
    assert measured == [2]
    edgespec.load(tiny_pair, spec=SpecParams(drafter="ngram")).close()
    assert measured == [2, 1]
    edgespec.load(tiny_pair, runtime=RuntimeParams(threads=1)).close()
    assert measured == [2, 1, 2]


def measurements(monkeypatch: pytest.MonkeyPatch, uncertainties: list[float]) -> list[int]:
    """Measurements find `TABLE`, so uncertain one after the other. How many sessions each was of."""
    measured: list[int] = []

    def measure(*sessions: object) -> list[CostTable]:
        measured.append(len(sessions))
        return [replace(TABLE, uncertainty=uncertainties[len(measured) - 1])] * len(sessions)

    monkeypatch.setattr("edgespec.probe.measure_costs", lambda session, budget_s: measure(session)[0])
    monkeypatch.setattr("edgespec.probe.measure_pair", lambda target, draft, budget_s: tuple(measure(target, draft)))
    return measured


@pytest.mark.parametrize(
    ("found", "kept"),
    [([0.05], 0.05), ([0.5, 0.05], 0.05), ([0.3, 0.5, 0.4], 0.3), ([0.5, 0.3, 0.2], 0.2)],
)
def test_what_was_measured_on_a_busy_machine_is_measured_again(
    tiny_bundle: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, found: list[float], kept: float
) -> None:
    """At the next loads, until it is certain or was tried three times; the most certain figures are kept."""
    measured = measurements(monkeypatch, found)
    for _ in range(5):
        edgespec.load(tiny_bundle).close()
    assert len(measured) == len(found)
    (path,) = (empty_cache.parent.parent / "profiles").iterdir()
    profile = read_profile(path.stem)
    assert profile is not None
    assert profile.uncertainty == kept
