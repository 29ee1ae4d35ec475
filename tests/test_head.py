"""Heads over a part of the vocabulary: the file, the spreading, and a session that uses them."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.bundle import list_files, model_head, read_bundle, write_manifest
from edgespec.errors import BundleError, SessionError
from edgespec.head import Head, Spreader, read_head
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.session import DecoderSession


def save(file: Path, ids: object, dtype: type = np.int32) -> Path:
    np.save(file, np.asarray(ids, dtype))
    return file


def test_rows_are_spread() -> None:
    """Each column lands on its token, everything else is impossible, and what a caller overwrote does not stay."""
    spread = Spreader(Head(np.array([1, 4]), 6))
    rows = spread(np.array([[0.5, 2.0], [3.0, -1.0]], np.float32))
    nothing = -np.inf
    np.testing.assert_array_equal(
        rows, [[nothing, 0.5, nothing, nothing, 2, nothing], [nothing, 3, nothing, nothing, -1, nothing]]
    )
    rows[:] = 7
    np.testing.assert_array_equal(spread(np.zeros((1, 2), np.float32)), [[nothing, 0, nothing, nothing, 0, nothing]])


def test_a_head_is_read(tmp_path: Path) -> None:
    """Ids come back as they were written."""
    head = read_head(save(tmp_path / "ids.npy", [0, 3, 9]), 10)
    assert head.ids.tolist() == [0, 3, 9]
    assert head.vocab_size == 10


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [0, 10], [-1, 2], [], [[1, 2]], list(range(4000))])
def test_a_wrong_head_is_refused(ids: object, tmp_path: Path) -> None:
    """Ids that do not ascend, are outside the vocabulary, or are too many are refused by the file's name."""
    with pytest.raises(BundleError, match=r"ids\.npy"):
        read_head(save(tmp_path / "ids.npy", ids), 10)


def test_another_file_is_no_head(tmp_path: Path) -> None:
    """Neither other types, nor pickles, nor other files."""
    save(tmp_path / "ids.npy", [1.0, 2.0], float)
    np.save(tmp_path / "pickle.npy", np.array([{}], object))
    (tmp_path / "text.npy").write_text("no", encoding="utf-8")
    for name in ("ids", "pickle", "text", "missing"):
        with pytest.raises(BundleError):
            read_head(tmp_path / f"{name}.npy", 10)


@pytest.fixture
def reduced(tiny_pair: Path, tmp_path: Path) -> Path:
    """A bundle whose draft has columns for all of its tokens, but shifted by one: token t + 1 in column t."""
    folder = Path(shutil.copytree(tiny_pair, tmp_path / "reduced"))
    manifest = read_bundle(folder).manifest
    assert manifest.draft is not None
    graph = folder / manifest.draft.path
    with closing(DecoderSession(graph, context_length=64, runtime=RuntimeParams())) as session:
        columns = session.vocab_size
    save(graph.with_name("head_ids.npy"), np.arange(1, columns + 1))
    name = f"{Path(manifest.draft.path).parent.as_posix()}/head_ids.npy"
    draft = replace(manifest.draft, head_ids=name, vocab_size=columns + 1)
    write_manifest(replace(manifest, draft=draft, files=list_files(folder)), folder)
    return folder


def test_a_session_spreads_its_rows(reduced: Path) -> None:
    """Through a session, and through its fork, a row has the graph's logits at the head's tokens."""
    bundle = read_bundle(reduced)
    draft = bundle.manifest.draft
    assert draft is not None
    head, tokens = model_head(bundle, draft), np.array([3, 5, 4])
    path = bundle.path / draft.path
    with closing(DecoderSession(path, context_length=64, runtime=RuntimeParams())) as plain:
        expected = plain.forward(tokens, 2).copy()
    with closing(DecoderSession(path, context_length=64, runtime=RuntimeParams(), head=head)) as session:
        fork = session.fork()
        for found in (session.forward(tokens, 2), fork.forward(tokens, 2)):
            assert session.vocab_size == found.shape[1] == expected.shape[1] + 1
            np.testing.assert_array_equal(found[:, 1:], expected)
            assert (found[:, 0] == -np.inf).all()


def test_answers_do_not_depend_on_the_head(reduced: Path, tiny_pair: Path) -> None:
    """With a draft that can draft some tokens only, greedy text is that without a draft; sampled text ends well."""
    messages = [{"role": "user", "content": "count"}]
    texts = []
    for drafter in ("model", "ngram"):
        with edgespec.load(reduced, spec=SpecParams(drafter=drafter, num_draft_tokens=3)) as engine:
            stream = engine.chat(messages, SamplingParams(max_new_tokens=40, ignore_eos=True))
            texts.append(stream.text())
            if drafter == "model":
                assert stream.stats.drafted
                assert engine.chat(
                    messages, SamplingParams(temperature=1, max_new_tokens=20, seed=1, ignore_eos=True)
                ).text()
    assert texts[0] == texts[1]


def test_a_head_of_another_size_is_refused(reduced: Path) -> None:
    """Ids and columns must be as many."""
    bundle = read_bundle(reduced)
    draft = bundle.manifest.draft
    assert draft is not None
    with pytest.raises(SessionError, match="columns"):
        DecoderSession(
            bundle.path / draft.path, context_length=64, runtime=RuntimeParams(), head=Head(np.arange(3), 10)
        )


def test_the_file_must_be_listed(reduced: Path) -> None:
    """A head that the manifest's hashes do not cover is refused."""
    manifest = read_bundle(reduced).manifest
    assert manifest.draft is not None
    files = {name: info for name, info in manifest.files.items() if not name.endswith("head_ids.npy")}
    write_manifest(replace(manifest, files=files), reduced)
    with pytest.raises(BundleError, match="head_ids"):
        read_bundle(reduced)
