"""Fusing a decoder that optimum exported: attention on a shared cache, one pass for all architectures.

`fuse` finds each layer's attention from its cache inputs and outputs, works out masks, scales and rope tables by
running pieces of the graph, and replaces it by GroupQueryAttention, all layers or none. `keep_rows` lets the LM head
compute only the rows asked for, in fused and other graphs. `tidy` makes the graph smaller and ready to quantise, and
`add_hidden` lets a draft see what some layers read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgespec.export.fuse.build import drop_identities
from edgespec.export.fuse.emit import Emitted, Emitter
from edgespec.export.fuse.facts import Facts
from edgespec.export.fuse.fold import fold_constants
from edgespec.export.fuse.hidden import add_hidden
from edgespec.export.fuse.layer import LayerMatch, find_layer
from edgespec.export.fuse.limits import check_config, check_layers
from edgespec.export.fuse.report import FuseReport, NoMatch
from edgespec.export.fuse.rows import keep_rows
from edgespec.export.fuse.tidy import drop_casts, fold_norms, gemm_to_matmul, tidy, untie_head

__all__ = [
    "FuseReport",
    "NoMatch",
    "add_hidden",
    "fold_constants",
    "fold_norms",
    "fuse",
    "gemm_to_matmul",
    "keep_rows",
    "tidy",
    "untie_head",
]


def fuse(source: Path | ir.Model, config: dict[str, Any], max_len: int) -> tuple[ir.Model, FuseReport]:
    """Fuse the attention of an exported decoder.

    Args:
        source: `model.onnx` of optimum's `main_export` with task text-generation-with-past, or the loaded model,
            which is changed in place and of no use after NoMatch.
        config: the model's `config.json`.
        max_len: most tokens that the cache will hold, at most what the model was made for (learned positions end
            there). Rope tables get one row more, as a padding row may be fed past the end.

    Returns:
        The model, not saved: inputs `input_ids` int64 [1, S], `past_len` int64 [1], `keep` int64 [1],
        `past_key_values.N.key/value` float32 [1, kv_heads, capacity, head_dim]; outputs `logits` [1, keep, V] and
        `present.N.key/value`, to be bound to the buffers of the past. Its large weights are still those of `source`.

    Raises:
        NoMatch: the model cannot be fused. Nothing was written.
    """
    check_config(config, max_len)
    model = source if isinstance(source, ir.Model) else ir.load(source)
    drop_identities(model.graph)
    fold_constants(model)
    untie_head(model)
    drop_casts(model)
    num_layers = _check_cache(model.graph)
    facts = Facts(model)
    layers = [find_layer(facts, i, max_len) for i in range(num_layers)]
    check_layers(config, layers, max_len)
    emitter = Emitter(facts, max_len)
    emitted = [emitter.layer(layer) for layer in layers]
    is_bounded = emitter.finish()
    has_keep = keep_rows(model)
    return model, _report(layers, emitted, max_len if is_bounded else None, has_keep)


def _check_cache(graph: ir.Graph) -> int:
    """Require a cache that the operator can have; return the number of layers."""
    keys = [v for v in graph.inputs if (v.name or "").startswith("past_key_values.") and v.name.endswith(".key")]
    if not keys:
        raise NoMatch("the graph has no cache inputs past_key_values.N.key")
    if any(key.dtype != ir.DataType.FLOAT for key in keys):
        raise NoMatch("the cache is not float32")
    dims = {tuple(key.shape)[1::2] for key in keys if len(key.shape) == 4}
    if len(dims) != 1 or not all(isinstance(n, int) for n in next(iter(dims))):
        raise NoMatch("the layers' caches differ, or their dimensions are not fixed")
    head_dim = next(iter(dims))[1]
    if head_dim % 8:
        raise NoMatch(f"the head size {head_dim} is not a multiple of 8, which GroupQueryAttention needs")
    return len(keys)


def _report(layers: list[LayerMatch], emitted: list[Emitted], max_len: int | None, has_keep: bool) -> FuseReport:
    rotated = [e for e in emitted if e.has_rotation]
    warnings = [] if has_keep else ["the LM head was not found: it computes every row of every call"]
    if any(not e.is_rotation_folded for e in rotated):
        warnings.append("the rotary embedding stays outside the attention operator, which costs some speed")
    return FuseReport(
        num_layers=len(layers),
        num_kv_heads=layers[0].k.count,
        head_dim=layers[0].k.head_dim,
        rotary_folded=bool(rotated) and all(e.is_rotation_folded for e in rotated),
        qkv_packed=all(e.is_packed for e in emitted),
        windows=tuple(layer.scores.window for layer in layers),
        softcap=layers[0].scores.softcap,
        max_len=max_len,
        warnings=tuple(warnings),
    )
