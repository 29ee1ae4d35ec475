"""Distilled drafts: their folder, the graph of a step against torch, and the whole export with its target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.bundle import read_bundle
from edgespec.cli.info import info_command
from edgespec.errors import ExportError, IncompatibleDraftError
from edgespec.export import export_bundle, import_bundle
from edgespec.export.distilled import (
    FORMAT_VERSION,
    MARK,
    Distilled,
    read_distilled,
    vocabulary_digest,
    write_distilled,
)
from edgespec.export.draft_graph import build_draft
from edgespec.export.graph import halve_graph, quantize_graph
from edgespec.export.progress import SilentProgress
from edgespec.export.source import Source, read_folder
from edgespec.lookup import NUM_HINT_KINDS
from edgespec.models import open_draft, open_target
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from tests.export_models import PADDED_VOCAB, save_llama, torch_logits, total_variation

pytestmark = pytest.mark.export

SIZE, WIDTH, HEAD = 64, 96, 120
KV_HEADS, HEAD_DIM = 2, 16  # of the tiny llama's cache
RNG = np.random.default_rng(11)
HEAD_IDS = np.sort(RNG.choice(PADDED_VOCAB, HEAD, replace=False))
HINTS = ((0, 0), (7, 3), (HEAD - 1, NUM_HINT_KINDS - 1))  # of three steps: column and kind
EMBEDDING = RNG.standard_normal((PADDED_VOCAB, SIZE)).astype(np.float32)


def make_weights(layers: int = 2, blocks: int = 2, num_heads: int = 0) -> dict[str, np.ndarray]:
    """Random ones, scaled so that everything matters and nothing explodes."""
    shapes = {"fc": (SIZE, (layers + 1) * SIZE), "mix": (SIZE, 2 * SIZE), "head": (HEAD, SIZE)}
    shapes |= {"hints": (NUM_HINT_KINDS, SIZE)}
    for i in range(blocks):
        shapes |= {f"blocks.{i}.{name}_proj": (WIDTH, SIZE) for name in ("gate", "up")}
        shapes[f"blocks.{i}.down_proj"] = (SIZE, WIDTH)
    if num_heads:
        shapes |= {"attention.q_proj": (num_heads * HEAD_DIM, SIZE), "attention.o_proj": (SIZE, num_heads * HEAD_DIM)}
        shapes |= {f"attention.{name}_proj": (KV_HEADS * HEAD_DIM, SIZE) for name in "kv"}
    rng = np.random.default_rng(12)  # its own, so that the weights depend on no order of the tests
    found = {n: rng.standard_normal(shape) * 1.5 / shape[1] ** 0.5 for n, shape in shapes.items()}
    norms = ["norm", "norm_state", "norm_token", *(f"blocks.{i}.norm" for i in range(blocks))]
    norms += ["attention.norm"] if num_heads else []
    found |= {name: 1 + 0.2 * rng.standard_normal(SIZE) for name in norms}
    return {f"{name}.weight": weight.astype(np.float32) for name, weight in found.items()}


def write_draft(folder: Path, source: Source, layers: tuple[int, ...] = (1, 0), **changes: Any) -> Path:
    """A draft with random weights for a tiny llama."""
    about = {"format_version": FORMAT_VERSION, "base": "tiny", "licence": "MIT", "hidden_layers": layers}
    about |= {"vocabulary": vocabulary_digest(source.tokenizer), "hidden_size": SIZE, "intermediate_size": WIDTH}
    about |= {"num_blocks": 2, "rms_norm_eps": 1e-5, "head_size": HEAD, "vocab_size": PADDED_VOCAB}
    about |= {"attended_layer": None, "num_heads": 0, "num_kv_heads": 0, "head_dim": 0} | changes
    folder.mkdir()
    write_distilled(folder, about, make_weights(len(layers), num_heads=about["num_heads"]), HEAD_IDS)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder. Read only."""
    return save_llama(tmp_path_factory.mktemp("distilled") / "tiny")


