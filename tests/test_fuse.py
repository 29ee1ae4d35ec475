"""The fusing pass against torch, on tiny random models of many families, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.export.fuse import FuseReport, NoMatch, fuse, tidy
from tests.families import CAPACITY, VOCAB, SharedCacheRunner, get_family, largest_difference, parity_steps

pytestmark = pytest.mark.export

#: Families fused from optimum's own file instead of the product's tracing, as somebody else may have made it.
BY_OPTIMUM = ("llama", "gemma2-eager", "gpt2-eager", "phi3-window")
#: family -> (rotary folded, q, k and v packed, windows, soft cap)
EXPECTED: dict[str, tuple[bool, bool, tuple[int | None, ...], float]] = {
    "llama": (True, True, (None, None), 0),
    "llama-wide-heads": (True, True, (None, None), 0),
    "llama3": (True, True, (None, None), 0),
    "mistral-window": (True, True, (16, 16), 0),
    "qwen2-mixed": (True, True, (None, 16), 0),
    "qwen3": (True, False, (None, None), 0),
    "gemma": (True, True, (None, None), 0),
    "gemma2-eager": (True, True, (16, None), 2),
    "gemma3": (True, False, (None, 16), 0),
    "phi": (False, False, (None, None), 0),
    "phi-half": (True, True, (None, None), 0),
    "phi3-window": (True, True, (16, 16), 0),
    "gpt2": (False, True, (None, None), 0),
    "gpt2-eager": (False, True, (None, None), 0),
    "gpt_neox-half": (True, True, (None, None), 0),
    "opt": (False, False, (None, None), 0),
    "bloom": (False, True, (None, None), 0),
    "smollm3": (True, True, (None, None), 0),
    "falcon": (True, True, (None, None), 0),
    "gptj": (False, False, (None, None), 0),
    "glm": (True, True, (None, None), 0),
    "granite": (True, True, (None, None), 0),
    "olmo2": (True, False, (None, None), 0),
    "stablelm-half": (True, True, (None, None), 0),
}


def fused(name: str, folder: Path) -> tuple[Path, FuseReport, ir.Model]:
    """Fuse and tidy a family for `CAPACITY` - 1 tokens and write it to `folder`."""
    family = get_family(name)
    source = family.onnx if name in BY_OPTIMUM else family.plain.load()
    model, report = fuse(source, family.config, CAPACITY - 1)
    tidy(model)
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return path, report, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused tiny llama."""
    return fused("llama", tmp_path_factory.mktemp("llama"))[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_family_is_fused_and_equals_torch(name: str, tmp_path: Path) -> None:
    """Prefill, decode, verify, rollback and decode give torch's logits, and the report says what was done."""
    path, report, _ = fused(name, tmp_path)
    assert (report.rotary_folded, report.qkv_packed, report.windows) == EXPECTED[name][:3]
    assert report.softcap == pytest.approx(EXPECTED[name][3], rel=1e-4)
    worst, agrees = largest_difference(get_family(name), SharedCacheRunner(path))
    assert worst < 1e-4
    assert agrees


def test_a_window_wider_than_short_texts_is_found(tmp_path: Path) -> None:
    """A window that only a text near the end of the context leaves is found, and right on such a text."""
    path, report, _ = fused("mistral-far-window", tmp_path)
    assert report.windows == (64, 64)
    assert largest_difference(get_family("mistral-far-window"), SharedCacheRunner(path), prefill=80)[0] < 1e-4


def change_attention(path: Path, folder: Path, **attributes: float) -> SharedCacheRunner:
    """Return a runner of the graph at `path` with other attributes of its attention operators."""
    model = ir.load(path)
    changed = 0
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            changed += 1
            for key, value in attributes.items():
                node.attributes[key] = ir.convenience.convert_attribute(key, value)
    assert changed == 2
    ir.save(model, folder / "changed.onnx")
    return SharedCacheRunner(folder / "changed.onnx")


@pytest.mark.parametrize("window", [15, 17, -1])
def test_parity_detects_a_wrong_window(window: int, tmp_path: Path) -> None:
    """A window that is off by one, or missing, fails the comparison by far: the parity test can fail."""
    path, _, _ = fused("mistral-window", tmp_path)
    runner = change_attention(path, tmp_path, local_window_size=window)
    assert largest_difference(get_family("mistral-window"), runner)[0] > 0.1


def test_parity_detects_a_wrong_scale(tmp_path: Path) -> None:
    """The operator's default scale, where the model has its own, fails the comparison."""
    path, _, _ = fused("granite", tmp_path)
    runner = change_attention(path, tmp_path, scale=0.25)
    assert largest_difference(get_family("granite"), runner)[0] > 0.01


def test_parity_detects_a_missing_soft_cap(tmp_path: Path) -> None:
    """Attention without its soft cap fails the comparison."""
    path, _, _ = fused("gemma2-eager", tmp_path)
    runner = change_attention(path, tmp_path, softcap=0.0)
    assert largest_difference(get_family("gemma2-eager"), runner)[0] > 0.01


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama-head-20", "head size 20 is not a multiple of 8"),
        ("phi3-longrope", "rope type longrope changes with the length beyond 64 tokens"),
        ("gemma2", "layer 0: the export lost the attention soft cap of 50"),
    ],
)
def test_what_the_operator_or_the_export_cannot_do_is_refused(name: str, reason: str) -> None:
    """A head size, rope or lost soft cap that would give wrong answers is refused with its reason."""
    family = get_family(name)
    with pytest.raises(NoMatch, match=reason):
        fuse(family.onnx, family.config, CAPACITY)


