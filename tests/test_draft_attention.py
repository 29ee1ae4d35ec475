"""A distilled draft's attention over its target's cache: the graph against torch, and the export of whole pairs."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import edgespec
from edgespec.bundle import read_bundle
from edgespec.errors import ExportError, IncompatibleDraftError
from edgespec.export import export_bundle
from edgespec.export import share as sharing
from edgespec.export.distilled import Distilled, read_distilled
from edgespec.export.draft_attention import Rotary, Seen, read_rotary
from edgespec.export.draft_graph import build_draft, compute_step
from edgespec.export.graph import halve_graph, quantize_graph
from edgespec.export.source import Source, read_folder
from edgespec.models import open_draft, open_target
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.recurrent import RecurrentSession
from tests.export_models import save_llama, torch_logits, total_variation
from tests.families import get_family
from tests.test_distilled import EMBEDDING, HEAD, HEAD_DIM, HINTS, KV_HEADS, SIZE, torch_step, write_draft
from tests.test_hidden import fused

pytestmark = pytest.mark.export

LAYER, HEADS, CAPACITY = 1, 4, 48
ATTENTION = {"attended_layer": LAYER, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
ANGLES = np.arange(CAPACITY)[:, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder. Read only."""
    return save_llama(tmp_path_factory.mktemp("attention") / "tiny")


