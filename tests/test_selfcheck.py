"""The self-check at load: the probe, the row rule, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import selfcheck as module
from edgespec.bundle import Manifest, read_bundle
from edgespec.errors import SessionError
from edgespec.params import RuntimeParams
from edgespec.selfcheck import SelfCheck, make_probe, probe_distance, self_check
from edgespec.session import DecoderSession
from tests.tiny import half_right, make_tiny_bundle, rewrite_manifest, save_graph, tiny_model


@pytest.fixture
def session(tiny_bundle: Path) -> Iterator[DecoderSession]:
    path = tiny_bundle / "target" / "model.onnx"
    with closing(DecoderSession(path, context_length=512, runtime=RuntimeParams())) as opened:
        yield opened


@pytest.fixture
def manifest(tiny_bundle: Path, empty_cache: Path) -> Manifest:
    """Of a bundle whose export recorded no probe; the cache is empty."""
    return read_bundle(tiny_bundle).manifest


def kept(cache: Path) -> list[Path]:
    return list((cache.parent.parent / "selfcheck").glob("*"))


def test_a_graph_is_at_no_distance_from_its_own_probe(session: DecoderSession) -> None:
    """The probe survives JSON, says what the graph says, and leaves nothing in the cache."""
    probe = json.loads(json.dumps(make_probe(session)))
    assert probe_distance(session, probe) == 0
    assert len(session.tokens) == 0
    logits = session.forward(module.probe_tokens(session.vocab_size, 24), 1)[0]
    assert probe["rows"][-1][0][0] == int(logits.argmax())


def test_another_graph_is_far_from_the_probe(session: DecoderSession, tmp_path: Path) -> None:
    """A model that is right every other time is told apart."""
    path = save_graph(half_right(tiny_model()), tmp_path / "model.onnx")
    with closing(DecoderSession(path, context_length=512, runtime=RuntimeParams())) as other:
        assert probe_distance(other, make_probe(session)) > 0.1


def test_what_was_found_is_not_measured_again(
    session: DecoderSession, manifest: Manifest, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second check of the same files on the same machine runs nothing."""
    with_probe = replace(manifest, check={"target_probe": make_probe(session)})
    first = self_check(session, with_probe, None, exact=True)
    assert first == SelfCheck(0.0, ">=2")
    assert len(kept(empty_cache)) == 1
    monkeypatch.setattr(module, "probe_distance", None)
    monkeypatch.setattr(module, "measure_row_invariance", None)
    assert self_check(session, with_probe, None, exact=True) == first


@pytest.mark.parametrize("what", ["files", "threads", "version", "machine"])
def test_whatever_can_change_the_result_asks_for_a_new_check(
    what: str, session: DecoderSession, manifest: Manifest, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files, threads, runtime or processor: another entry."""
    self_check(session, manifest, None, exact=False)
    if what == "files":
        changed = {name: replace(info, sha256="0" * 64) for name, info in manifest.files.items()}
        manifest = replace(manifest, files=changed)
    elif what == "version":
        monkeypatch.setattr(module, "runtime_version", lambda: "9.9")
    elif what == "machine":
        monkeypatch.setattr(module, "machine_name", lambda: "another")
    self_check(session, manifest, 1 if what == "threads" else None, exact=False)
    assert len(kept(empty_cache)) == 2


def test_the_row_rule_is_measured_when_it_is_asked_for(
    session: DecoderSession, manifest: Manifest, empty_cache: Path
) -> None:
    """A plain load leaves it open, an exact one adds it to what is known."""
    assert self_check(session, manifest, None, exact=False).row_rule is None
    assert self_check(session, manifest, None, exact=True).row_rule == ">=2"
    assert self_check(session, manifest, None, exact=False).row_rule == ">=2"


def test_a_cache_that_cannot_be_written_does_not_fail_the_load(
    session: DecoderSession, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be: the check is simply done again next time."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    assert self_check(session, manifest, None, exact=True).row_rule == ">=2"


@pytest.mark.parametrize("text", ["", "[]", '{"row_rule": "never", "distance": null}', '{"row_rule": null}'])
def test_a_damaged_entry_is_measured_again(
    text: str, session: DecoderSession, manifest: Manifest, empty_cache: Path
) -> None:
    """Whoever wrote into the cache folder does not decide what is exact."""
    self_check(session, manifest, None, exact=True)
    kept(empty_cache)[0].write_text(text, encoding="utf-8")
    assert self_check(session, manifest, None, exact=True).row_rule == ">=2"


def test_an_engine_refuses_a_graph_that_computes_something_else(tmp_path: Path, empty_cache: Path) -> None:
    """As on a machine whose kernels are wrong: one line that says what to do."""
    folder = make_tiny_bundle(tmp_path / "bundle")
    path = save_graph(half_right(tiny_model()), tmp_path / "other.onnx")
    with closing(DecoderSession(path, context_length=512, runtime=RuntimeParams())) as other:
        rewrite_manifest(folder, check={"target_probe": make_probe(other)})
    for _ in range(2):  # measured, then looked up
        with pytest.raises(SessionError, match="computes something else on this machine"):
            edgespec.load(folder)


def test_a_probe_that_cannot_be_read_is_one_line(session: DecoderSession, manifest: Manifest) -> None:
    """A manifest is untrusted: ids outside of the vocabulary, text, other shapes."""
    good = make_probe(session)
    for bad in (7, {"tokens": 24}, {"tokens": 24, "rows": [[[10**9, 0.5]]] * 6}, good | {"rows": good["rows"][:2]}):
        with pytest.raises(SessionError, match="probe cannot be read"):
            self_check(session, replace(manifest, check={"target_probe": bad}), None, exact=False)


def test_a_slow_model_is_tried_on_fewer_tokens(session: DecoderSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has a budget, not a number of calls."""
    assert module.affordable_tokens(session, 2.0, 48) == 48
    ticks = iter(np.arange(100) * 0.02)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    assert module.affordable_tokens(session, 2.0, 48) == 14
