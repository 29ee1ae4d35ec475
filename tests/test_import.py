"""`edgespec import`: graphs that others made, good and hostile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from edgespec.bundle import Bundle, ModelInfo, read_bundle
from edgespec.cli.import_ import import_command
from edgespec.errors import ExportError, IncompatibleDraftError
from edgespec.export import import_bundle
from edgespec.export.fuse import fuse
from edgespec.export.graph import quantize_graph
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.export_models import save_llama, save_tokenizer, torch_logits

pytestmark = pytest.mark.export

TOKENS = np.random.default_rng(6).integers(0, 259, 60)
LAYERS, HEADS, HEAD_DIM = 2, 2, 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original. Read only."""
    return save_llama(tmp_path_factory.mktemp("import") / "llama")


@pytest.fixture(scope="module")
def optimum(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What optimum makes of it: a growing cache, graph and config side by side. Read only."""
    folder = tmp_path_factory.mktemp("optimum") / "tiny"
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from optimum.exporters.onnx import main_export

        main_export(str(llama), folder, task="text-generation-with-past", opset=18, do_validation=False)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def genai(llama: Path, optimum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as onnxruntime-genai's builder writes it: lengths from a mask, open head size, other names."""
    folder = tmp_path_factory.mktemp("genai") / "built"
    folder.mkdir()
    model, _ = fuse(optimum / "model.onnx", json.loads((llama / "config.json").read_text(encoding="utf-8")), 256)
    ask_for_mask(model)
    ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data", size_threshold_bytes=0)
    save_tokenizer(folder)
    write_genai_config(folder)
    return folder


def ask_for_mask(model: ir.Model) -> None:
    """Undo our contract: `attention_mask` in place of `past_len`, no `keep`, and the builder's shapes and names."""
    graph = model.graph
    by_name = {v.name: v for v in graph.inputs}
    mask = ir.Value(name="attention_mask", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1, "total"]))
    graph.inputs.append(mask)
    shape = ir.node("Shape", [mask], {"start": 1, "end": 2}, name="total")
    new = ir.node("Shape", [by_name["input_ids"]], {"start": 1, "end": 2}, name="new")
    past = ir.node("Sub", [shape.outputs[0], new.outputs[0]], name="past")
    for node in (shape, new, past):
        node.outputs[0].name = f"mask.{node.name}"
    first = next(iter(graph))
    graph.insert_before(first, [shape, new, past])
    by_name["past_len"].replace_all_uses_with(past.outputs[0])
    by_name["keep"].replace_all_uses_with(new.outputs[0])
    for name in ("past_len", "keep"):
        graph.inputs.remove(by_name[name])
    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(("past_key_values", "present")):
            value.shape = ir.Shape(["batch", HEADS, "length", "cache_dim"])
            value.name = value.name.replace("past_key_values.", "past_").replace("present.", "new_")
    next(v for v in graph.outputs if v.name == "logits").shape = ir.Shape(["batch", "length", 264])


def write_genai_config(folder: Path, **changes: Any) -> None:
    decoder = {
        "filename": "decoder.onnx",
        "head_size": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "inputs": {"input_ids": "input_ids", "past_key_names": "past_%d.key", "past_value_names": "past_%d.value"},
        "outputs": {"logits": "logits", "present_key_names": "new_%d.key", "present_value_names": "new_%d.value"},
    }
    model = {"context_length": 256, "eos_token_id": 2, "decoder": decoder | changes}
    (folder / "genai_config.json").write_text(json.dumps({"model": model}), encoding="utf-8")


def logits_of(bundle: Bundle, model: ModelInfo) -> np.ndarray:
    """Prompt of 30, then five at a time with a rejected draft in between, then one by one."""
    path = bundle.path / model.path
    with closing(DecoderSession(path, context_length=model.context_length, runtime=RuntimeParams())) as session:
        rows = [session.forward(TOKENS[:30], 30).copy()]
        for at in range(30, 50, 5):
            session.forward(TOKENS[:3], 3)
            session.rewind(at)
            rows.append(session.forward(TOKENS[at : at + 5], 5).copy())
        rows += [session.forward(TOKENS[at : at + 1], 1).copy() for at in range(50, len(TOKENS))]
    return np.concatenate(rows)


