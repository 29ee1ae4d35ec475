"""A graph that somebody else made: read only after everything in it that could do harm was looked at.

Knows what a decoder's graph may contain, and nothing of what is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx_ir as ir

from edgespec.bundle import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_VOCAB
from edgespec.errors import ExportError

_MOST_BYTES = 2**31  # protobuf can hold no more
_MOST_ELEMENTS = 2**40
_DOMAINS = ("", "ai.onnx", "com.microsoft")
# One scale for all rows of a call: a token's logits would depend on the tokens beside it.
_DYNAMIC = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulInteger")


def read_foreign(path: Path) -> ir.Model:
    """Parse a graph and check it; its weights stay where they are.

    Raises:
        ExportError: it is no ONNX file, or has weights outside of its folder or its files, absurd dimensions,
            operators of its own, or a quantisation that mixes rows.
    """
    if path.stat().st_size >= _MOST_BYTES:
        raise ExportError(f"{path} has {path.stat().st_size} bytes, more than an ONNX graph can have")
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's, onnx's and onnx_ir's classes all mean the same to the user
        raise ExportError(f"{path} is not a readable ONNX graph; download it again") from error
    _check_operators(path, model)
    for name, tensor in _tensors(model):
        _check_size(path, name, tensor)
        if isinstance(tensor, ir.ExternalTensor):
            _check_place(path, name, tensor)
    return model


def check_decoder(path: Path, model: ir.Model) -> int:
    """Require the inputs and outputs of a decoder with a cache and return its number of layers.

    Raises:
        ExportError: one is missing, one is not known, or a dimension is beyond any model.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    outputs = {value.name or "": value for value in model.graph.outputs}
    if "input_ids" not in inputs or "logits" not in outputs:
        lacking = "input_ids" if "input_ids" not in inputs else "logits"
        raise ExportError(f"{path} has no {lacking}, so it is no decoder; name the folder of a text model")
    count = len([name for name in inputs if name.startswith("past_key_values.") and name.endswith(".key")])
    if not 1 <= count <= MAX_LAYERS:
        raise ExportError(f"{path} has {count} past_key_values inputs; export it with its cache ('with past')")
    for i in range(count):
        for kind in ("key", "value"):
            _check_cache(path, inputs.get(f"past_key_values.{i}.{kind}"), f"past_key_values.{i}.{kind}")
            if f"present.{i}.{kind}" not in outputs:
                raise ExportError(f"{path} lacks the output present.{i}.{kind}; export it again")
    columns = outputs["logits"].shape[-1] if outputs["logits"].shape else None
    if isinstance(columns, int) and not 1 <= columns <= MAX_VOCAB:
        raise ExportError(f"{path} has {columns} columns of logits, beyond any vocabulary")
    return count


def _check_cache(path: Path, value: ir.Value | None, name: str) -> None:
    if value is None or value.shape is None or len(value.shape) != 4:
        raise ExportError(f"{path} lacks the input {name} of four dimensions; export it again")
    for axis, most in ((1, MAX_KV_HEADS), (3, MAX_HEAD_DIM)):
        size = value.shape[axis]
        if isinstance(size, int) and not 1 <= size <= most:
            raise ExportError(f"{path}: {name} has {size} in dimension {axis}, beyond any model")


def _check_operators(path: Path, model: ir.Model) -> None:
    if model.functions:
        raise ExportError(f"{path} brings functions of its own, which are not run; export it without them")
    for node in model.graph.all_nodes():
        if node.domain not in _DOMAINS:
            raise ExportError(f"{path} uses the custom operator {node.domain}.{node.op_type}, which is not run")
        if node.op_type in _DYNAMIC:
            raise ExportError(
                f"{path} is quantised dynamically ({node.op_type}): a token's logits depend on the tokens beside it, "
                "so nothing that is verified would hold; choose another variant (fp32, fp16, q4, q8 of blocks)"
            )


def _tensors(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Every stored tensor: initializers and constants, inside branches too."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                yield str(name), value.const_value
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR:
                yield f"{node.op_type} {node.name}", attribute.as_tensor()


def _check_size(path: Path, name: str, tensor: ir.TensorProtocol) -> None:
    sizes = list(tensor.shape)
    if not all(isinstance(n, int) and n >= 0 for n in sizes) or prod(sizes) > _MOST_ELEMENTS:
        raise ExportError(f"{path}: {name} has the shape {sizes}, beyond any model")


def _check_place(path: Path, name: str, tensor: ir.ExternalTensor) -> None:
    """External data must lie in the graph's folder, and inside its file."""
    location = str(tensor.location)
    is_absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor
    folder = path.parent.resolve()
    file = (folder / location).resolve()
    if is_absolute or not file.is_relative_to(folder):
        raise ExportError(f"{path} keeps {name} outside of its folder ({location}); do not use it")
    if not file.is_file():
        raise ExportError(f"{path} keeps {name} in {location}, which is not there; download it again")
    start, length = tensor.offset or 0, tensor.length
    needed = tensor.nbytes
    if start < 0 or (length is not None and length != needed) or start + needed > file.stat().st_size:
        raise ExportError(f"{path}: {name} does not lie inside {location}; download it again")
