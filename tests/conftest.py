"""Fixtures shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_bundle


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
