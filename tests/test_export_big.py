"""What an export does for large models: weights one at a time, a part checked in fp32, going on after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.bundle import read_bundle
from edgespec.cli.export import summary
from edgespec.errors import ExportError
from edgespec.export import export_bundle
from edgespec.export import options as options_module
from edgespec.export.options import layers_to_check
from edgespec.export.progress import SilentProgress
from edgespec.export.reference import compute_reference
from edgespec.export.skeleton import find_weights, make_skeleton
from edgespec.export.source import read_folder
from edgespec.export.weights import Checkpoint
from tests.export_models import save_llama, torch_logits

pytestmark = pytest.mark.export


class Recorder(SilentProgress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers. Read only."""
    return save_llama(tmp_path_factory.mktemp("big") / "llama", num_hidden_layers=5)


def write(file: Path, **weights: Any) -> Path:
    from safetensors.torch import save_file

    save_file(weights, file)
    return file.parent


def test_weights_of_every_float_type_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """Brain floats, halves and doubles come out in float32."""
    import torch

    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    types = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16, "d": torch.float64}
    write(tmp_path / "model.safetensors", **{name: weight.to(kind) for name, kind in types.items()})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.num_parameters == 4 * 35
    for name, kind in types.items():
        found = checkpoint.read(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, weight.to(kind).float().numpy())


def test_an_index_names_the_files_that_count(tmp_path: Path) -> None:
    """Shards are read, a second copy of the model beside them is not."""
    import torch

    write(tmp_path / "model-1.safetensors", a=torch.ones(2))
    write(tmp_path / "consolidated.safetensors", a=torch.zeros(2), b=torch.zeros(9))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}), encoding="utf-8")
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint) == ["a"]
    assert checkpoint.read("a").tolist() == [1, 1]
    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}), encoding="utf-8")
    with pytest.raises(ExportError, match="lacks"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (70).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(70),
        (70).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'.ljust(70) + bytes(4),
    ],
)
def test_a_damaged_weight_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    """No header, one without end, one of another kind, data outside, data of another size."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ExportError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    """Integers are no weights: somebody rounded them already, in a way of his own."""
    import torch

    write(tmp_path / "model.safetensors", a=torch.ones(2, dtype=torch.int8))
    with pytest.raises(ExportError, match="a is stored as I8"):
        Checkpoint(tmp_path).read("a")


def test_the_original_runs_with_one_weight_at_a_time(llama: Path, tmp_path: Path) -> None:
    """Streaming gives torch's logits, and no parameter stays in memory."""
    source = read_folder(llama, tmp_path, "tests")
    tokens = np.arange(3, 43)
    found = compute_reference(source, tokens, tmp_path / "rows.npy").logits
    np.testing.assert_allclose(found, torch_logits(llama, tokens), atol=1e-5)
    assert all(parameter.is_meta for parameter in make_skeleton(llama).parameters())


