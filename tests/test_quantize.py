"""Block quantisation: the packing against ONNX Runtime's own operators, and what becomes of a whole graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import ExportError
from edgespec.export.quantize import dequantize_blocks, quantize, quantize_blocks

VOCAB = 50
CASES = [(bits, block, width) for bits in (4, 8) for block in (32, 128) for width in (64, 96, 128, 576)]


def by_hand(blocks, rows: int, width: int) -> np.ndarray:
    """The definition, element by element: (q - half) * scale, low nibble first."""
    weight = np.zeros((rows, width))
    for row in range(rows):
        for k in range(width):
            cell, place = divmod(k, blocks.block)
            if blocks.bits == 8:
                level = int(blocks.packed[row, cell, place]) - 128
            else:
                byte = int(blocks.packed[row, cell, place // 2])
                level = (byte >> 4 if place % 2 else byte & 15) - 8
            weight[row, k] = level * float(blocks.scales[row, cell])
    return weight


def decoder(width: int, *, tied: bool, seed: int = 0, gemm: bool = False) -> onnx.ModelProto:
    """ids -> Gather -> MatMul (width, 40) -> MatMul (40, width) -> head: what a quantiser sees of a decoder."""
    rng = np.random.default_rng(seed)
    weights = {
        "embed": rng.normal(size=(VOCAB, width)),
        "up": rng.normal(size=(width, 40)),
        "down": rng.normal(size=(40, width)),
    }
    weights["head"] = weights["embed"].T if tied else rng.normal(size=(width, VOCAB))
    nodes = [helper.make_node("Gather", ["embed", "input_ids"], ["x"], name="embed_gather")]
    nodes += [helper.make_node("MatMul", ["x", "up"], ["h"], name="up_mm")]
    nodes += [helper.make_node("MatMul", ["h", "down"], ["y"], name="down_mm")]
    nodes += [helper.make_node("MatMul", ["y", "head"], ["logits"], name="head_mm")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "S", VOCAB])]
    if gemm:
        nodes += [helper.make_node("Squeeze", ["h", "zero"], ["h2"]), helper.make_node("Gemm", ["h2", "down"], ["g"])]
        nodes[-1].name = "a_gemm"
        outputs.append(helper.make_tensor_value_info("g", TensorProto.FLOAT, ["S", width]))
    tensors = [numpy_helper.from_array(np.ascontiguousarray(w, np.float32), n) for n, w in weights.items()]
    tensors += [numpy_helper.from_array(np.zeros(1, np.int64), "zero")] if gemm else []
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"])
    graph = helper.make_graph(nodes, "g", [ids], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def one_operator(weight: np.ndarray, bits: int, block: int) -> onnx.ModelProto:
    """x -> MatMul with `weight` (K, N), quantised."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", TensorProto.FLOAT, ["M", weight.shape[0]])],
        [value("y", TensorProto.FLOAT, ["M", weight.shape[1]])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    quantize(model, bits, block)
    return ir.to_proto(model)


@pytest.mark.parametrize(("bits", "block", "width"), CASES)
def test_onnxruntime_reads_the_blocks_as_we_mean_them(bits: int, block: int, width: int) -> None:
    """MatMulNBits of the identity is the dequantised weight, padded last block or not."""
    weight = np.random.default_rng(1).normal(size=(width, 24)).astype(np.float32)
    expected = by_hand(quantize_blocks(np.ascontiguousarray(weight.T), bits, block), 24, width).T
    found = run(one_operator(weight, bits, block), {"x": np.eye(width, dtype=np.float32)})
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(("bits", "block", "width"), CASES)
def test_our_own_dequantisation_follows_the_definition(bits: int, block: int, width: int) -> None:
    """`dequantize_blocks` undoes the packing, nibble order included, and drops the padding."""
    blocks = quantize_blocks(np.random.default_rng(2).normal(size=(7, width)).astype(np.float32), bits, block)
    np.testing.assert_allclose(dequantize_blocks(blocks), by_hand(blocks, 7, width), atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_a_step_and_exact_for_zeros_and_extremes(bits: int) -> None:
    """No weight moves by more than half a step (a whole one at the clipped end); zeros and each extreme stay."""
    weight = np.random.default_rng(3).normal(size=(64, 128)).astype(np.float32)
    weight[5] = 0
    weight[:, 7] = 0
    blocks = quantize_blocks(weight, bits, 32)
    error = np.abs(dequantize_blocks(blocks) - weight).reshape(64, 4, 32)
    step = np.abs(blocks.scales)[..., None]
    assert (error <= step * 1.0001).all()
    assert (error <= step * 0.5001).mean() > 0.97
    assert (dequantize_blocks(blocks)[5] == 0).all()
    assert (dequantize_blocks(blocks)[:, 7] == 0).all()
    extreme = np.abs(weight.reshape(64, 4, 32)).argmax(-1, keepdims=True)
    np.testing.assert_allclose(np.take_along_axis(error, extreme, -1), 0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bits", "block", "width"), [(4, 32, 64), (4, 128, 96), (8, 32, 96), (8, 128, 64)])
def test_a_whole_decoder_computes_with_the_rounded_weights(bits: int, block: int, width: int, tied: bool) -> None:
    """Embedding, layers and head all use the blocks; what remains is the operator's own int8 activations.

    In 4 bits head and embedding have 8.
    """
    head = table = (8, 128) if bits == 4 else (bits, block)
    original = decoder(width, tied=tied)
    model = ir.from_proto(original)
    report = quantize(model, bits, block)
    ids = np.array([[3, 7, 0, 49, 12]])
    found = run(ir.to_proto(model), {"input_ids": ids})
    weights = {t.name: numpy_helper.to_array(t) for t in original.graph.initializer}
    expected = by_hand(quantize_blocks(weights["embed"], *table), VOCAB, width)[ids]
    for name, rounding in (("up", (bits, block)), ("down", (bits, block)), ("head", head)):
        transposed = np.ascontiguousarray(weights[name].T)
        expected = expected @ by_hand(quantize_blocks(transposed, *rounding), *transposed.shape).T
    assert np.abs(found - expected).max() < 0.12 * expected.std()
    assert report.embedding == ("shared" if tied else "own")
    assert report.quantized == ["up_mm", "down_mm", "head_mm"]


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_embedding_gives_exactly_the_dequantised_rows(bits: int, block: int) -> None:
    """Rows gathered out of the head's blocks have the model's width again, without the padding."""
    width = 96
    model = ir.from_proto(decoder(width, tied=True))
    quantize(model, bits, block)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    proto.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "S", width]))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(["x"], {"input_ids": np.arange(VOCAB)[None]})[0][0]
    embed = numpy_helper.to_array(decoder(width, tied=True).graph.initializer[0])
    rounding = (8, 128) if bits == 4 else (bits, block)  # as the head's, which it is
    np.testing.assert_allclose(found, by_hand(quantize_blocks(embed, *rounding), VOCAB, width), atol=1e-6)