def test_long_rope_within_its_original_length_is_accepted() -> None:
    """The same rope is constant up to the original length, so a context that short is fused."""
    family = get_family("phi3-longrope")
    assert fuse(family.onnx, family.config, 64)[1].rotary_folded


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 16}, "lost the sliding window of 16"),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, "layer 1: .* window of None"),
        ({"attn_logit_softcapping": 30.0}, "layer 0: the export lost the attention soft cap of 30"),
    ],
)
def test_a_graph_that_contradicts_its_configuration_is_refused(changes: dict[str, object], reason: str) -> None:
    """Windows and soft caps that the configuration promises and the graph lacks are refused."""
    family = get_family("llama")
    with pytest.raises(NoMatch, match=reason):
        fuse(family.onnx, {**family.config, **changes}, CAPACITY)


def test_a_window_wider_than_the_context_does_not_matter() -> None:
    """A window that no text of this length can leave is not asked of the graph."""
    family = get_family("llama")
    assert fuse(family.onnx, {**family.config, "sliding_window": 4096}, CAPACITY)[1].windows == (None, None)


def spoil(graph: ir.Graph, value: ir.Value, op_type: str, number: float) -> None:
    """Insert an operation with a constant between `value` and those who use it."""
    users = list(value.uses())
    constant = ir.node("Constant", [], {"value": ir.tensor(np.float32(number))})
    node = ir.node(op_type, [value, constant.outputs[0]])
    constant.outputs[0].name, node.outputs[0].name = "spoil.number", "spoil.result"
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])
    graph.insert_after(value.producer(), [constant, node])


def of_layer(graph: ir.Graph, index: int, op_type: str, which: int = 0) -> ir.Node:
    """Return one of the attention nodes of a type in a layer."""
    found = [n for n in graph if n.op_type == op_type and f"layers.{index}/self_attn" in (n.name or "")]
    return found[which]


SPOILERS: dict[str, Callable[[ir.Graph], None]] = {
    "weights scaled after the softmax": lambda g: spoil(g, of_layer(g, 1, "Softmax").outputs[0], "Mul", 0.5),
    "scores clipped": lambda g: spoil(g, of_layer(g, 1, "MatMul", 3).outputs[0], "Min", 0.5),
    "results shifted": lambda g: spoil(g, of_layer(g, 1, "MatMul", 4).outputs[0], "Add", 0.5),
    "another softmax axis": lambda g: of_layer(g, 1, "Softmax").attributes.add(ir.AttrInt64("axis", 1)),
    "cache put together the other way": lambda g: swap_inputs(
        next(v for v in g.outputs if v.name == "present.1.key").producer()
    ),
}


def swap_inputs(node: ir.Node) -> None:
    """Exchange the first two inputs of a node."""
    first, second = node.inputs[:2]
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


@pytest.mark.parametrize("what", SPOILERS)
def test_anything_unknown_in_one_layer_refuses_the_model(what: str, tmp_path: Path) -> None:
    """One layer whose attention does something else is named, and nothing is fused by half."""
    family = get_family("llama")
    model = ir.load(family.onnx)
    SPOILERS[what](model.graph)
    ir.save(model, tmp_path / "spoilt.onnx")
    with pytest.raises(NoMatch) as caught:
        fuse(tmp_path / "spoilt.onnx", family.config, CAPACITY)
    assert caught.value.layer == 1


def test_weights_beside_the_graph_are_found(tmp_path: Path) -> None:
    """A source whose weights are in a file of their own is fused just as well."""
    family = get_family("mistral-window")
    external = tmp_path / "source" / "model.onnx"
    external.parent.mkdir()
    ir.save(ir.load(family.onnx), external, external_data="weights.bin", size_threshold_bytes=0)
    model, _ = fuse(external, family.config, CAPACITY)
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    assert largest_difference(family, SharedCacheRunner(tmp_path / "model.onnx"))[0] < 1e-4


def test_only_the_last_rows_are_computed(llama: Path) -> None:
    """`keep` gives the last rows of what all rows would be."""
    tokens = np.arange(3, 23, dtype=np.int64)
    whole = SharedCacheRunner(llama)(tokens, 0, 20)
    for keep in (1, 3, 20):
        rows = SharedCacheRunner(llama)(tokens, 0, keep)
        assert rows.shape == (keep, VOCAB)
        np.testing.assert_allclose(rows, whole[-keep:], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2", "bloom"])
def test_a_padding_row_may_lie_past_the_end(name: str, tmp_path: Path) -> None:
    """With all but one place taken, a call of two rows still gives the right logits for the first of them."""
    path, report, _ = fused(name, tmp_path)
    assert report.max_len in (CAPACITY - 1, None)
    runner = SharedCacheRunner(path)
    tokens = np.random.default_rng(5).integers(3, VOCAB, CAPACITY).astype(np.int64)
    runner(tokens[: CAPACITY - 2], 0, 1)
    found = runner(tokens[CAPACITY - 2 :], CAPACITY - 2, 2)[0]
    expected = get_family(name).torch_logits(tokens[: CAPACITY - 1])[-1]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_parity_steps_cover_rollback(llama: Path) -> None:
    """The comparison itself goes through all five steps, the second verification with other tokens."""
    steps = list(parity_steps(get_family("llama"), SharedCacheRunner(llama)))
    assert [name for name, _, _ in steps] == ["prefill", "decode", "verify", "rollback", "decode again"]
    assert np.abs(steps[2][2][2:] - steps[3][2][:3]).max() > 0.5