def test_an_optimum_folder_is_fused_and_equals_torch(optimum: Path, llama: Path, tmp_path: Path) -> None:
    """What could be faster is made so, and computes the original."""
    import_bundle(optimum, tmp_path / "out")
    bundle = read_bundle(tmp_path / "out")
    target = bundle.manifest.target
    assert (target.cache, target.precision, target.context_length) == ("shared", "fp32", 512)
    assert (target.num_layers, target.num_kv_heads, target.head_dim) == (LAYERS, HEADS, HEAD_DIM)
    np.testing.assert_allclose(logits_of(bundle, target), torch_logits(llama, TOKENS), atol=2e-4)
    assert bundle.manifest.eos_token_ids == (2,)
    assert bundle.manifest.chat_template is not None
    assert set(bundle.manifest.check) >= {"target", "target_probe", "target_steps"}


def test_a_genai_folder_runs_on_a_shared_cache_and_equals_torch(genai: Path, llama: Path, tmp_path: Path) -> None:
    """Mask, open head size and other names become the usual contract; what a killed process left is no part of it."""
    left = tmp_path / f".out.edgespec-{2**22 + 12345}-x" / "bundle" / "draft"
    left.mkdir(parents=True)
    (left / "model.onnx").touch()
    import_bundle(genai, tmp_path / "out")
    bundle = read_bundle(tmp_path / "out")
    assert {name.partition("/")[0] for name in bundle.manifest.files if "/" in name} == {"target"}
    target = bundle.manifest.target
    assert (target.cache, target.head_dim, target.context_length) == ("shared", HEAD_DIM, 256)
    np.testing.assert_allclose(logits_of(bundle, target), torch_logits(llama, TOKENS), atol=2e-4)


def test_what_cannot_be_fused_keeps_its_growing_cache_and_says_why(optimum: Path, llama: Path, tmp_path: Path) -> None:
    """The configuration promises a window that the graph lacks: nothing is fused on a contradiction."""
    folder = copied(optimum, tmp_path / "window")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 16}), encoding="utf-8")
    report = import_bundle(folder, tmp_path / "out")
    target = report.manifest.target
    assert target.cache == "growing"
    assert any("lost the sliding window" in line for line in report.warnings)
    assert "window" in report.manifest.check["target_unfused"]
    np.testing.assert_allclose(logits_of(read_bundle(report.path), target), torch_logits(llama, TOKENS), atol=2e-4)


def test_a_hub_folder_has_variants_and_a_quantised_one_is_known(optimum: Path, tmp_path: Path) -> None:
    """`onnx/model.onnx` and `onnx/model_q4.onnx`: one is chosen by name, precision and block are read off."""
    folder = tmp_path / "hub"
    shutil.copytree(optimum, folder, ignore=shutil.ignore_patterns("*.onnx"))
    (folder / "onnx").mkdir()
    shutil.copy(optimum / "model.onnx", folder / "onnx")
    path, _ = quantize_graph(optimum / "model.onnx", tmp_path / "q4", "int4", 32, lambda fraction: None)
    onnx.save(onnx.load(str(path)), str(folder / "onnx" / "model_q4.onnx"))  # its weights inside
    report = import_bundle(folder, tmp_path / "out", draft=folder, draft_variant="q4")
    target, draft = report.manifest.target, report.manifest.draft
    assert draft is not None
    assert (target.precision, draft.precision, draft.block_size) == ("fp32", "int4", 32)
    assert draft.cache == "shared"
    assert 0.3 < report.manifest.check["pair_overlap"] < 1
    with pytest.raises(ExportError, match=r"no variant 'q8'; it has model, model_q4"):
        import_bundle(folder, tmp_path / "other", variant="q8")


def test_the_same_graph_for_both_is_stored_once(genai: Path, tmp_path: Path) -> None:
    """Draft and target share their files."""
    report = import_bundle(genai, tmp_path / "out", draft=genai)
    assert report.manifest.draft == report.manifest.target
    assert not (tmp_path / "out" / "draft").exists()


