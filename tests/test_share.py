"""Weights that target and draft have in common are stored once."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgespec
from edgespec.bundle import read_bundle
from edgespec.export import export_bundle
from edgespec.export import share as module
from edgespec.export.share import share_weights
from edgespec.ort import open_session
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from tests.export_models import save_llama

pytestmark = pytest.mark.export

RNG = np.random.default_rng(0)
EMBEDDING, ONE, TWO = (RNG.standard_normal((64, 64)).astype(np.float32) for _ in range(3))


@pytest.fixture(autouse=True)
def _however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny graphs have little to share."""
    monkeypatch.setattr(module, "_LEAST", 1)


def save(path: Path, embedding: np.ndarray, weight: np.ndarray, *, nested: bool = False) -> Path:
    """A graph of an embedding and one product, with names of its own; `nested` has a weight in a branch."""
    stem = path.parent.name
    nodes = [
        helper.make_node("Gather", [f"{stem}.embedding", "ids"], ["h"]),
        helper.make_node("MatMul", ["h", f"{stem}.weight"], ["y"]),
    ]
    if nested:
        made = [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(weight, name)) for name in "ab"]
        branches = [
            helper.make_graph([n], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64])])
            for n, name in zip(made, "ab", strict=True)
        ]
        nodes += [
            helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
            helper.make_node("If", ["yes"], ["z"], then_branch=branches[0], else_branch=branches[1]),
        ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])
    weights = {f"{stem}.embedding": embedding, f"{stem}.weight": weight}
    graph = helper.make_graph(nodes, "g", [ids], [out], [numpy_helper.from_array(w, n) for n, w in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(parents=True)
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Target and draft with one embedding."""
    return tuple(save(tmp_path / n / "model.onnx", EMBEDDING, w) for n, w in (("target", ONE), ("draft", TWO)))


def run(path: Path) -> np.ndarray:
    return open_session(path, RuntimeParams()).run(["y"], {"ids": np.arange(64)})[0]


def test_what_is_the_same_is_stored_once(pair: tuple[Path, Path]) -> None:
    """Both graphs compute what they did, the draft from the target's folder, where its file has the rest."""
    target, draft = pair
    before = {file: file.read_bytes() for file in target.parent.iterdir()}
    wanted = run(draft)
    moved = share_weights(target, draft, "draft.onnx")
    assert moved == target.with_name("draft.onnx")
    assert np.array_equal(run(moved), wanted)
    np.testing.assert_allclose(wanted, EMBEDDING @ TWO, atol=1e-4)
    assert target.with_name("draft.onnx.data").read_bytes() == TWO.tobytes()
    assert list(draft.parent.iterdir()) == []
    assert {file: file.read_bytes() for file in before} == before
    assert len(list(target.parent.iterdir())) == 4


def test_three_in_a_row(tmp_path: Path) -> None:
    """A draft that is the target once more moves beside it, and what drafts for that one does not take its place."""
    target, draft = (save(tmp_path / name / "model.onnx", EMBEDDING, ONE) for name in ("target", "draft"))
    inner = save(tmp_path / "inner_draft" / "model.onnx", EMBEDDING, TWO)
    wanted = [run(path) for path in (target, draft, inner)]
    draft = share_weights(target, draft, "draft.onnx")
    inner = share_weights(draft, inner, "inner_draft.onnx")
    assert [path.name for path in (draft, inner)] == ["draft.onnx", "inner_draft.onnx"]
    for path, rows in zip((target, draft, inner), wanted, strict=True):
        assert np.array_equal(run(path), rows)


@pytest.mark.parametrize("why", ["other weights", "too few", "a weight in a branch", "nothing outside"])
def test_others_stay_as_they_are(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in common, less than is worth it, or a graph that keeps weights where nobody looks."""
    target = save(tmp_path / "target" / "model.onnx", EMBEDDING, ONE)
    embedding = TWO if why == "other weights" else EMBEDDING
    draft = save(tmp_path / "draft" / "model.onnx", embedding, TWO, nested="branch" in why)
    if why == "too few":
        monkeypatch.setattr(module, "_WORTH", 0.51)
    if why == "nothing outside":
        onnx.save(onnx.load(draft), draft)
        draft.with_name("model.onnx.data").unlink()
    wanted = run(draft)
    assert share_weights(target, draft, "draft.onnx") == draft
    assert np.array_equal(run(draft), wanted)
    assert len(list(target.parent.iterdir())) == 2


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_an_interrupted_move_is_done_again(step: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the graph is there, or after the old one is gone."""
    target, draft = pair
    wanted = run(draft)
    real = Path.unlink

    def stop(*args: object, **more: object) -> None:
        if step == "unlink" and args[0] == draft:
            real(draft)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*((Path, "unlink") if step == "unlink" else (os, "replace")), stop)
        share_weights(target, draft, "draft.onnx")
    moved = share_weights(target, draft, "draft.onnx")
    assert moved.parent == target.parent
    assert np.array_equal(run(moved), wanted)
    assert list(draft.parent.iterdir()) == []


def test_an_exported_pair_shares_its_embedding(tmp_path: Path) -> None:
    """The bundle is sound and smaller by the embedding, and greedy text with drafts is that without."""
    llama = save_llama(tmp_path / "llama", tie_word_embeddings=False)
    small = save_llama(tmp_path / "small", seed=1, tie_word_embeddings=False, num_hidden_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from safetensors.numpy import load_file, save_file

    name, file = "model.embed_tokens.weight", "model.safetensors"
    weights = load_file(small / file) | {name: load_file(llama / file)[name]}
    save_file(weights, small / file, metadata={"format": "pt"})
    report = export_bundle(str(llama), tmp_path / "out", draft=str(small), precision="fp32", draft_precision="fp32")
    bundle = read_bundle(report.path)
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.path == "target/draft.onnx"
    assert {n for n in bundle.manifest.files if "/" in n} == {
        f"target/{graph}.onnx{end}" for graph in ("model", "draft") for end in ("", ".data")
    }
    alone = export_bundle(str(small), tmp_path / "alone", precision="fp32").manifest.files["target/model.onnx.data"]
    assert alone.size - bundle.manifest.files["target/draft.onnx.data"].size >= weights[name].nbytes
    params, texts = SamplingParams(max_new_tokens=30, ignore_eos=True), []
    for drafter in ("none", "model"):
        spec = SpecParams(drafter=drafter, num_draft_tokens=None if drafter == "none" else 3)
        with edgespec.load(report.path, spec=spec) as engine:
            texts.append(engine.generate("some text", params).text())
    assert texts[0] == texts[1]
    assert json.loads((report.path / "edgespec.json").read_text())["draft"]["num_layers"] == 1
