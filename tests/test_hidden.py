"""The output `hidden` of a target's graph, against what torch's modules are called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.errors import ExportError
from edgespec.export.fuse import add_hidden, fuse, keep_rows, tidy
from edgespec.export.half import to_half
from edgespec.export.quantize import quantize
from tests.families import CAPACITY, Family, get_family

pytestmark = pytest.mark.export

LAYERS = (0, 1)
TEXT = np.random.default_rng(5).integers(3, 900, 24)
# What makes a layer's queries, and the head, by torch's names.
MODULES = {
    "gpt2": ("transformer.h.{}.attn.c_attn", "lm_head"),
    **dict.fromkeys(("llama", "qwen3", "gemma2-eager", "olmo2"), ("model.layers.{}.self_attn.q_proj", "lm_head")),
}


def torch_hidden(family: Family, layers: tuple[int, ...]) -> np.ndarray:
    """What hooks see: shape (n, F)."""
    import torch

    seen: dict[str, np.ndarray] = {}
    model, (layer, head) = family._torch_model, MODULES[family.name]
    names = [*(layer.format(i) for i in layers), head]

    def keep(name: str) -> Any:
        return lambda module, inputs: seen.__setitem__(name, inputs[0].reshape(len(TEXT), -1).numpy())

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    with torch.no_grad():
        model(torch.from_numpy(TEXT)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.concatenate([seen[name] for name in names], -1)


def fused(family: Family) -> ir.Model:
    model, _ = fuse(family.plain.load(), family.config, CAPACITY)
    tidy(model)
    return model


def run(model: ir.Model, path: Path, calls: tuple[tuple[int, int], ...], *names: str) -> dict[str, np.ndarray]:
    """Outputs by name, of the text fed in calls of (tokens, rows kept), all rows after another."""
    import onnxruntime as ort

    ir.save(model, path, external_data="weights.data")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            length = CAPACITY if "past_len" in [i.name for i in session.get_inputs()] else 0
            dtype = np.float16 if "float16" in value.type else np.float32
            feeds[value.name] = np.zeros((1, value.shape[1], length, value.shape[3]), dtype)
    outputs, start = [o.name for o in session.get_outputs()], 0
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for count, kept in calls:
        sizes: dict[str, Any] = {"input_ids": TEXT[None, start : start + count]}
        sizes |= {"past_len": np.array([start]), "keep": np.array([kept])}
        sizes |= {"attention_mask": np.ones((1, start + count), np.int64)}
        sizes |= {"position_ids": np.arange(start, start + count)[None]}
        feeds |= {i.name: sizes[i.name] for i in session.get_inputs() if i.name in sizes}
        made = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        feeds |= {n.replace("present", "past_key_values"): a for n, a in made.items() if n.startswith("present.")}
        for name in names:
            found[name].append(made[name][0])
        start += count
    return {name: np.concatenate(rows) for name, rows in found.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_it_is_what_torch_multiplies(name: str, tmp_path: Path) -> None:
    """Read, decoded and verified rows; only the last `keep` of each call; the logits stay the same to the last bit."""
    family, calls = get_family(name), ((14, 3), (1, 1), (5, 5), (4, 2))
    logits = run(fused(family), tmp_path / "plain.onnx", calls, "logits")["logits"]
    model = fused(family)
    width = add_hidden(model, LAYERS)
    found = run(model, tmp_path / "model.onnx", calls, "logits", "hidden")
    kept = [11, 12, 13, 14, 15, 16, 17, 18, 19, 22, 23]
    expected = torch_hidden(family, LAYERS)[kept]
    assert found["hidden"].shape == (len(kept), width)
    np.testing.assert_allclose(found["hidden"], expected, atol=2e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(found["logits"], logits)


def test_a_growing_graph_has_it_too(tmp_path: Path) -> None:
    """Where attention is not fused, the layer is found from its cache's input."""
    family, calls = get_family("qwen3"), ((14, 3), (1, 1), (5, 5), (4, 2))
    model = family.plain.load()
    assert keep_rows(model)
    tidy(model)
    add_hidden(model, (1, 0))
    found = run(model, tmp_path / "model.onnx", calls, "hidden")["hidden"]
    expected = torch_hidden(family, (1, 0))[[11, 12, 13, 14, 15, 16, 17, 18, 19, 22, 23]]
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_it_survives_rounding(bits: int, tmp_path: Path) -> None:
    """Quantised and half graphs keep the output, near to the original's; their logits are those without it,
    to the last bit but for half precision."""
    rows: list[dict[str, np.ndarray]] = []
    for has_hidden in (False, True):
        model = fused(get_family("llama"))
        if has_hidden:
            add_hidden(model, LAYERS)
        if bits == 16:
            to_half(model)
        else:
            quantize(model, bits, 32)  # type: ignore[arg-type]
        names = ("logits", "hidden") if has_hidden else ("logits",)
        rows.append(run(model, tmp_path / f"{has_hidden}.onnx", ((24, 24),), *names))
    # A processor computes float16 in float32 and rounds where a value is looked at.
    np.testing.assert_allclose(rows[0]["logits"], rows[1]["logits"], rtol=0, atol=0.01 if bits == 16 else 0)
    expected = torch_hidden(get_family("llama"), LAYERS)
    error = np.abs(rows[1]["hidden"] - expected).mean() / np.abs(expected).mean()
    assert error < {4: 0.4, 8: 0.03, 16: 0.01}[bits]
    assert rows[1]["hidden"].dtype == (np.float16 if bits == 16 else np.float32)


def test_what_is_not_there_is_refused() -> None:
    """A layer that the model does not have: one line."""
    with pytest.raises(ExportError, match="layer 7 was not found"):
        add_hidden(fused(get_family("llama")), (0, 7))