def test_a_draft_with_other_tokens_is_refused(genai: Path, tmp_path: Path) -> None:
    """Before anything is copied."""
    other = copied(genai, tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|theend|>"), encoding="utf-8")
    with pytest.raises(IncompatibleDraftError):
        import_bundle(genai, tmp_path / "out", draft=other)
    assert not (tmp_path / "out").exists()


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


Change = Callable[[onnx.ModelProto, Path], None]


def leave_folder(model: onnx.ModelProto, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(bytes(1 << 20))
    place(model, "location", "../secret")


def absolute(model: onnx.ModelProto, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(bytes(1 << 20))
    place(model, "location", str(folder.parent / "secret"))


def link(model: onnx.ModelProto, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(bytes(1 << 20))
    (folder / "innocent").symlink_to(folder.parent / "secret")
    place(model, "location", "innocent")


def place(model: onnx.ModelProto, key: str, value: str) -> None:
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = value


def huge(model: onnx.ModelProto, folder: Path) -> None:
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    tensor.dims[:] = [1 << 40, 1 << 40]


def custom(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[0].domain = "evil.corp"
    model.opset_import.append(onnx.helper.make_opsetid("evil.corp", 1))


def dynamic(model: onnx.ModelProto, folder: Path) -> None:
    next(n for n in model.graph.node if n.op_type == "MatMul").op_type = "MatMulInteger"


def absurd_heads(model: onnx.ModelProto, folder: Path) -> None:
    cache = next(v for v in model.graph.input if v.name == "past_0.key")
    cache.type.tensor_type.shape.dim[1].dim_value = 1 << 30


def drop_output(model: onnx.ModelProto, name: str) -> None:
    kept = [v for v in model.graph.output if v.name != name]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def extra_input(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1, 3]))


HOSTILE: dict[str, tuple[Change, str]] = {
    "data above the folder": (leave_folder, "outside of its folder"),
    "data at an absolute place": (absolute, "outside of its folder"),
    "data behind a link": (link, "outside of its folder"),
    "data beyond its file": (lambda m, f: place(m, "offset", str(1 << 40)), "does not lie inside"),
    "data that is missing": (lambda m, f: place(m, "location", "nothing.bin"), "not there"),
    "a weight of absurd size": (huge, "beyond any model"),
    "an operator of its own": (custom, "custom operator evil.corp"),
    "a quantisation that mixes rows": (dynamic, "quantised dynamically"),
    "a cache of absurd size": (absurd_heads, "beyond any model"),
    "no logits": (lambda m, f: drop_output(m, "logits"), "has no logits"),
    "a cache without its output": (lambda m, f: drop_output(m, "new_1.value"), "lacks the output present.1.value"),
    "an input of another kind": (extra_input, "pixels"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_graph_is_refused_in_one_line(what: str, genai: Path, tmp_path: Path) -> None:
    """Nothing outside of the folder is read, nothing is allocated, nothing is left behind."""
    folder = copied(genai, tmp_path / "model")
    change, words = HOSTILE[what]
    model = onnx.load(str(folder / "decoder.onnx"), load_external_data=False)
    change(model, folder)
    (folder / "decoder.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=words) as caught:
        import_bundle(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: shutil.rmtree(f), "not a folder"),
        (lambda f: (f / "genai_config.json").unlink(), "neither config.json nor genai_config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "decoder.onnx").unlink(), "lacks decoder.onnx"),
        (lambda f: (f / "decoder.onnx").write_bytes(b"not a graph"), "not a readable ONNX graph"),
        (lambda f: write_genai_config(f, filename="../../decoder.onnx"), "outside of its folder"),
        (lambda f: write_genai_config(f, head_size=None), "leaves the size of a head open"),
        (lambda f: write_genai_config(f, head_size=24), "cannot run the graph|is not the original"),
        (lambda f: (f / "genai_config.json").write_text('{"model": 7}', encoding="utf-8"), "describes no decoder"),
    ],
)
def test_a_folder_that_lacks_something_is_one_line(
    change: Callable[[Path], object], words: str, genai: Path, tmp_path: Path
) -> None:
    """What is missing, and where."""
    folder = copied(genai, tmp_path / "model")
    change(folder)
    with pytest.raises(ExportError, match=words) as caught:
        import_bundle(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_the_command_says_what_it_made(genai: Path, tmp_path: Path) -> None:
    """A line for each model, one for the pair, one for the bundle."""
    arguments = [str(genai), "-o", str(tmp_path / "out"), "--draft", str(genai), "--max-context", "100"]
    result = CliRunner().invoke(import_command, arguments, standalone_mode=False)
    assert result.exception is None
    target, pair, last = result.stdout.splitlines()
    assert target.startswith("target: fp32, shared cache; total variation to the graph as it came")
    assert "context 100" in target
    assert pair == "pair: they agree on 100.0% of the probability"
    assert last.startswith(f"{tmp_path / 'out'}: ")
