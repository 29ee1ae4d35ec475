"""Weights that are mapped from the cache folder: the same results, and every way in which the folder can be unfit."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgespec
import edgespec.prepacked as module
from edgespec.bundle import Bundle, list_files, read_bundle
from edgespec.errors import SessionError
from edgespec.ort import available_providers, open_session
from edgespec.params import RuntimeParams
from edgespec.prepacked import open_graph
from tests.test_cli import cli
from tests.tiny import make_tiny_bundle

WIDTH, BLOCK = 256, 128
RUNTIME = RuntimeParams()
X = np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32)


def save_products(path: Path) -> None:
    """Two products whose weights kernels want in another order, one in fp32 and one in 8 bits, weights beside."""
    rng = np.random.default_rng(0)
    weights = {
        "floats": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "bytes": rng.integers(0, 256, (WIDTH, WIDTH // BLOCK, BLOCK)).astype(np.uint8),
        "scales": rng.random(WIDTH * WIDTH // BLOCK).astype(np.float32),
    }
    sizes = {"K": WIDTH, "N": WIDTH, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}
    nodes = [
        helper.make_node("MatMul", ["x", "floats"], ["h"]),
        helper.make_node("MatMulNBits", ["h", "bytes", "scales"], ["y"], domain="com.microsoft", **sizes),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    made = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], made)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle whose target is two products, a cache folder of its own, and no graph too small for it."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_LEAST", 0)
    folder = make_tiny_bundle(tmp_path / "bundle")
    manifest = read_bundle(folder).manifest
    save_products(folder / "target" / "model.onnx")
    return Bundle(folder, replace(manifest, files=list_files(folder)))


def products(bundle: Bundle, runtime: RuntimeParams = RUNTIME) -> np.ndarray:
    return open_graph(bundle, bundle.manifest.target, runtime).run(["y"], {"x": X})[0]


def expected(bundle: Bundle) -> np.ndarray:
    return open_session(bundle.path / bundle.manifest.target.path, RUNTIME).run(["y"], {"x": X})[0]


def entries(bundle: Bundle) -> list[Path]:
    return sorted((bundle.path.parent / "cache").glob("prepacked/*/*"))


def test_results_are_the_same_to_the_last_bit(bundle: Bundle) -> None:
    """The load that writes, those that map, and with another number of threads."""
    wanted = expected(bundle)
    for threads in (1, 2, None):
        assert np.array_equal(products(bundle, RuntimeParams(threads=threads)), wanted)
    (entry,) = entries(bundle)
    assert {file.name for file in entry.iterdir()} == {"entry.json", "model.onnx", "model.onnx.data"}


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is told by Linux only")
def test_weights_are_mapped(bundle: Bundle) -> None:
    """The second session has the file in its memory and the first has not."""
    first = open_graph(bundle, bundle.manifest.target, RUNTIME)
    maps = Path("/proc/self/maps")
    assert "prepacked" not in maps.read_text(encoding="utf-8")
    second = open_graph(bundle, bundle.manifest.target, RUNTIME)
    assert str(entries(bundle)[0] / "model.onnx.data") in maps.read_text(encoding="utf-8")
    del first, second


def test_it_can_be_switched_off(bundle: Bundle) -> None:
    """Nothing is written then, nor for small graphs or other providers."""
    assert np.array_equal(products(bundle, RuntimeParams(map_weights=False)), expected(bundle))
    if "AzureExecutionProvider" in available_providers():
        products(bundle, RuntimeParams(provider="AzureExecutionProvider"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST", 1 << 30)
        products(bundle)
    assert not entries(bundle)


@pytest.mark.parametrize("why", ["a file in the way", "no room"])
def test_a_cache_that_cannot_be_written_costs_nothing(
    why: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is loaded as it is, and nothing half done stays."""
    if why == "no room":
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    else:
        (tmp_path / "cache").write_text("in the way", encoding="utf-8")
    for _ in range(2):
        assert np.array_equal(products(bundle), expected(bundle))
    assert not entries(bundle)