def test_a_weight_that_is_missing_or_of_another_shape_is_named(llama: Path, tmp_path: Path) -> None:
    """Before anything is traced."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ExportError, match=r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        find_weights(make_skeleton(llama), Checkpoint(write(tmp_path / "model.safetensors", **weights)))
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ExportError, match=r"has the shape \[3, 3\]"):
        find_weights(make_skeleton(llama), Checkpoint(write(tmp_path / "model.safetensors", **weights)))


def test_weights_without_the_decoders_prefix_are_found(llama: Path, tmp_path: Path) -> None:
    """Checkpoints of the bare decoder leave `model.` out."""
    from safetensors.torch import load_file

    weights = load_file(llama / "model.safetensors")
    bare = {name.removeprefix("model."): weight for name, weight in weights.items()}
    found = find_weights(make_skeleton(llama), Checkpoint(write(tmp_path / "model.safetensors", **bare)))
    assert found["model.norm.weight"] == "norm.weight"


def test_weights_under_earlier_names_are_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model's class says how they were called, as transformers reads them when it is told the same."""
    import shutil

    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    mapping = {r"^model\.blocks\.(?!odd)": "model.layers.", "^output": "lm_head"}
    folder = shutil.copytree(llama, tmp_path / "old")
    weights = load_file(llama / "model.safetensors")
    old = {name.replace("layers", "blocks"): weight for name, weight in weights.items()}
    write(folder / "model.safetensors", **old)
    with pytest.raises(ExportError, match="lacks the weight"):
        find_weights(make_skeleton(folder), Checkpoint(folder))
    monkeypatch.setattr(LlamaForCausalLM, "_checkpoint_conversion_mapping", mapping)
    tokens = np.arange(3, 43)
    found = compute_reference(read_folder(folder, tmp_path, "tests"), tokens, tmp_path / "rows.npy").logits
    model = AutoModelForCausalLM.from_pretrained(folder, key_mapping=mapping, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(found, torch_logits(llama, tokens), atol=1e-5)


def test_the_checked_layers_cover_every_kind() -> None:
    """Of a large model, as many of the first layers as show every kind that the configuration lists."""
    large = 10**9
    assert layers_to_check({"num_hidden_layers": 24}, 10**8) is None
    assert layers_to_check({"num_hidden_layers": 24}, large) == 3
    assert layers_to_check({"num_hidden_layers": 2}, large) is None
    kinds = ["sliding"] * 5 + ["full"] + ["sliding"] * 6
    assert layers_to_check({"num_hidden_layers": 12, "layer_types": kinds}, large) == 6
    assert layers_to_check({"n_layer": 12}, large) == 3


def test_a_large_model_is_checked_in_part_and_exported_whole(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers tightly in fp32, all of them in the final precision; the manifest says so."""
    monkeypatch.setattr(options_module, "_RUN_WHOLE", 0)
    progress = Recorder()
    report = export_bundle(str(llama), tmp_path / "out", precision="int8", progress=progress)
    check = report.manifest.check
    assert check["target_fp32"]["layers"] == 3
    assert check["target_fp32"]["mean_tv"] < 1e-4
    assert report.manifest.target.num_layers == 5
    assert check["target"]["mean_tv"] < 0.1
    assert sum("converting" in step for step in progress.steps) == 2
    fp32 = export_bundle(str(llama), tmp_path / "fp32", precision="fp32")
    assert fp32.manifest.check["target"]["mean_tv"] < 1e-4
    assert "layers" not in fp32.manifest.check["target"]


def test_target_and_draft_of_the_same_weights_share_their_files(llama: Path, tmp_path: Path) -> None:
    """The same model in the same precision is stored once, and the command's closing lines say of both the same."""
    report = export_bundle(str(llama), tmp_path / "out", draft=str(llama))
    assert report.manifest.draft == report.manifest.target
    assert not (tmp_path / "out" / "draft").exists()
    assert any("share their files" in line for line in report.warnings)
    target, draft, *_ = summary(report)
    assert target.removeprefix("target") == draft.removeprefix("draft")
    read_bundle(tmp_path / "out")


KILLED = """
import os, sys
from pathlib import Path
from edgespec.export import export_bundle, steps
steps.quantize_graph = lambda *arguments: os._exit(9)
export_bundle(sys.argv[1], Path(sys.argv[2]), max_context=int(sys.argv[3]))
"""


@pytest.mark.parametrize(("context", "resumes"), [(128, True), (100, False)])
def test_a_killed_export_is_taken_up_where_it_was(llama: Path, tmp_path: Path, context: int, resumes: bool) -> None:
    """Finished steps are not done again; with another option they are, and either way nothing is left over."""
    arguments = [sys.executable, "-c", KILLED, str(llama), str(tmp_path / "out"), "128"]
    assert subprocess.run(arguments, capture_output=True, check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.edgespec-")
    if not resumes:  # as where the killed export had a draft and this one has none
        (left / "bundle" / "draft").mkdir()
        (left / "bundle" / "draft" / "model.onnx").touch()
    progress = Recorder()
    report = export_bundle(str(llama), tmp_path / "out", max_context=context, progress=progress)
    assert any("converting" in step for step in progress.steps) is not resumes
    assert any("was killed" in line for line in progress.notes) is resumes
    assert report.manifest.target.context_length == context
    assert report.manifest.check["target"]["mean_tv"] < 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [name for name in read_bundle(tmp_path / "out").manifest.files if name.startswith("draft")]
