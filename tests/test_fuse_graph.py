"""The fused graph itself: its contract, its rope tables, and the passes that also work on other graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.export.fuse import fuse, gemm_to_matmul, keep_rows, tidy, untie_head
from edgespec.export.fuse.tidy import drop_casts, fold_norms
from tests.families import CAPACITY, get_family

pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def llama() -> ir.Model:
    """A fused and tidied tiny llama, not saved. Read only."""
    family = get_family("llama")
    model, _ = fuse(family.onnx, family.config, CAPACITY)
    tidy(model)
    return model


def dims(value: ir.Value) -> list[int | str]:
    """Return a shape as numbers and names."""
    return [d if isinstance(d, int) else d.value for d in value.shape]


def test_inputs_and_outputs_are_the_contract(llama: ir.Model) -> None:
    """Names, types and dimensions are what a session of the shared cache expects, and nothing else is left."""
    inputs = {v.name: v for v in llama.graph.inputs}
    caches = {f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value")}
    assert set(inputs) == {"input_ids", "past_len", "keep"} | caches
    assert all(inputs[name].dtype == ir.DataType.INT64 for name in ("input_ids", "past_len", "keep"))
    assert dims(inputs["past_len"]) == dims(inputs["keep"]) == [1]
    assert dims(inputs["past_key_values.1.value"]) == [1, 2, "capacity", 16]
    outputs = {v.name: dims(v) for v in llama.graph.outputs}
    assert next(iter(outputs)) == "logits"
    assert outputs["logits"] == [1, "keep", 1000]
    assert outputs["present.1.value"] == [1, 2, "capacity", 16]


def test_attention_sets_every_attribute(llama: ir.Model) -> None:
    """Scale, soft cap and window are written, never left to the operator's defaults."""
    nodes = [n for n in llama.graph if n.op_type == "GroupQueryAttention"]
    assert len(nodes) == 2
    for node in nodes:
        assert node.domain == "com.microsoft"
        found = {key: attribute.value for key, attribute in node.attributes.items()}
        assert found == {
            "num_heads": 4,
            "kv_num_heads": 2,
            "scale": 0.25,
            "softcap": 0.0,
            "local_window_size": -1,
            "do_rotary": 1,
            "rotary_interleaved": 0,
        }
    assert llama.graph.opset_imports["com.microsoft"] == 1


def test_rope_tables_are_the_formula(llama: ir.Model) -> None:
    """One pair of tables for all layers: cosine and sine of position * 10000^(-2i/16), one row to spare."""
    nodes = [n for n in llama.graph if n.op_type == "GroupQueryAttention"]
    assert nodes[0].inputs[7] is nodes[1].inputs[7]
    cos, sin = (nodes[0].inputs[i].const_value.numpy() for i in (7, 8))
    assert cos.shape == sin.shape == (CAPACITY + 1, 8)
    angle = np.arange(CAPACITY + 1)[:, None] * 10000.0 ** (-2 * np.arange(8) / 16)
    np.testing.assert_allclose(cos, np.cos(angle), atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angle), atol=2e-5)


def test_mask_shape_and_rope_arithmetic_is_gone(llama: ir.Model) -> None:
    """What is left of a llama layer is its norms, products, attention and activation."""
    count = Counter(node.op_type for node in llama.graph)
    assert count["SimplifiedLayerNormalization"] == 5
    assert count["MatMul"] == 2 * (1 + 1 + 3) + 1
    assert not {"Where", "Expand", "Reshape", "Transpose", "Softmax", "Cos", "Pow"} & set(count)
    assert len(list(llama.graph)) < 40


def test_unfused_graph_keeps_rows(tmp_path: Path) -> None:
    """`keep` works on the plain export too, once, and gives the last rows bit for bit as before or close to it."""
    family = get_family("llama")
    model = ir.load(family.onnx)
    assert keep_rows(model)
    assert keep_rows(model)
    assert [v.name for v in model.graph.inputs].count("keep") == 1
    ir.save(model, tmp_path / "kept.onnx")
    feeds = {
        "input_ids": np.arange(3, 10, dtype=np.int64)[None],
        "attention_mask": np.ones((1, 7), dtype=np.int64),
        "position_ids": np.arange(7, dtype=np.int64)[None],
    }
    feeds |= {f"past_key_values.{i}.{k}": np.zeros((1, 2, 0, 16), np.float32) for i in (0, 1) for k in ("key", "value")}
    whole = run(family.onnx, feeds)
    for keep in (1, 4, 7):
        rows = run(tmp_path / "kept.onnx", feeds | {"keep": np.array([keep])})
        np.testing.assert_allclose(rows, whole[:, -keep:], atol=1e-5)


