"""`edgespec export` from end to end on a tiny random llama, with torch as the oracle."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from edgespec.bundle import Bundle, ModelInfo, read_bundle
from edgespec.cli.export import export_command
from edgespec.errors import ConfigError, ExportError, IncompatibleDraftError
from edgespec.export import check as check_module
from edgespec.export import export_bundle
from edgespec.export import graph as graph_module
from edgespec.export import pipeline as pipeline_module
from edgespec.export.fuse import NoMatch
from edgespec.export.progress import SilentProgress
from edgespec.export.source import read_folder
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.export_models import PADDED_VOCAB, save_llama, torch_logits, total_variation

pytestmark = pytest.mark.export

TOKENS = np.random.default_rng(5).integers(0, 259, 90)


class Recorder(SilentProgress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with a tied head. Read only."""
    return save_llama(tmp_path_factory.mktemp("export") / "tiny-llama")


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Recorder]:
    """An fp32 target with an int4 draft of the same weights, both checked; and what was said on the way."""
    progress = Recorder()
    out = tmp_path_factory.mktemp("bundles") / "pair"
    export_bundle(str(llama), out, draft=str(llama), precision="fp32", draft_precision="int4", progress=progress)
    return read_bundle(out), progress


def session_logits(bundle: Bundle, model: ModelInfo, tokens: np.ndarray) -> np.ndarray:
    """Prompt of 40, then five at a time with a rejected row in between, then one by one."""
    path = bundle.path / model.path
    rows = []
    with closing(DecoderSession(path, context_length=model.context_length, runtime=RuntimeParams())) as session:
        rows.append(session.forward(tokens[:40], 40).copy())
        for at in range(40, 80, 5):
            session.forward(tokens[:2], 2)
            session.rewind(at)
            rows.append(session.forward(tokens[at : at + 5], 5).copy())
        rows += [session.forward(tokens[at : at + 1], 1).copy() for at in range(80, len(tokens))]
    return np.concatenate(rows)


def test_the_fp32_target_is_the_original(pair: tuple[Bundle, Recorder], llama: Path) -> None:
    """Reading, verifying after a rollback and decoding give torch's logits to rounding."""
    bundle, _ = pair
    found = session_logits(bundle, bundle.manifest.target, TOKENS)
    np.testing.assert_allclose(found, torch_logits(llama, TOKENS), atol=2e-4)


def test_the_int4_draft_is_near_the_original_and_not_it(pair: tuple[Bundle, Recorder], llama: Path) -> None:
    """Rounded weights, the same model."""
    bundle, _ = pair
    draft = bundle.manifest.draft
    assert draft is not None
    distance = total_variation(session_logits(bundle, draft, TOKENS), torch_logits(llama, TOKENS)).mean()
    assert 1e-3 < distance < 0.35


def test_the_manifest_says_what_was_made(pair: tuple[Bundle, Recorder]) -> None:
    """Dimensions, precision, provenance, end token, and every figure of the check, as numbers."""
    manifest = pair[0].manifest
    target, draft = manifest.target, manifest.draft
    assert draft is not None
    assert (target.cache, target.num_layers, target.num_kv_heads, target.head_dim) == ("shared", 2, 2, 16)
    assert (target.vocab_size, target.context_length) == (PADDED_VOCAB, 512)
    assert (target.precision, target.block_size, draft.precision, draft.block_size) == ("fp32", None, "int4", 128)
    assert manifest.eos_token_ids == (2,)
    assert manifest.chat_template == "chat_template.jinja"
    assert target.source == "folder tiny-llama"
    assert target.row_invariance in (">=2", "even", "none")
    check = json.loads(json.dumps(manifest.check))
    assert check["target"]["mean_tv"] < 1e-4 < check["draft"]["mean_tv"]
    assert check["target"]["perplexity"] == pytest.approx(check["target"]["original_perplexity"], rel=1e-3)
    assert check["draft_quantization"] == {"num_quantized": 11, "kept_fp32": [], "embedding": "shared"}
    assert check["pair_overlap"] == pytest.approx(1 - check["draft"]["mean_tv"], abs=0.01)


def test_the_weights_lie_beside_the_graph(pair: tuple[Bundle, Recorder]) -> None:
    """The graph itself stays small, and the tokenizer is the model's."""
    path = pair[0].path
    for role in ("target", "draft"):
        names = {
            tensor.data_location
            for tensor in onnx.load(path / role / "model.onnx", load_external_data=False).graph.initializer
            if np.prod(tensor.dims) > 4096
        }
        assert names == {onnx.TensorProto.EXTERNAL}
    assert Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size() == 259


def test_one_source_for_both_is_converted_once(pair: tuple[Bundle, Recorder]) -> None:
    """The same weights in two precisions cost one conversion."""
    steps = pair[1].steps
    assert sum("converting" in step for step in steps) == 1
    assert sum("quantising" in step for step in steps) == 1
    assert pair[1].warnings == []


def test_int8_is_closer_than_int4_and_nothing_is_left_over(llama: Path, tmp_path: Path) -> None:
    """auto is int8 for a small model, in blocks of 128 by default."""
    report = export_bundle(str(llama), tmp_path / "int8", max_context=100)
    target = read_bundle(report.path).manifest.target
    assert (target.precision, target.block_size, target.context_length) == ("int8", 128, 100)
    assert report.manifest.check["target"]["mean_tv"] < 0.05
    assert report.peak_memory is None or report.peak_memory > 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_an_untied_model_and_a_smaller_draft_make_a_pair(tmp_path: Path, llama: Path) -> None:
    """Vocabularies of different width with the same tokens are compatible, and a separate head is quantised."""
    other = save_llama(tmp_path / "small", seed=3, tie_word_embeddings=False, num_hidden_layers=1, vocab_size=259)
    report = export_bundle(str(llama), tmp_path / "out", precision="int4", block_size=128, draft=str(other))
    draft = report.manifest.draft
    assert draft is not None
    assert (draft.vocab_size, draft.num_layers, draft.precision) == (259, 1, "int8")
    assert report.manifest.check["draft_quantization"]["embedding"] == "own"
    found = session_logits(read_bundle(tmp_path / "out"), draft, TOKENS)
    assert total_variation(found, torch_logits(other, TOKENS)).mean() < 0.05


