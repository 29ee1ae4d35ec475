"""A tiny decoder with a real cache whose logits depend on every cached token, in whole numbers.

The logits after i tokens are row `s` of a table, where s = sum over j <= i of (a_j * E1[t_j] + b_j * E2[t_j]) mod M:
E1 goes through the key cache, E2 through the value cache, a_j and b_j depend on the position. Everything is a whole
number below 2**24, so float32 is exact and any inequality between two ways of decoding is a logic error.
`reference_logits` computes the same in plain NumPy, without a cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgespec.bundle import Manifest, ModelInfo, list_files, write_manifest

MODULUS = 251
WIDTH = 8
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
NUM_TOKENS = len(SPECIALS) + 256
VOCAB = NUM_TOKENS + 5  # padding rows, as real models have
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """The numbers of one tiny model: embeddings E1, E2 of shape (VOCAB,) and a table of shape (MODULUS, VOCAB)."""

    key: np.ndarray
    value: np.ndarray
    table: np.ndarray = field(repr=False)


def tiny_model(seed: int = 0, eos_bonus: int = 0) -> TinyModel:
    """A random model that prefers printable text; `eos_bonus` makes the end token likelier."""
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(VOCAB) for _ in range(MODULUS)]).astype(np.float32)
    printable = [len(SPECIALS) + i for i, c in enumerate(byte_alphabet()) if 32 <= c < 127]
    table[:, printable] += VOCAB
    table[:, EOS] += eos_bonus
    return TinyModel(rng.integers(1, MODULUS, VOCAB), rng.integers(1, MODULUS, VOCAB), table)


def half_right(model: TinyModel, seed: int = 1) -> TinyModel:
    """The same model with every other row of the table exchanged: a draft that is right about half of the time."""
    other = tiny_model(seed)
    rows = np.arange(MODULUS)[:, None] % 2 == 0
    return TinyModel(model.key, model.value, np.where(rows, model.table, other.table))


def reference_logits(model: TinyModel, context: np.ndarray) -> np.ndarray:
    """Logits after `context`, shape (VOCAB,), from the definition."""
    j = np.arange(len(context))
    state = ((j % 11 + 1) * model.key[context] + (j % 7 + 1) * model.value[context]).sum() % MODULUS
    return model.table[int(state)]


def save_graph(model: TinyModel, path: Path, *, shared: bool = True, keep: bool = True) -> Path:
    """Write the model as an ONNX decoder with the shared or the growing cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    consts = {
        "key_table": np.repeat(model.key[:, None], WIDTH, 1).astype(np.float32),
        "value_table": np.repeat(model.value[:, None], WIDTH, 1).astype(np.float32),
        "table": model.table,
        **{name: np.array(v, np.int64) for name, v in _INTEGERS.items()},
        "modulus": np.array(MODULUS, np.float32),
        "zero_f": np.array(0, np.float32),
        "head": np.array([0, 0], np.int64),
    }
    nodes = _lengths(shared)
    for name in ("key", "value"):
        nodes += _cache_nodes(name, shared)
    nodes += _logit_nodes(shared, keep)
    onnx.save(_model(nodes, consts, shared, keep), str(path))
    return path


_INTEGERS = {"zero": 0, "one": 1, "seven": 7, "eleven": 11, "one_v": [1], "zero_v": [0], "two_v": [2], "huge": [2**31]}


def _node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op}:{outputs}", **attributes)


def _lengths(shared: bool) -> list[onnx.NodeProto]:
    """past (scalar), total (scalar) and the positions of the rows."""
    nodes = [_node("Shape", "input_ids", "ids_shape"), _node("Gather", "ids_shape one", "size", axis=0)]
    if shared:
        nodes.append(_node("Squeeze", "past_len zero_v", "past"))
    else:
        nodes += [_node("Shape", "past_key_values.0.key", "past_shape"), _node("Gather", "past_shape two_v", "past_v")]
        nodes.append(_node("Squeeze", "past_v zero_v", "past"))
    return [*nodes, _node("Add", "past size", "total"), _node("Range", "past total one", "positions")]


def _cache_nodes(name: str, shared: bool) -> list[onnx.NodeProto]:
    """New entries go into the buffer in place, or behind the past."""
    past, present = f"past_key_values.0.{name}", f"present.0.{name}"
    nodes = [_node("Gather", f"{name}_table input_ids", f"{name}_new", axis=0)]
    if shared:
        nodes += [
            _node("Unsqueeze", "positions one_v", f"{name}_at"),
            _node("Pad", f"{name}_at {name}_pads", f"{name}_index"),
            _node("Squeeze", f"{name}_new zero_v", f"{name}_rows"),
            _node("ScatterND", f"{past} {name}_index {name}_rows", present),
        ]
        pads = numpy_helper.from_array(np.array([0, 2, 0, 0], np.int64), f"{name}_pads")
        nodes.insert(0, helper.make_node("Constant", [], [f"{name}_pads"], value=pads))
    else:
        nodes += [
            _node("Unsqueeze", f"{name}_new one_v", f"{name}_4d"),
            _node("Concat", f"{past} {name}_4d", present, axis=2),
        ]
    return nodes


