"""Measuring costs and keeping them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import probe
from edgespec.costs import CostTable
from edgespec.params import RuntimeParams, SpecParams
from edgespec.probe import measure_costs
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


def test_a_profile_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its key, with and without a draft; another key has none."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    for draft in (None, TABLE):
        write_profile("a", Profile(TABLE, draft))
        assert read_profile("a") == Profile(TABLE, draft)
    assert read_profile("b") is None
    assert profile_key("x", 1) != profile_key("x", 2)
    assert profile_key("x", 1) == profile_key("x", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"target": None},
        {"target": {"pasts": [1], "rows": [1], "seconds": [[-1.0]]}},
        {"target": {"pasts": [1], "rows": [1, 1], "seconds": [[1.0, 2.0]]}},
        {"target": {"pasts": [1], "rows": [1], "seconds": [[1.0, 2.0]]}},
        {"target": {"pasts": [], "rows": [], "seconds": []}},
        {"draft": "x"},
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
    write_profile("a", Profile(TABLE, None))
    assert read_profile("a") is None


def test_an_engine_measures_once(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second load reads what the first stored; a fixed number of tokens measures nothing."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    measured: list[object] = []
    monkeypatch.setattr("edgespec.probe.measure_costs", lambda session, budget_s: measured.append(session) or TABLE)
    edgespec.load(tiny_pair, spec=SpecParams(num_draft_tokens=4)).close()
    assert measured == []
    edgespec.load(tiny_pair).close()
    assert len(measured) == 2
    edgespec.load(tiny_pair).close()
    assert len(measured) == 2
    edgespec.load(tiny_pair, runtime=RuntimeParams(threads=1)).close()
    assert len(measured) == 4