def test_a_graph_without_a_head_is_left_alone() -> None:
    """Where the logits do not come from a product with a weight, nothing is changed and False is returned."""
    model = parse("g (float[1,S,4] x, float[1,4,6] w) => (float[1,S,6] logits) { logits = MatMul(x, w) }")
    assert not keep_rows(model)
    assert [v.name for v in model.graph.inputs] == ["x", "w"]


HEADER = '<ir_version: 8, opset_import: ["": 18]> '


def run(model: Path | ir.Model, feeds: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
    """Return the first output of a model."""
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(None, feeds)[0]
    return result


def parse(text: str, **weights: NDArray[np.generic]) -> ir.Model:
    """Return a model written in ONNX's text format, with weights by name."""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    for name, array in weights.items():
        value = next(v for n in model.graph for v in n.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(array, name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
        model.graph.register_initializer(value)
    return model


def normal(*shape: int) -> NDArray[np.float32]:
    """Return random numbers."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_becomes_a_product_that_can_be_quantised(transposed: bool) -> None:
    """A Gemm, its weight transposed or not, turns into MatMul with a constant [K, N] and Add, and stays the same."""
    attributes = "<transB = 1>" if transposed else ""
    text = f"g (float[3,8] x) => (float[3,5] y) {{ y = Gemm {attributes} (x, w, b) }}"
    weight = normal(5, 8) if transposed else normal(8, 5)
    model = parse(text, w=weight, b=normal(5))
    before = run(model, {"x": normal(3, 8)})
    assert gemm_to_matmul(model) == 1
    product, _ = list(model.graph)
    assert (product.op_type, dims(product.inputs[1])) == ("MatMul", [8, 5])
    assert product.inputs[1].is_initializer()
    np.testing.assert_allclose(run(model, {"x": normal(3, 8)}), before, atol=1e-6)


def test_a_scaled_gemm_is_left_alone() -> None:
    """A Gemm that scales its terms is not a plain product and stays."""
    text = "g (float[3,8] x) => (float[3,5] y) { y = Gemm <alpha = 2.0> (x, w) }"
    model = parse(text, w=normal(8, 5))
    assert gemm_to_matmul(model) == 0
    assert [n.op_type for n in model.graph] == ["Gemm"]


@pytest.mark.parametrize("attributes", ["", "<perm = [1, 0]>"])
def test_tied_head_gets_a_weight_of_its_own(attributes: str) -> None:
    """`x @ transpose(embedding)` becomes a product with a constant [K, N], whether or not the order is spelt out."""
    text = f"""g (int64[1,3] ids) => (float[1,3,9] logits)
    {{ x = Gather(embed, ids) t = Transpose {attributes} (embed) logits = MatMul(x, t) }}"""
    model = parse(text, embed=normal(9, 4))
    before = run(model, {"ids": np.array([[1, 5, 8]])})
    assert untie_head(model) == 1
    assert [n.op_type for n in model.graph] == ["Gather", "MatMul"]
    assert dims(list(model.graph)[1].inputs[1]) == [4, 9]
    np.testing.assert_array_equal(run(model, {"ids": np.array([[1, 5, 8]])}), before)


NORM = """g (float[1,3,16] x) => (float[1,3,16] y) {
  two = Constant <value = float {2.0}> () axes = Constant <value = int64[1] {-1}> ()
  one = Constant <value = float {1.0}> () epsilon = Constant <value = float {EPS}> ()
  c = Cast <to = 1> (x) p = Pow(c, two) m = ReduceMean(p, axes) a = Add(m, epsilon) s = Sqrt(a)
  i = Div(NUM, s) n = Mul(c, i) d = Cast <to = 1> (n) y = Mul(w, d) }"""


def test_rms_norm_is_written_as_one_node() -> None:
    """The nine nodes of an exported RMS norm become one, its epsilon kept, with the same results."""
    model = parse(NORM.replace("EPS", "0.125").replace("NUM", "one"), w=normal(16))
    before = run(model, {"x": normal(1, 3, 16)})
    assert drop_casts(model) == 2
    assert fold_norms(model) == 1
    (node,) = list(model.graph)
    assert node.op_type == "SimplifiedLayerNormalization"
    assert node.attributes["epsilon"].value == 0.125
    np.testing.assert_allclose(run(model, {"x": normal(1, 3, 16)}), before, atol=1e-6)


def test_what_only_looks_like_a_norm_is_left_alone() -> None:
    """Two over the root is not a norm and stays as it is."""
    model = parse(NORM.replace("EPS", "0.125").replace("NUM", "two"), w=normal(16))
    drop_casts(model)
    assert fold_norms(model) == 0


def test_a_cast_that_changes_the_type_stays() -> None:
    """Only casts to the type that a value has already are removed."""
    text = "g (int64[2] x) => (float[2] y) { f = Cast <to = 1> (x) g = Cast <to = 1> (f) y = Neg(g) }"
    model = parse(text)
    assert drop_casts(model) == 1
    assert [n.op_type for n in model.graph] == ["Cast", "Neg"]