def _logit_nodes(shared: bool, keep: bool) -> list[onnx.NodeProto]:
    nodes = [
        _node("Shape", "present.0.key", "present_shape"),
        _node("Gather", "present_shape two_v", "capacity_v"),
        _node("Squeeze", "capacity_v zero_v", "capacity"),
        _node("Range", "zero capacity one", "j"),
    ]
    for name, period in (("key", "eleven"), ("value", "seven")):
        nodes += [
            _node("Mod", f"j {period}", f"{name}_mod"),
            _node("Add", f"{name}_mod one", f"{name}_weight_i"),
            _node("Cast", f"{name}_weight_i", f"{name}_weight", to=TensorProto.FLOAT),
            _node("Gather", f"present.0.{name} zero", f"{name}_3d", axis=3),
            _node("Reshape", f"{name}_3d minus_one", f"{name}_flat"),
            _node("Mul", f"{name}_flat {name}_weight", f"{name}_part"),
        ]
    nodes += [
        _node("Add", "key_part value_part", "parts"),
        _node("Unsqueeze", "positions one_v", "rows_at"),
        _node("LessOrEqual", "j rows_at", "seen"),
        # A buffer holds anything behind what counts: select, do not multiply.
        _node("Where", "seen parts zero_f", "terms"),
        _node("ReduceSum", "terms one_v", "sums", keepdims=0),
        _node("Mod", "sums modulus", "state_f", fmod=1),
        _node("Cast", "state_f", "state", to=TensorProto.INT64),
        _node("Gather", "table state", "all_rows", axis=0),
    ]
    minus_one = numpy_helper.from_array(np.array([-1], np.int64), "minus_one")
    nodes.insert(0, helper.make_node("Constant", [], ["minus_one"], value=minus_one))
    kept = "all_rows"
    if keep:
        nodes += [_node("Neg", "keep", "keep_from"), _node("Slice", "all_rows keep_from huge zero_v", "kept_rows")]
        kept = "kept_rows"
    if shared:
        return [*nodes, _node("Unsqueeze", f"{kept} zero_v", "logits")]
    # A wrong mask must show: its sum has to be the number of cached tokens.
    return [
        *nodes,
        _node("ReduceSum", "attention_mask", "mask_sum", keepdims=0),
        _node("Sub", "mask_sum total", "mask_error"),
        _node("Cast", "mask_error", "mask_error_f", to=TensorProto.FLOAT),
        _node("Unsqueeze", f"{kept} zero_v", "logits_3d"),
        _node("Sub", "logits_3d mask_error_f", "logits"),
    ]


def _model(nodes: list[onnx.NodeProto], consts: dict[str, np.ndarray], shared: bool, keep: bool) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, [1, "S"])]
    inputs.append(
        value("past_len", TensorProto.INT64, [1]) if shared else value("attention_mask", TensorProto.INT64, [1, "T"])
    )
    if keep:
        inputs.append(value("keep", TensorProto.INT64, [1]))
    outputs = [value("logits", TensorProto.FLOAT, [1, "R", VOCAB])]
    for name in ("key", "value"):
        inputs.append(value(f"past_key_values.0.{name}", TensorProto.FLOAT, [1, 1, "P", WIDTH]))
        outputs.append(value(f"present.0.{name}", TensorProto.FLOAT, [1, 1, "C", WIDTH]))
    initializers = [numpy_helper.from_array(array, name) for name, array in consts.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def byte_alphabet() -> list[int]:
    """The bytes in the order of their token ids: `pre_tokenizers.ByteLevel.alphabet()` sorted, as byte values."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    code_points = {b: b for b in visible} | {b: 256 + i for i, b in enumerate(hidden)}
    return sorted(code_points, key=lambda b: code_points[b])


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, three special tokens in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i + len(SPECIALS) for i, c in enumerate(alphabet)} | {s: i for i, s in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def tiny_info(path: str, *, shared: bool = True, context_length: int = 512) -> ModelInfo:
    return ModelInfo(
        path=path,
        cache="shared" if shared else "growing",
        num_layers=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        vocab_size=VOCAB,
        context_length=context_length,
        precision="fp32",
        block_size=None,
        row_invariance=">=2",
        num_parameters=MODULUS * VOCAB,
        source="made by the tests",
        licence="Apache-2.0",
    )


def make_tiny_bundle(
    folder: Path, *, draft: bool = False, shared: bool = True, context_length: int = 512, eos_bonus: int = 272
) -> Path:
    """A whole bundle in `folder`: target, perhaps a half-right draft, byte tokenizer, ChatML template."""
    target = tiny_model(eos_bonus=eos_bonus)
    save_graph(target, folder / "target" / "model.onnx", shared=shared)
    if draft:
        save_graph(half_right(target), folder / "draft" / "model.onnx", shared=shared)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8", newline="\n")
    manifest = Manifest(
        name="tiny",
        created_by="tests",
        target=tiny_info("target/model.onnx", shared=shared, context_length=context_length),
        draft=tiny_info("draft/model.onnx", shared=shared, context_length=context_length) if draft else None,
        eos_token_ids=(EOS,),
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        special_tokens={"eos_token": SPECIALS[EOS], "bos_token": SPECIALS[1]},
        files=list_files(folder),
        check={},
    )
    write_manifest(manifest, folder)
    return folder


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change keys of a bundle's manifest as somebody with an editor would."""
    path = folder / "edgespec.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | changes), encoding="utf-8")
