"""The tiny decoder with an output `hidden`, and a draft without a cache that goes on from it. Whole numbers throughout.

`hidden` is (state, position): the state that `reference_logits` looks its row up by. The draft computes the next state
as the target would and looks it up in a table of its own: it is right half of the time if it starts rightly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgespec.bundle import ModelInfo, list_files, write_manifest
from tests.tiny import MODULUS, VOCAB, TinyModel, half_right, make_tiny_bundle, tiny_info, tiny_model

EOS_BONUS = 272
HEAD_IDS = np.array([i for i in range(VOCAB) if i % 7], np.int64)  # not all tokens


def add_hidden(path: Path) -> None:
    """Give a graph of `tiny.save_graph` the output `hidden` [1, keep, 2]."""
    model = onnx.load(path)
    model.graph.node.extend(
        [
            helper.make_node("Cast", ["positions"], ["positions_f"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["state_f", "one_v"], ["state_column"]),
            helper.make_node("Unsqueeze", ["positions_f", "one_v"], ["position_column"]),
            helper.make_node("Concat", ["state_column", "position_column"], ["all_hidden"], axis=1),
            helper.make_node("Slice", ["all_hidden", "keep_from", "huge", "zero_v"], ["kept_hidden"]),
            helper.make_node("Unsqueeze", ["kept_hidden", "zero_v"], ["hidden"]),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [1, "R", 2]))
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def target_hidden(model: TinyModel, context: np.ndarray) -> np.ndarray:
    """What `hidden` is after `context`, from the definition."""
    j = np.arange(len(context))
    state = ((j % 11 + 1) * model.key[context] + (j % 7 + 1) * model.value[context]).sum() % MODULUS
    return np.array([state, len(context) - 1], np.float32)


def draft_logits(model: TinyModel, table: np.ndarray, start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The draft's row after `tokens`, the first of which follows the target's `start`: from the definition."""
    state, position = int(start[0]), int(start[1])
    for token in tokens:
        position += 1
        state = (state + (position % 11 + 1) * model.key[token] + (position % 7 + 1) * model.value[token]) % MODULUS
    return table[state][HEAD_IDS]


def save_draft(model: TinyModel, table: np.ndarray, path: Path) -> None:
    """Write the draft's graph."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "key_table": model.key.astype(np.float32),
        "value_table": model.value.astype(np.float32),
        "table": table[:, HEAD_IDS],
        "modulus": np.array(MODULUS, np.float32),
        "eleven": np.array(11, np.float32),
        "seven": np.array(7, np.float32),
        "one": np.array(1, np.float32),
        "first": np.array([0], np.int64),
        "second": np.array([1], np.int64),
        "row_shape": np.array([1, 1], np.int64),
        "column_shape": np.array([1, 1, 1], np.int64),
    }

    def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, inputs.split(), [output], name=output, **attributes)

    nodes = [
        node("Add", "hidden state", "start"),
        node("Gather", "start first", "before", axis=2),
        node("Gather", "start second", "position_before", axis=2),
        node("Add", "position_before one", "position"),
    ]
    for name, period in (("key", "eleven"), ("value", "seven")):
        nodes += [
            node("Mod", f"position {period}", f"{name}_mod", fmod=1),
            node("Add", f"{name}_mod one", f"{name}_weight"),
            node("Gather", f"{name}_table input_ids", f"{name}_row"),
            node("Reshape", f"{name}_row column_shape", f"{name}_column"),
            node("Mul", f"{name}_column {name}_weight", f"{name}_part"),
        ]
    nodes += [
        node("Add", "before key_part", "partly"),
        node("Add", "partly value_part", "sum"),
        node("Mod", "sum modulus", "next", fmod=1),
        node("Concat", "next position", "next_state", axis=2),
        node("Cast", "next", "index_3d", to=TensorProto.INT64),
        node("Reshape", "index_3d row_shape", "index"),
        node("Gather", "table index", "logits"),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, [1, 1])]
    inputs += [value(name, TensorProto.FLOAT, [1, 1, 2]) for name in ("hidden", "state")]
    outputs = [
        value("logits", TensorProto.FLOAT, [1, 1, len(HEAD_IDS)]),
        value("next_state", TensorProto.FLOAT, [1, 1, 2]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "draft", inputs, outputs, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made)
    onnx.save(made, str(path))


def draft_info(**changes: object) -> ModelInfo:
    """What a manifest says of the draft."""
    info = tiny_info("draft/model.onnx")
    info = replace(info, cache="none", num_layers=0, num_kv_heads=0, head_dim=0, head_ids="draft/head_ids.npy")
    return replace(info, **changes)  # type: ignore[arg-type]


def make_hidden_bundle(folder: Path, *, shared: bool = True, **changes: object) -> Path:
    """A bundle of the tiny target and the draft without a cache. `changes` are of the draft's `ModelInfo`."""
    make_tiny_bundle(folder, shared=shared, eos_bonus=EOS_BONUS)
    model = tiny_model(eos_bonus=EOS_BONUS)
    add_hidden(folder / "target" / "model.onnx")
    save_draft(model, half_right(model).table, folder / "draft" / "model.onnx")
    np.save(folder / "draft" / "head_ids.npy", HEAD_IDS.astype(np.int32))
    manifest = read_bundle_unchecked(folder)
    target = replace(manifest.target, hidden_layers=(0,))
    files = list_files(folder)
    write_manifest(replace(manifest, target=target, draft=draft_info(**changes), files=files), folder)
    return folder


def read_bundle_unchecked(folder: Path):  # type: ignore[no-untyped-def]
    """The manifest, though files were changed."""
    import json

    from edgespec.bundle import manifest_from_dict

    return manifest_from_dict(json.loads((folder / "edgespec.json").read_text(encoding="utf-8")))