@pytest.mark.parametrize("what", ["truncated", "longer", "missing", "no graph", "not described", "described wrongly"])
def test_a_damaged_entry_is_written_again(what: str, bundle: Bundle) -> None:
    """The load that finds it is right, and so is the next one."""
    wanted = expected(bundle)
    products(bundle)
    (entry,) = entries(bundle)
    weights, graph = entry / "model.onnx.data", entry / "model.onnx"
    whole = weights.stat().st_size
    if what == "truncated":
        os.truncate(weights, whole // 2)
    elif what == "longer":
        os.truncate(weights, whole + 1)
    elif what == "missing":
        weights.unlink()
    elif what == "no graph":
        graph.write_bytes(b"\xff" * graph.stat().st_size)
    else:
        (entry / "entry.json").write_text("[]" if what == "described wrongly" else "{", encoding="utf-8")
    assert np.array_equal(products(bundle), wanted)
    assert (weights.stat().st_size, len(entries(bundle))) == (whole, 1)
    assert np.array_equal(products(bundle), wanted)


def test_two_processes_at_once(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is later keeps what the other one wrote."""
    finish = module._finish

    def finish_second(part: Path, path: Path) -> None:
        finish(part, path)
        shutil.copytree(part, part.with_name(part.name.split(".")[0]))

    monkeypatch.setattr(module, "_finish", finish_second)
    assert np.array_equal(products(bundle), expected(bundle))
    (entry,) = entries(bundle)
    assert not entry.suffix
    monkeypatch.setattr(module, "open_session", lambda path, runtime: open_session(path, runtime))  # writes no more
    assert np.array_equal(products(bundle), expected(bundle))


def test_what_nobody_will_load_again_is_removed(bundle: Bundle, tmp_path: Path) -> None:
    """Entries of a bundle's earlier state, of bundles that are gone, and unfinished ones that are old."""
    moved = Bundle(tmp_path / "moved", bundle.manifest)
    shutil.copytree(bundle.path, moved.path)
    products(bundle)
    products(moved)
    (before,) = set(entries(bundle)) - {e for e in entries(bundle) if "moved" in (e / "entry.json").read_text()}
    old, new = (before.with_name(f"{before.name}.{name}.part") for name in ("old", "new"))
    for part in (old, new):
        part.mkdir()
    os.utime(old, (0, 0))
    shutil.rmtree(moved.path)
    later = with_changed_weights(bundle)
    assert np.array_equal(products(later), expected(later))
    assert before not in entries(bundle)
    kept = {e.name: json.loads((e / "entry.json").read_text())["graph"] for e in entries(bundle) if e != new}
    assert list(kept.values()) == [str(bundle.path / "target" / "model.onnx")]
    assert new in entries(bundle)


def with_changed_weights(bundle: Bundle) -> Bundle:
    """The same bundle after other weights were exported to its folder."""
    file = bundle.path / "target" / "model.onnx.data"
    data = bytearray(file.read_bytes())
    data[:4] = np.float32(2.5).tobytes()
    file.write_bytes(data)
    return Bundle(bundle.path, replace(bundle.manifest, files=list_files(bundle.path)))


def test_weights_that_were_changed_unseen_are_read(bundle: Bundle) -> None:
    """A bundle whose hashes are not checked has an entry by the times of its files as well."""
    before = products(bundle)
    file = bundle.path / bundle.manifest.target.path
    stamp = file.stat().st_mtime
    with_changed_weights(bundle)
    os.utime(file.with_name("model.onnx.data"), (stamp + 5, stamp + 5))
    after = products(bundle)
    assert np.array_equal(after, expected(bundle))
    assert not np.array_equal(after, before)


def test_a_graph_that_cannot_be_loaded_says_so(bundle: Bundle) -> None:
    """As without the cache, and with the name of the bundle's file."""
    path = bundle.path / bundle.manifest.target.path
    path.write_bytes(b"no graph")
    with pytest.raises(SessionError, match=r"bundle.target"):
        products(bundle)
    assert not entries(bundle)


def test_an_engine_and_the_command_line(bundle: Bundle, tmp_path: Path) -> None:
    """Loading twice gives the same text, with a file for each model of the pair, or none where they are not wanted."""
    pair = make_tiny_bundle(tmp_path / "pair", draft=True)
    texts = []
    for wanted in (["--no-map-weights"], [], []):
        result = cli("run", pair, "-p", "x", "--max-new-tokens", 20, *wanted)
        texts.append(result.stdout)
        assert len(entries(bundle)) == (0 if wanted else 2)
    assert len(set(texts)) == 1
    with edgespec.load(pair) as engine, engine.fork() as fork:
        assert engine.generate("x").text() == fork.generate("x").text()
