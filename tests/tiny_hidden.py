"""The tiny decoder with an output `hidden`, and a draft without a cache that goes on from it. Whole numbers throughout.

`hidden` is (state, position): the state that `reference_logits` looks its row up by. The draft computes the next state
as the target would and looks it up in a table of its own: it is right half of the time if it starts rightly.

A draft that `attends` computes the state once more, from the target's cache, and is right only if both are the same.
What it writes there has a wrong number in the channel that the target reads, and the right one in its own.

One that is `hinted` adds `TRUST` times the hint's kind to its column.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgespec.bundle import ModelInfo, list_files, write_manifest
from tests.tiny import MODULUS, VOCAB, WIDTH, TinyModel, half_right, make_tiny_bundle, tiny_info, tiny_model

EOS_BONUS = 272
TRUST = 10_000
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


def draft_logits(
    model: TinyModel, table: np.ndarray, start: np.ndarray, tokens: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray:
    """The draft's row after `tokens`, the first of which follows the target's `start`: from the definition.

    Args:
        seen: tokens in the cache before them, for a draft that attends.
    """
    state, position = int(start[0]), int(start[1])
    for token in tokens:
        position += 1
        state = (state + (position % 11 + 1) * model.key[token] + (position % 7 + 1) * model.value[token]) % MODULUS
    if seen is not None:
        state = int(2 * target_hidden(model, np.concatenate([seen, tokens]))[0] - state) % MODULUS
    return table[state][HEAD_IDS]


def save_draft(
    model: TinyModel,
    table: np.ndarray,
    path: Path,
    *,
    attends: bool = False,
    hinted: bool = False,
    width: int = WIDTH,
) -> None:
    """Write the draft's graph. `width` is of the cache that it attends to."""
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
    node = _node
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
        *(_attention_nodes(arrays, model, width) if attends else [node("Identity", "next", "chosen")]),
        node("Cast", "chosen", "index_3d", to=TensorProto.INT64),
        node("Reshape", "index_3d row_shape", "index"),
        node("Gather", "table index", "unhinted"),
        *(_hint_nodes(arrays) if hinted else [node("Identity", "unhinted", "logits")]),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, [1, 1])]
    inputs += [value(name, TensorProto.FLOAT, [1, 1, 2]) for name in ("hidden", "state")]
    outputs = [
        value("logits", TensorProto.FLOAT, [1, 1, len(HEAD_IDS)]),
        value("next_state", TensorProto.FLOAT, [1, 1, 2]),
    ]
    if hinted:
        inputs.append(value("hint", TensorProto.INT64, [1, 2]))
    if attends:
        inputs.append(value("past_len", TensorProto.INT64, [1]))
        shape = [1, 1, "C", width]
        inputs += [value(f"past_key_values.0.{name}", TensorProto.FLOAT, shape) for name in ("key", "value")]
        outputs += [value(f"present.0.{name}", TensorProto.FLOAT, shape) for name in ("key", "value")]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "draft", inputs, outputs, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made)
    onnx.save(made, str(path))


def _node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=output, **attributes)


def _hint_nodes(arrays: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """From `unhinted` to `logits`; `arrays` gets the constants."""
    arrays |= {"column_index": np.array([[0]]), "kind_index": np.array([[1]]), "trust": np.array(TRUST, np.float32)}
    return [
        _node("Gather", "hint column_index", "hint_column", axis=1),
        _node("Gather", "hint kind_index", "hint_kind", axis=1),
        _node("Cast", "hint_kind", "hint_kind_f", to=TensorProto.FLOAT),
        _node("Mul", "hint_kind_f trust", "hint_worth"),
        _node("ScatterElements", "unhinted hint_column hint_worth", "logits", axis=2, reduction="add"),
    ]


def _attention_nodes(arrays: dict[str, np.ndarray], model: TinyModel, width: int) -> list[onnx.NodeProto]:
    """From `next` to `chosen`; `arrays` gets the constants."""
    arrays |= {"place": np.zeros(2, np.int64), "start_i": np.array(0, np.int64), "step_i": np.array(1, np.int64)}
    arrays |= {"eleven_i": np.array(11, np.int64), "seven_i": np.array(7, np.int64), "nothing": np.array(0, np.float32)}
    arrays |= {"place_shape": np.array([1, 3], np.int64), "flat_shape": np.array([-1], np.int64)}
    arrays |= {"entry_shape": np.array([1, width], np.int64), "two": np.array(2, np.float32)}
    nodes = [
        _node("Concat", "place past_len", "place_flat", axis=0),
        _node("Reshape", "place_flat place_shape", "place_index"),
        _node("Shape", "past_key_values.0.key", "capacity_v", start=2, end=3),
        _node("Squeeze", "capacity_v", "capacity"),
        _node("Range", "start_i capacity step_i", "j"),
        _node("LessOrEqual", "j past_len", "is_seen"),
    ]
    for name, numbers, period in (("key", model.key, "eleven_i"), ("value", model.value, "seven_i")):
        entries = np.repeat(numbers[:, None], width, 1).astype(np.float32)
        entries[:, 0] += 100  # which the target must never see
        arrays[f"{name}_entries"] = entries
        nodes += [
            _node("Gather", f"{name}_entries input_ids", f"{name}_entry_3d"),
            _node("Reshape", f"{name}_entry_3d entry_shape", f"{name}_entry"),
            _node("ScatterND", f"past_key_values.0.{name} place_index {name}_entry", f"present.0.{name}"),
            _node("Gather", f"present.0.{name} step_i", f"{name}_cached_3d", axis=3),
            _node("Reshape", f"{name}_cached_3d flat_shape", f"{name}_cached"),
            _node("Mod", f"j {period}", f"{name}_j_mod"),
            _node("Add", f"{name}_j_mod step_i", f"{name}_j_weight_i"),
            _node("Cast", f"{name}_j_weight_i", f"{name}_j_weight", to=TensorProto.FLOAT),
            _node("Mul", f"{name}_cached {name}_j_weight", f"{name}_terms"),
        ]
    return [
        *nodes,
        _node("Add", "key_terms value_terms", "all_terms"),
        _node("Where", "is_seen all_terms nothing", "seen_terms"),
        _node("ReduceSum", "seen_terms", "cache_sum", keepdims=0),
        _node("Mod", "cache_sum modulus", "cache_state", fmod=1),
        _node("Mul", "cache_state two", "twice"),
        _node("Sub", "twice next", "difference"),
        _node("Add", "difference modulus", "positive"),
        _node("Mod", "positive modulus", "chosen", fmod=1),
    ]


def draft_info(**changes: object) -> ModelInfo:
    """What a manifest says of the draft."""
    info = tiny_info("draft/model.onnx")
    info = replace(info, cache="none", num_layers=0, num_kv_heads=0, head_dim=0, head_ids="draft/head_ids.npy")
    return replace(info, **changes)  # type: ignore[arg-type]


def make_hidden_bundle(
    folder: Path,
    *,
    shared: bool = True,
    attends: bool = False,
    hinted: bool = False,
    width: int = WIDTH,
    **changes: object,
) -> Path:
    """A bundle of the tiny target and the draft without a cache. `changes` are of the draft's `ModelInfo`."""
    make_tiny_bundle(folder, shared=shared, eos_bonus=EOS_BONUS)
    model = tiny_model(eos_bonus=EOS_BONUS)
    add_hidden(folder / "target" / "model.onnx")
    path = folder / "draft" / "model.onnx"
    save_draft(model, half_right(model).table, path, attends=attends, hinted=hinted, width=width)
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
