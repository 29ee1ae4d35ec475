"""The LM head computes only the rows asked for: the `keep` input. Knows nothing of attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.export.fuse.build import Builder, clean, constant_value

KEEP = "keep"
_AFTER_HEAD = ("Mul", "Div", "Tanh", "Cast", "Add", "Sub", "Identity")


def keep_rows(model: ir.Model) -> bool:
    """Add an input `keep` (int64 [1]) and slice the hidden states to their last `keep` rows before the LM head.

    `keep` is from 1 to the number of new tokens; more gives all rows. (0 would too: the caller must not pass it.)

    Returns:
        False, with the model unchanged, if the head cannot be found. True also if the input is there already.
    """
    if any(value.name == KEEP for value in model.graph.inputs):
        return True
    head = find_head(model.graph)
    if head is None:
        return False
    builder = Builder(model.graph)
    keep = builder.input(KEEP, [1])
    start = builder.op("Neg", [keep], "keep.start")
    end = builder.ints([np.iinfo(np.int64).max], "keep.end")
    rows = builder.op("Slice", [head.inputs[0], start, end, builder.ints([1], "keep.axis")], "keep.rows")
    head.replace_input_with(0, rows)
    logits = _logits(model.graph)
    if logits is not None and logits.shape is not None:
        logits.shape = ir.Shape([1, KEEP, logits.shape[2]])
    clean(model)
    return True


def _logits(graph: ir.Graph) -> ir.Value | None:
    return next((value for value in graph.outputs if value.name == "logits"), None)


def find_head(graph: ir.Graph) -> ir.Node | None:
    """Walk back from the logits through scaling, soft cap and bias to the product with the head's weight."""
    value = _logits(graph)
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in ("MatMul", "MatMulNBits"):
            return node if _is_weight(node.inputs[1]) else None
        if node.op_type not in _AFTER_HEAD:
            return None
        open_inputs = [v for v in node.inputs if constant_value(v) is None]
        value = open_inputs[0] if len(open_inputs) == 1 else None
    return None


def _is_weight(value: ir.Value) -> bool:
    node = value.producer()
    if node is not None and node.op_type in ("Transpose", "Cast", "Identity"):
        return _is_weight(node.inputs[0])
    return constant_value(value) is not None