def test_a_head_is_found_behind_what_changes_logits() -> None:
    """A cap, a scale and another type come after the product; the matrix before it stays in 4 bits."""
    proto = decoder(64, tied=True)
    proto.graph.node[-1].output[0] = "raw"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(30, np.float32), "cap"))
    proto.graph.node.extend(
        [
            helper.make_node("Div", ["raw", "cap"], ["scaled"]),
            helper.make_node("Tanh", ["scaled"], ["bent"]),
            helper.make_node("Mul", ["cap", "bent"], ["logits"]),
        ]
    )
    model = ir.from_proto(proto)
    assert quantize(model, 4, 32).embedding == "shared"
    bits = {n.name: n.attributes["bits"].as_int() for n in model.graph if n.op_type == "MatMulNBits"}
    assert bits == {"up_mm": 4, "down_mm": 4, "head_mm": 8}


def test_a_shared_embedding_is_stored_once_and_no_float_matrix_remains() -> None:
    """The point of sharing: head and embedding are one array, and the float32 table is gone."""
    model = ir.from_proto(decoder(64, tied=True))
    quantize(model, 8, 32)
    sizes = {t.name: numpy_helper.to_array(t) for t in ir.to_proto(model).graph.initializer}
    assert [n for n, a in sizes.items() if a.dtype == np.uint8 and a.shape[0] == VOCAB] == ["head_packed"]
    assert all(array.dtype != np.float32 or name.endswith("_scales") for name, array in sizes.items())


def test_a_weight_of_two_products_is_rounded_once() -> None:
    """Sharing in the original stays sharing."""
    proto = decoder(64, tied=False)
    proto.graph.node.append(helper.make_node("MatMul", ["x", "up"], ["again"], name="again_mm"))
    proto.graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, [1, "S", 40]))
    model = ir.from_proto(proto)
    report = quantize(model, 4, 32)
    assert "again_mm" in report.quantized
    assert sum(name.startswith("up_") for name in model.graph.initializers) == 2
    run(ir.to_proto(model), {"input_ids": np.array([[1, 2]])})


def test_what_stays_in_float_is_reported() -> None:
    """A Gemm is not converted here, and the report says so instead of passing over it."""
    report = quantize(ir.from_proto(decoder(64, tied=False, gemm=True)), 8, 32)
    assert report.kept == ["a_gemm: a Gemm"]


def test_progress_reaches_the_end() -> None:
    """The caller's bar ends at 1 and never goes back."""
    seen: list[float] = []
    quantize(ir.from_proto(decoder(64, tied=True)), 4, 32, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_graph_without_weights_is_refused() -> None:
    """Quantising nothing is an error and not a bundle that only claims to be small."""
    node = helper.make_node("Identity", ["input_ids"], ["logits"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("input_ids", TensorProto.INT64, [1])], [value("logits", TensorProto.INT64, [1])]
    )
    with pytest.raises(ExportError, match="nothing to quantise"):
        quantize(ir.from_proto(helper.make_model(graph)), 4, 32)


def test_an_embedding_of_flattened_ids_is_found() -> None:
    """Some models reshape the ids before they look them up."""
    proto = decoder(64, tied=True)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, -1], np.int64), "flat_shape"))
    proto.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "flat_shape"], ["flat_ids"], name="flatten"))
    proto.graph.node[1].input[1] = "flat_ids"
    model = ir.from_proto(proto)
    assert quantize(model, 4, 32).embedding == "shared"
    run(ir.to_proto(model), {"input_ids": np.array([[1, 2]])})
