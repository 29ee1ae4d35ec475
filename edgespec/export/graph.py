"""The ONNX graph between the steps: fused or not, tidied, quantised, saved. Owns the fall-back to the growing cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgespec.bundle import CacheKind
from edgespec.errors import ExportError
from edgespec.export.convert import PlainGraph
from edgespec.export.fuse import NoMatch, add_hidden, fuse, keep_rows, tidy
from edgespec.export.half import to_half
from edgespec.export.options import BITS
from edgespec.export.quantize import quantize
from edgespec.export.reference import MOST_TOKENS
from edgespec.export.source import Source
from edgespec.export.write import save_graph

_PAST_KEY = re.compile(r"past_key_values\.\d+\.key")


@dataclass(frozen=True, slots=True)
class FusedGraph:
    """A float32 graph with its head and Gemms as plain MatMuls.

    Attributes:
        path: of the graph; its weights lie beside it.
        cache: `shared` where attention was fused.
        context_length: most tokens, which the graph's own tables may limit further than was asked.
        reason: why attention was not fused, or None where it was.
    """

    path: Path
    cache: CacheKind
    context_length: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes that the graph's inputs and outputs state."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def fuse_graph(
    plain: PlainGraph,
    source: Source,
    context_length: int,
    folder: Path,
    warn: Callable[[str], None],
    hidden_layers: Sequence[int] | None = None,
) -> FusedGraph:
    """Fuse all layers of optimum's graph, or none of them, with a warning that says which one and why.

    Args:
        plain: as it was traced.
        source: the model it was made of.
        context_length: most tokens that are wanted.
        folder: an empty one for the result.
        hidden_layers: whose input a draft will read; the graph has the output `hidden` then.
    Raises:
        ExportError: one of these layers cannot be found.
    """
    cache: CacheKind = "shared"
    reason: str | None = None
    try:
        model, report = fuse(plain.load(), source.config, context_length)
    except NoMatch as error:
        reason = str(error)
        warn(
            f"{source.name} cannot be fused ({reason}): it is exported with a growing cache, and each step will be two "
            "to four times slower"
        )
        model, cache = plain.load(), "growing"
        context_length = _limit_to_window(source, context_length, warn)
        if not keep_rows(model):
            warn(f"{source.name}: its LM head was not found, so it is computed for every row of a prompt")
    else:
        context_length = min(context_length, report.max_len or context_length)
        for line in report.warnings:
            warn(line)
    tidy(model)
    if hidden_layers is not None:
        add_hidden(model, hidden_layers)
    return FusedGraph(save_graph(model, folder), cache, context_length, reason)


def _limit_to_window(source: Source, context_length: int, warn: Callable[[str], None]) -> int:
    """Stay inside a sliding window that the check text does not reach: an unfused graph may have lost it."""
    window = source.config.get("sliding_window")
    if not window or source.config.get("use_sliding_window") is False or not MOST_TOKENS < window < context_length:
        return context_length
    warn(f"{source.name}: the context is limited to its sliding window of {window} tokens, which could not be checked")
    return int(window)


def quantize_graph(
    path: Path, folder: Path, precision: str, block: int, advance: Callable[[float], None]
) -> tuple[Path, dict[str, Any]]:
    """Quantise a saved float32 graph into `folder`; its weights are read one at a time.

    Returns:
        The new graph's path, and what became of the weights, for the manifest.
    """
    model = ir.load(path)
    report = quantize(model, BITS[precision], block, advance)
    findings = {"num_quantized": len(report.quantized), "kept_fp32": report.kept, "embedding": report.embedding}
    return save_graph(model, folder), findings


def halve_graph(path: Path, folder: Path, advance: Callable[[float], None]) -> Path:
    """Write a saved float32 graph into `folder` in float16 and return the new graph's path."""
    model = ir.load(path)
    to_half(model, advance)
    return save_graph(model, folder)


def graph_dimensions(path: Path) -> Dimensions:
    """Read the sizes off a saved graph.

    Raises:
        ExportError: the graph leaves one of them open.
    """
    graph = ir.load(path).graph
    keys = [value for value in graph.inputs if _PAST_KEY.fullmatch(value.name or "")]
    logits = next((value for value in graph.outputs if value.name == "logits"), None)
    if not keys or logits is None:
        raise ExportError(f"{path.name} has no past_key_values inputs or no logits: it is no decoder with a cache")
    heads, head_dim, vocabulary = _size(keys[0], 1), _size(keys[0], 3), _size(logits, 2)
    return Dimensions(len(keys), heads, head_dim, vocabulary)


def _size(value: ir.Value, axis: int) -> int:
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise ExportError(f"{value.name} has the shape {value.shape}, and dimension {axis} must be a number")
    return size
