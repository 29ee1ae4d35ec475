"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.costs import CostTable
from edgespec.session import DecoderSession
from tests.tiny import make_tiny_bundle


def _has_qt() -> bool:
    """Whether PySide6 and the system libraries that it needs are there."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    try:
        import PySide6.QtWidgets  # noqa: F401
        import pytestqt.plugin  # noqa: F401
    except ImportError:
        return False
    return True


# Not loaded by its entry point, which would end every run on a machine without those libraries.
pytest_plugins = ["pytestqt.plugin"] if _has_qt() else []


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _drafting_pays() -> Iterator[None]:
    """Engines find rows and drafts cheap and never spin, so that no test depends on what the machine does beside it.

    Tests of the measurement itself imported the real function before this.
    """

    def costs(session: DecoderSession, budget_s: float = 0) -> CostTable:
        seconds = 1e-6 if "draft" in session._path.parts else 1e-4
        return CostTable((16, 1024), (1, 17), ((seconds, seconds), (seconds, seconds)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.probe.measure_costs", costs)
        patch.setattr("edgespec.tuning.advise_at_first_load", lambda *_, **__: None)
        patch.setattr("edgespec.probe.measure_pair", lambda target, draft, budget_s: (costs(target), costs(draft)))
        yield


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny target alone. Read only: copy it before changing it."""
    return make_tiny_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny target and a draft that is right about half of the time. Read only."""
    return make_tiny_bundle(tmp_path_factory.mktemp("pair"), draft=True)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with no bundle in it."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bundles" / "smollm2-135m"
