"""Half precision, for GPUs: the graph's types, and that it still is the model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.bundle import read_bundle
from edgespec.export import export_bundle
from edgespec.export.half import to_half
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.export_models import save_llama, torch_logits, total_variation
from tests.families import CAPACITY, get_family

pytestmark = pytest.mark.export


def test_an_export_in_half_precision_runs_and_is_the_model(tmp_path: Path) -> None:
    """Cache and weights are float16, logits float32, and the text is that of the original."""
    llama = save_llama(tmp_path / "llama")
    report = export_bundle(str(llama), tmp_path / "out", precision="fp16")
    target = read_bundle(report.path).manifest.target
    assert (target.precision, target.block_size, target.cache) == ("fp16", None, "shared")
    tokens = np.random.default_rng(1).integers(0, 259, 50)
    path = report.path / target.path
    with closing(DecoderSession(path, context_length=512, runtime=RuntimeParams())) as session:
        assert set(session.cache_types().values()) == {"float16"}
        found = [session.forward(tokens[:40], 40).copy()]
        session.forward(tokens[:5], 5)
        session.rewind(40)
        found.append(session.forward(tokens[40:], 10).copy())
    assert total_variation(np.concatenate(found), torch_logits(llama, tokens)).mean() < 5e-3
    single = export_bundle(str(llama), tmp_path / "single", precision="fp32")
    assert report.size < 0.7 * single.size


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "qwen2-mixed"])
def test_no_float32_is_left_but_the_logits(name: str, tmp_path: Path) -> None:
    """In any family: weights, constants, casts and cache."""
    from edgespec.export.fuse import fuse, tidy

    family = get_family(name)
    model, _ = fuse(family.plain.load(), family.config, CAPACITY)
    tidy(model)
    assert to_half(model) > 10
    assert not [v for v in model.graph.initializers.values() if v.dtype is ir.DataType.FLOAT]
    assert not [v for v in model.graph.inputs if v.dtype is ir.DataType.FLOAT]
    assert [v.name for v in model.graph.outputs if v.dtype is ir.DataType.FLOAT] == ["logits"]
    ir.save(model, tmp_path / "model.onnx")
    tokens = np.random.default_rng(1).integers(3, 1000, 40)
    with closing(DecoderSession(tmp_path / "model.onnx", context_length=90, runtime=RuntimeParams())) as session:
        found = session.forward(tokens, 40)
        assert total_variation(found, family.torch_logits(tokens)).mean() < 2e-2