@pytest.fixture(scope="module")
def source(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return read_folder(llama, tmp_path_factory.mktemp("work"), "here")


@pytest.fixture(scope="module")
def folder(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft's folder. Read only."""
    return write_draft(tmp_path_factory.mktemp("drafts") / "draft", source, **ATTENTION)


@pytest.fixture(scope="module")
def made(source: Source, folder: Path) -> Distilled:
    return read_distilled(folder, source)


# one step


class TorchAttention:
    """Attention of one token after another, by torch's own operator, on a cache that is given."""

    def __init__(self, weights: dict[str, np.ndarray], keys: np.ndarray, values: np.ndarray, interleaved: bool) -> None:
        import torch

        self.w = {n.removesuffix(".weight"): torch.from_numpy(w).double() for n, w in weights.items()}
        self.keys, self.values = (torch.from_numpy(a).double() for a in (keys, values))
        self.interleaved = interleaved

    def rotated(self, heads: Any) -> Any:
        """By multiplying complex numbers."""
        import torch

        angle = torch.from_numpy(ANGLES[self.keys.shape[1]])
        pairs = heads.unflatten(-1, (-1, 2)) if self.interleaved else heads.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_real(turned)
        return (pairs if self.interleaved else pairs.mT).flatten(-2)

    def __call__(self, z: Any) -> Any:
        import torch
        from torch.nn import functional

        n = functional.rms_norm(z, (SIZE,), self.w["attention.norm"], 1e-5)
        q, k, v = (functional.linear(n, self.w[f"attention.{x}_proj"]).unflatten(-1, (-1, HEAD_DIM)) for x in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        self.keys, self.values = (torch.cat([a, b[:, None]], 1) for a, b in ((self.keys, k), (self.values, v)))
        repeated = (a.repeat_interleave(HEADS // KV_HEADS, 0) for a in (self.keys, self.values))
        found = functional.scaled_dot_product_attention(q[:, None], *repeated)
        return z + functional.linear(found.flatten(), self.w["attention.o_proj"])


def cache(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a text; entries behind it are what must not be seen."""
    rng = np.random.default_rng(length)
    arrays = [rng.standard_normal((1, KV_HEADS, CAPACITY, HEAD_DIM)).astype(np.float32) for _ in range(2)]
    for array in arrays:
        array[:, :, length:] = 1e4
    return arrays[0], arrays[1]


# Mean total variation; the weights of a tiny random draft have nothing to spare.
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("precision", "block", "most"),
    [("fp32", None, 1e-5), ("fp16", None, 5e-3), ("int8", 32, 0.03), ("int8", 128, 0.05), ("int4", 32, 0.3)],
)
def test_a_step_is_torchs(
    made: Distilled, tmp_path: Path, precision: str, block: int | None, most: float, interleaved: bool
) -> None:
    """Three steps after texts of several lengths, the empty one too; NumPy's step is the same."""
    import onnxruntime as ort
    import torch

    weights, rotary = made.read_weights(), Rotary(COS, SIN, interleaved)
    path = build_draft(made, weights, ir.tensor(EMBEDDING), tmp_path / "fp32", rotary)
    if block is not None:
        path, report = quantize_graph(path, tmp_path / "q", precision, block, lambda fraction: None)
        assert (report["num_quantized"], report["kept_fp32"]) == (11, [])
    elif precision == "fp16":
        path = halve_graph(path, tmp_path / "q", lambda fraction: None)
    session, distances = ort.InferenceSession(str(path)), []
    dtype = np.float16 if precision == "fp16" else np.float32
    for length in (0, 1, 7, 20, CAPACITY - 3):
        keys, values = cache(length)
        step = torch_step(
            made, weights, TorchAttention(weights, keys[0, :, :length], values[0, :, :length], interleaved)
        )
        hidden = np.random.default_rng(length + 1).standard_normal((1, 1, made.num_features)).astype(dtype)
        state, theirs, numpys = np.zeros((1, 1, SIZE), dtype), torch.zeros(SIZE).double(), np.zeros((1, SIZE))
        seen: Seen | None = Seen(rotary, keys[0], values[0], np.array([length]))
        pasts = {f"past_key_values.{LAYER}.{kind}": a.astype(dtype) for kind, a in (("key", keys), ("value", values))}
        for at, token in enumerate((length, 3 * length + 50, 200 - length), length):
            hint = HINTS[at - length]
            feeds = {"input_ids": np.array([[token]]), "hidden": hidden, "state": state, "past_len": np.array([at])}
            feeds["hint"] = np.array([hint])
            logits, state, *presents = session.run(None, feeds | pasts)
            pasts = dict(zip(pasts, presents, strict=True))
            expected, theirs = step(token, torch.from_numpy(hidden[0, 0]).double(), theirs, hint)
            assert logits.shape == (1, 1, HEAD)
            distances.append(total_variation(logits[0], expected.numpy()[None])[0])
            row = hidden[0].astype(np.float32)
            found, numpys, seen = compute_step(made, weights, EMBEDDING[[token]], row, numpys, np.array([hint]), seen)
            assert total_variation(found, expected.numpy()[None])[0] < 1e-5
            hidden = np.zeros_like(hidden)
    assert np.mean(distances) < most


def test_it_looks_back(made: Distilled, tmp_path: Path) -> None:
    """What was written long ago changes the row, though the row of `hidden` is the same; not with weights of 0."""
    import onnxruntime as ort

    weights = made.read_weights()
    for is_blind in (False, True):
        if is_blind:
            weights["attention.o_proj.weight"][:] = 0
        path = build_draft(made, weights, ir.tensor(EMBEDDING), tmp_path / str(is_blind), Rotary(COS, SIN, False))
        session, rows = ort.InferenceSession(str(path)), []
        keys, values = cache(20)
        for key in (keys[:, :, 3].copy(), keys[:, :, 3] + 1):
            keys[:, :, 3] = key
            feeds = {"input_ids": np.array([[7]]), "hidden": np.ones((1, 1, made.num_features), np.float32)}
            feeds |= {"state": np.zeros((1, 1, SIZE), np.float32), "past_len": np.array([20])}
            feeds["hint"] = np.zeros((1, 2), np.int64)
            feeds |= {f"past_key_values.{LAYER}.key": keys, f"past_key_values.{LAYER}.value": values}
            rows.append(session.run(["logits"], feeds)[0])
        assert np.array_equal(*rows) == is_blind


# the export


@pytest.fixture(scope="module", params=["int8", "int4", "fp16"])
def bundle(request: pytest.FixtureRequest, llama: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in one bundle. Read only."""
    out = tmp_path_factory.mktemp("bundle") / request.param
    precision = "fp16" if request.param == "fp16" else "fp32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST", 1)
        patch.setattr(sharing, "_WORTH", 0.0)
        export_bundle(str(llama), out, draft=str(folder), precision=precision, draft_precision=request.param)  # type: ignore[arg-type]
    return out


def test_the_figures_of_a_pair(bundle: Path) -> None:
    """The graph is the draft, looking at the target's own cache; the manifest says that it has none."""
    manifest = read_bundle(bundle).manifest
    draft, check = manifest.draft, manifest.check
    assert draft is not None
    assert (draft.cache, draft.num_layers, draft.num_kv_heads, draft.precision) == ("none", 0, 0, bundle.name)
    assert check["draft_fp32"]["mean_tv"] < (5e-3 if bundle.name == "fp16" else 1e-5)
    assert check["draft"]["mean_tv"] < (0.3 if bundle.name == "int4" else 0.1)
    assert 0 < check["pair_overlap"] < 1
    assert check["draft_steps"]["past"] > 100


def test_it_sees_the_targets_cache(bundle: Path, made: Distilled) -> None:
    """The sessions of the bundle: rows after a text whose beginning is changed are others."""
    opened, rows = read_bundle(bundle), []
    with closing(open_target(opened, RuntimeParams())) as target:
        draft = open_draft(opened, RuntimeParams(), target)
        assert isinstance(draft, RecurrentSession)
        assert draft.borrows
        for first in (5, 6):
            text = np.concatenate([[first], np.arange(40, 100)])
            target.forward(target.sync(text), 1)
            row = target.last_hidden()
            assert row is not None
            row[:] = 1  # whatever the target thinks of it
            rows.append(draft.forward(draft.sync(np.append(text, 7)), 1)[0].copy())
        draft.close()
    assert not np.array_equal(*rows)


def test_angles_are_stored_once(bundle: Path) -> None:
    """The tables of cosines and sines are those in the target's file."""
    path = bundle / "target" / "draft.onnx"
    tensors = {t.name: t for t in onnx.load(path, load_external_data=False).graph.initializer}
    for name in ("rope.cos", "rope.sin"):
        assert {e.key: e.value for e in tensors[name].external_data}["location"] == "model.onnx.data"


def test_it_drafts(bundle: Path, llama: Path) -> None:
    """Greedy text with it is plain decoding's, and torch's where the target is not rounded."""
    prompt, found = np.random.default_rng(3).integers(3, 259, 12), []
    for spec in (SpecParams(drafter="model", num_draft_tokens=2), SpecParams(drafter="none")):
        with edgespec.load(bundle, spec=spec, runtime=RuntimeParams(initial_capacity=16)) as engine:
            stream = engine.generate(prompt.tolist(), SamplingParams(max_new_tokens=30, ignore_eos=True))
            stream.text()
            found.append(list(stream.token_ids))
    assert found[0] == found[1]
    if bundle.name == "fp16":
        return
    tokens = prompt
    for _ in range(30):
        tokens = np.append(tokens, torch_logits(llama, tokens)[-1].argmax())
    assert found[0] == tokens[12:].tolist()


def test_precisions_that_do_not_go_together(llama: Path, folder: Path, tmp_path: Path) -> None:
    """Said once; the draft then sees what it drafted, which the check takes into account."""
    report = export_bundle(str(llama), tmp_path / "pair", draft=str(folder), precision="fp32", draft_precision="fp16")
    assert any("draft in fp16 cannot look at the cache of a target in fp32" in line for line in report.warnings)
    assert report.manifest.check["draft_steps"]["past"] == 0
    assert report.manifest.check["draft"]["mean_tv"] < 0.1


# what cannot be


def test_targets_that_cannot_be_joined(
    made: Distilled, source: Source, folder: Path, llama: Path, tmp_path: Path
) -> None:
    """No fused attention, no rotation inside of it, other heads, a layer that is not there: one line that says what
    to do.
    """
    path = tmp_path / "model.onnx"
    ir.save(get_family("llama").plain.load(), path, external_data="weights.data")
    with pytest.raises(
        ExportError,
        match=r"draft looks back through layer 1 of it, which has no attention on a shared "
        r"cache there; distil a draft without attention \(`edgespec distill --no-attention`\)",
    ):
        read_rotary(path, made, "it")
    ir.save(fused(get_family("gpt2")), path, external_data="weights.data")
    with pytest.raises(ExportError, match="does not tell positions apart by rotating alone there; distil a draft with"):
        read_rotary(path, made, "it")
    for changes, error, message in (
        ({"attended_layer": 5}, ExportError, "through layer 5 of tiny, which has no attention on a shared cache"),
        ({"num_kv_heads": 1}, IncompatibleDraftError, "whose layer 1 caches 1 heads of 16 channels; distil a draft"),
    ):
        draft = write_draft(tmp_path / str(changes), source, **(ATTENTION | changes))
        with pytest.raises(error, match=message):
            export_bundle(str(llama), tmp_path / "bundle", draft=str(draft))
    assert read_rotary(path, read_distilled(write_draft(tmp_path / "plain", source), source), "it") is None


def test_weights_that_do_not_fit(source: Source, folder: Path, tmp_path: Path) -> None:
    """A configuration that says attention, and weights without: one line."""
    draft = write_draft(tmp_path / "draft", source)
    file = draft / "config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    about["edgespec_draft"] |= ATTENTION
    file.write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(ExportError, match=r"does not fit config.json \(attention"):
        read_distilled(draft, source).read_weights()