@pytest.fixture(scope="module")
def source(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return read_folder(llama, tmp_path_factory.mktemp("work"), "here")


@pytest.fixture(scope="module")
def folder(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft's folder. Read only."""
    return write_draft(tmp_path_factory.mktemp("drafts") / "draft", source)


# the folder


def test_what_was_written_is_read(source: Source, tmp_path: Path) -> None:
    """Sizes and tokens exactly, weights as far as 8 bits and half precision go."""
    made = read_distilled(write_draft(tmp_path / "draft", source), source)
    assert (made.base, made.licence, made.hidden_layers, made.num_blocks) == ("tiny", "MIT", (1, 0), 2)
    np.testing.assert_array_equal(made.head_ids, HEAD_IDS)
    assert made.num_features == 3 * SIZE
    weights = make_weights()
    write_distilled(made.folder, json.loads((made.folder / "config.json").read_text())[MARK], weights, HEAD_IDS)
    found = made.read_weights()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.abs(found[name] - weight).max() <= np.abs(weight).max() / 127, name
    size = sum(weight.size for weight in weights.values())
    assert made.num_parameters == size + PADDED_VOCAB * SIZE


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    about = json.loads(file.read_text(encoding="utf-8"))[MARK] | changes
    file.write_text(json.dumps({MARK: {k: v for k, v in about.items() if v is not None}}), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format_version": 3}, ExportError, "another format version; distil the draft again"),
        ({"vocabulary": "0" * 64}, IncompatibleDraftError, "distilled from tiny, whose tokens"),
        ({"hidden_size": 32}, IncompatibleDraftError, "an embedding of 264 x 32"),
        ({"vocab_size": 270}, IncompatibleDraftError, "an embedding of 270 x 64"),
        ({"hidden_layers": []}, ExportError, "hidden_layers has 0"),
        ({"hidden_layers": [-1]}, ExportError, "hidden_layers is"),
        ({"head_size": 119}, ExportError, "120 tokens and not 119"),
        ({"rms_norm_eps": "small"}, ExportError, "rms_norm_eps"),
        ({"num_blocks": 1 << 40}, ExportError, "num_blocks"),
        ({"num_heads": 4}, ExportError, "num_heads is 4"),
        ({"attended_layer": 0}, ExportError, "num_kv_heads is 0"),
        ({"attended_layer": 0, "num_kv_heads": 2, "head_dim": 16, "num_heads": 3}, ExportError, "num_heads is 3, whi"),
        ({"attended_layer": -1}, ExportError, "attended_layer is -1"),
        ({"base": None}, ExportError, "base is missing"),
    ],
)
def test_a_wrong_configuration_is_refused(
    source: Source, folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """One line that says what is wrong, before anything is converted."""
    draft = shutil.copytree(folder, tmp_path / "draft")
    change_config(draft, **changes)
    with pytest.raises(error, match=message) as found:
        read_distilled(draft, source)
    assert "\n" not in str(found.value)


def test_damaged_files_are_refused(source: Source, folder: Path, tmp_path: Path) -> None:
    """Tokens that do not ascend, weights of other sizes, weights that are none."""
    draft = shutil.copytree(folder, tmp_path / "draft")
    change_config(draft, num_blocks=3)
    with pytest.raises(ExportError, match=r"does not fit config.json \(blocks.2"):
        read_distilled(draft, source).read_weights()
    (draft / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ExportError, match="cannot be read"):
        read_distilled(draft, source).read_weights()
    np.save(draft / "head_ids.npy", HEAD_IDS[::-1].astype(np.int32))
    with pytest.raises(ExportError, match="which tokens a head has"):
        read_distilled(draft, source)


# the step


def torch_step(made: Distilled, weights: dict[str, np.ndarray], attention: Any = lambda z: z) -> Any:
    """The definition in torch's own modules: (token, hidden, state) -> (logits, next state)."""
    import torch
    from torch.nn import functional

    w = {name.removesuffix(".weight"): torch.from_numpy(weight).double() for name, weight in weights.items()}

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, (SIZE,), w[name], made.rms_norm_eps)

    def step(token: int, hidden: Any, state: Any, hint: tuple[int, int] = (0, 0)) -> tuple[Any, Any]:
        x = functional.linear(hidden, w["fc"]) + state
        e = torch.from_numpy(EMBEDDING[token]).double()
        z = functional.linear(torch.cat([norm(x, "norm_state"), norm(e, "norm_token")], -1), w["mix"])
        z = attention(z)
        for i in range(made.num_blocks):
            y = norm(z, f"blocks.{i}.norm")
            gate = functional.silu(functional.linear(y, w[f"blocks.{i}.gate_proj"]))
            gated = gate * functional.linear(y, w[f"blocks.{i}.up_proj"])
            z = z + functional.linear(gated, w[f"blocks.{i}.down_proj"])
        logits, (column, kind) = functional.linear(norm(z, "norm"), w["head"]), hint
        if kind:
            logits[..., column] += torch.dot(w["hints"][kind], norm(z, "norm"))
        return logits, z

    return step


# Mean total variation; the weights of a tiny random draft have nothing to spare.
@pytest.mark.parametrize(
    ("precision", "block", "most"),
    [("fp32", None, 1e-5), ("fp16", None, 5e-3), ("int8", 32, 0.03), ("int8", 128, 0.03), ("int4", 32, 0.3)],
)
def test_a_step_is_torchs(
    source: Source, folder: Path, tmp_path: Path, precision: str, block: int | None, most: float
) -> None:
    """Three steps from a row of the target, over several tokens; the state goes round."""
    import onnxruntime as ort
    import torch

    made = read_distilled(folder, source)
    weights = made.read_weights()
    path = build_draft(made, weights, ir.tensor(EMBEDDING), tmp_path / "fp32")
    if block is not None:
        path, report = quantize_graph(path, tmp_path / "q", precision, block, lambda fraction: None)
        assert not report["kept_fp32"]
    elif precision == "fp16":
        path = halve_graph(path, tmp_path / "q", lambda fraction: None)
    session, step = ort.InferenceSession(str(path)), torch_step(made, weights)
    dtype, distances = np.float16 if precision == "fp16" else np.float32, []
    for start in range(12):
        hidden = np.random.default_rng(start).standard_normal((1, 1, made.num_features)).astype(dtype)
        state, theirs = np.zeros((1, 1, SIZE), dtype), torch.zeros(SIZE).double()
        for token, hint in zip((start, 3 * start + 50, 200 - start), HINTS, strict=True):
            feeds = {"input_ids": np.array([[token]]), "hidden": hidden, "state": state, "hint": np.array([hint])}
            logits, state = session.run(["logits", "next_state"], feeds)
            expected, theirs = step(token, torch.from_numpy(hidden[0, 0]).double(), theirs, hint)
            assert logits.shape == (1, 1, HEAD)
            distances.append(total_variation(logits[0], expected.numpy()[None])[0])
            hidden = np.zeros_like(hidden)
    assert np.mean(distances) < most


# the export


@pytest.fixture(scope="module")
def bundle(llama: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in one bundle. Read only."""
    out = tmp_path_factory.mktemp("bundle") / "pair"
    export_bundle(str(llama), out, draft=str(folder), precision="fp32", draft_precision="int8")
    return out


def test_the_manifest_says_what_it_is(bundle: Path) -> None:
    """Kinds, layers and tokens; figures of the check; `info` shows it."""
    manifest = read_bundle(bundle).manifest
    draft, check = manifest.draft, manifest.check
    assert draft is not None
    assert (draft.cache, draft.num_layers, draft.precision) == ("none", 0, "int8")
    assert manifest.target.hidden_layers == (1, 0)
    assert draft.vocab_size == manifest.target.vocab_size
    assert 0 < check["pair_overlap"] < 1
    assert check["draft_fp32"]["mean_tv"] < 1e-5
    assert check["draft"]["mean_tv"] < 0.1
    assert check["draft_steps"]["ms"]["1"] > 0
    result = CliRunner().invoke(info_command, [str(bundle)])
    assert "int8 in blocks of 128, no cache" in result.output


def test_overlap_is_the_acceptance(bundle: Path, llama: Path) -> None:
    """The recorded overlap is what torch's target and the draft's rows give on a text, if not on the same one."""
    opened, text = read_bundle(bundle), np.random.default_rng(0).integers(3, 259, 60)
    head, found = np.load(next(bundle.rglob("head_ids.npy"))), []
    p = torch_logits(llama, text)
    with closing(open_target(opened, RuntimeParams())) as target:
        draft = open_draft(opened, RuntimeParams(), target)
        target.forward(text, len(text))
        for place in range(1, len(text)):
            q = draft.forward(draft.sync(text[: place + 1]), 1)[0]
            row = np.full(p.shape[1], -np.inf, np.float32)
            row[head] = q
            found.append(1 - total_variation(p[place][None], row[None])[0])
        draft.close()
    assert abs(np.mean(found) - opened.manifest.check["pair_overlap"]) < 0.05


def test_it_drafts(bundle: Path, llama: Path) -> None:
    """Greedy text with it is torch's own."""
    prompt = np.random.default_rng(3).integers(3, 259, 12)
    with edgespec.load(bundle, spec=SpecParams(drafter="model", num_draft_tokens=2)) as engine:
        stream = engine.generate(prompt.tolist(), SamplingParams(max_new_tokens=30, ignore_eos=True))
        stream.text()
        found, stats = list(stream.token_ids), stream.stats
    tokens = prompt
    for _ in range(30):
        tokens = np.append(tokens, torch_logits(llama, tokens)[-1].argmax())
    assert found == tokens[12:].tolist()
    assert stats.drafted > 30


def test_the_target_is_the_same_as_alone(bundle: Path, llama: Path, tmp_path: Path) -> None:
    """To the last bit: the further output changes nothing that is computed."""
    export_bundle(str(llama), tmp_path / "alone", precision="fp32")
    alone, text = read_bundle(tmp_path / "alone"), np.arange(3, 60)
    assert alone.manifest.target.hidden_layers is None
    rows = []
    for opened in (alone, read_bundle(bundle)):
        with closing(open_target(opened, RuntimeParams())) as session:
            rows.append(np.concatenate([session.forward(text[:50], 7).copy(), session.forward(text[50:], 7).copy()]))
    np.testing.assert_array_equal(rows[0], rows[1])


def test_a_layer_that_is_not_there(llama: Path, source: Source, tmp_path: Path) -> None:
    """The draft of a deeper model: one line."""
    draft = write_draft(tmp_path / "draft", source, layers=(1, 5))
    with pytest.raises(ExportError, match="layer 5 was not found"):
        export_bundle(str(llama), tmp_path / "bundle", draft=str(draft))


def test_a_draft_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    """Another width, or other tokens: it is said which model it belongs to."""
    other = save_llama(tmp_path / "other", hidden_size=32)
    with pytest.raises(IncompatibleDraftError, match="embedding"):
        export_bundle(str(other), tmp_path / "bundle", draft=str(folder))
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace('"<|im_end|>"', '"<|other|>"'), encoding="utf-8")
    with pytest.raises(IncompatibleDraftError, match="whose tokens"):
        export_bundle(str(other), tmp_path / "bundle", draft=str(folder))


def test_an_import_refuses_it(bundle: Path, folder: Path, tmp_path: Path) -> None:
    """A graph that is there already has no output for it."""
    with pytest.raises(ExportError, match="use `edgespec export`"):
        import_bundle(bundle / "target", tmp_path / "out", draft=folder)


def test_a_killed_export_goes_on(bundle: Path, llama: Path, folder: Path, tmp_path: Path) -> None:
    """Killed when all is made, the next one takes every step from the journal and writes the same files."""
    code = (
        "import os, sys; from pathlib import Path; from edgespec.export import pipeline\n"
        "pipeline.make_manifest = lambda *rest: os._exit(9)\n"
        "pipeline.export_bundle(sys.argv[1], Path(sys.argv[2]), draft=sys.argv[3], precision='fp32', "
        "draft_precision='int8')"
    )
    out = tmp_path / "pair"
    command = [sys.executable, "-c", code, str(llama), str(out), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(edgespec.__file__).parent.parent)}
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 9
    notes = Notes()
    export_bundle(str(llama), out, draft=str(folder), precision="fp32", draft_precision="int8", progress=notes)
    steps = ("target in fp32", "target in its precision", "the draft")
    assert [line for line in notes.lines if "killed" in line] == [
        f"taken from an export that was killed: {step}" for step in steps
    ]
    assert read_bundle(out).manifest.files == read_bundle(bundle).manifest.files
    assert read_bundle(out).manifest.target == read_bundle(bundle).manifest.target


class Notes(SilentProgress):
    """Keeps what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)