def test_a_model_that_cannot_be_fused_keeps_a_growing_cache_and_says_so(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing, with layer and reason in the warning, and the same logits."""

    def fuse(*args: object) -> None:
        raise NoMatch("an odd mask", layer=1)

    monkeypatch.setattr(graph_module, "fuse", fuse)
    progress = Recorder()
    report = export_bundle(str(llama), tmp_path / "out", precision="fp32", progress=progress)
    assert report.manifest.target.cache == "growing"
    assert any("layer 1" in line and "odd mask" in line for line in report.warnings)
    assert progress.warnings == report.warnings
    found = session_logits(read_bundle(tmp_path / "out"), report.manifest.target, TOKENS)
    np.testing.assert_allclose(found, torch_logits(llama, TOKENS), atol=2e-4)


def test_an_unfused_graph_stays_inside_a_window_that_nobody_checked(llama: Path, tmp_path: Path) -> None:
    """The export may have lost it, and the check text is shorter than it."""
    source = replace(read_folder(llama, tmp_path, "tests"), config={"sliding_window": 450})
    said: list[str] = []
    assert graph_module._limit_to_window(source, 500, said.append) == 450
    assert "sliding window of 450" in said[0]
    assert graph_module._limit_to_window(source, 449, said.append) == 449
    checked = replace(source, config={"sliding_window": 16})
    assert graph_module._limit_to_window(checked, 500, said.append) == 500
    assert len(said) == 1


def test_a_draft_with_other_tokens_is_refused_before_any_work(llama: Path, tmp_path: Path) -> None:
    """The first tokens that differ are named, and nothing is written."""
    other = save_llama(tmp_path / "other", num_hidden_layers=1)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|theend|>"), encoding="utf-8")
    progress = Recorder()
    with pytest.raises(IncompatibleDraftError, match=r"0: '<\|endoftext\|>' against '<\|theend\|>'"):
        export_bundle(str(llama), tmp_path / "out", draft=str(other), progress=progress)
    assert not any("converting" in step for step in progress.steps)
    assert not (tmp_path / "out").exists()


def fails_after_conversion(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the step that saves the fused graph fail."""

    def save_graph(model: object, folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(graph_module, "save_graph", save_graph)


def test_ctrl_c_midway_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the conversion, with gigabytes on the disk in real life."""
    fails_after_conversion(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_midway_leaves_nothing_but_a_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the destination."""
    fails_after_conversion(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ExportError, match=r"out is full.*make room"):
        export_bundle(str(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_is_another_model_fails_the_export(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight of the fused graph changed: the check finds it, and no bundle is written."""
    real: Callable[..., Any] = graph_module.tidy

    def tidy(model: Any) -> None:
        real(model)
        weight = next(v for v in model.graph.initializers.values() if tuple(v.shape or ()) == (96, 64))
        import onnx_ir as ir

        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1.05), name=weight.name)

    monkeypatch.setattr(graph_module, "tidy", tidy)
    with pytest.raises(ExportError, match="not the original model"):
        export_bundle(str(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_that_optimum_does_not_know_is_one_line(llama: Path, tmp_path: Path) -> None:
    """Not a traceback out of three libraries."""
    folder = save_llama(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "martian"}), encoding="utf-8")
    with pytest.raises(ExportError, match="martian") as caught:
        export_bundle(str(folder), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_it_made_and_what_it_measured(llama: Path, tmp_path: Path) -> None:
    """Path, size, figures, memory and time; a line per step where there is no terminal."""
    arguments = [str(llama), "-o", str(tmp_path / "out"), "--precision", "int4", "--block-size", "32"]
    result = CliRunner().invoke(export_command, arguments, standalone_mode=False)
    assert result.exception is None
    target, last = result.stdout.splitlines()
    assert target.startswith("target: int4 in blocks of 32; total variation")
    assert last.startswith(f"{tmp_path / 'out'}: 0 MB in ")
    assert any(line.startswith("converting tiny-llama to ONNX") for line in result.stderr.splitlines())
    again = CliRunner().invoke(export_command, arguments, standalone_mode=False)
    assert isinstance(again.exception, ExportError)
    assert "--force" in str(again.exception)


def test_too_long_a_context_is_refused(llama: Path, tmp_path: Path) -> None:
    """The model was not made for it."""
    with pytest.raises(ConfigError, match="513"):
        export_bundle(str(llama), tmp_path / "out", max_context=513)


@pytest.mark.parametrize("value", [float("nan"), 0.2])
def test_a_figure_beyond_its_limit_or_not_a_number_fails(value: float, pair: tuple[Bundle, Recorder]) -> None:
    """NaN must not slip through a comparison."""
    good = check_module.Figures(**pair[0].manifest.check["target"])
    check_module._enforce(good, check_module.LIMITS["fp32"], Path("target/model.onnx"))
    for name in ("mean_tv", "max_tv", "decode_tv", "verify_tv", "rollback_tv"):
        with pytest.raises(ExportError, match="target"):
            bad = replace(good, **{name: value})
            check_module._enforce(bad, check_module.LIMITS["fp32"], Path("target/model.onnx"))


def test_the_api_is_the_pipelines() -> None:
    """The lazy names of the package lead to the real ones."""
    assert export_bundle is pipeline_module.export_bundle
