"""`import_bundle`: a bundle of graphs that somebody else made. Owns the order of the steps.

What a graph computes is compared with the same graph as it came, run whole and without a cache: nothing else is
known about it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgespec.bundle import ModelInfo
from edgespec.contracts import Tokens
from edgespec.errors import ExportError
from edgespec.export.adapt import (
    Weights,
    adapt_rows,
    cache_kind,
    fix_cache_sizes,
    has_shared_attention,
    inspect_weights,
    require_known_inputs,
    share_cache,
)
from edgespec.export.check import LIMITS, Figures, Limits, check_graph, find_row_rule, measure_steps, record_probe
from edgespec.export.convert import require_extra
from edgespec.export.disk import require_space
from edgespec.export.distilled import find_distilled
from edgespec.export.folder import OnnxFolder, read_onnx_folder
from edgespec.export.foreign import check_decoder, read_foreign
from edgespec.export.fuse import NoMatch, fuse
from edgespec.export.graph import graph_dimensions
from edgespec.export.options import resolve_context
from edgespec.export.pair import compare_sources
from edgespec.export.pipeline import ExportReport, make_manifest, pair_overlap
from edgespec.export.progress import Progress, SilentProgress
from edgespec.export.reference import Reference, check_text_tokens
from edgespec.export.write import Workspace, save_graph, workspace
from edgespec.memory import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class _Made:
    info: ModelInfo
    check: dict[str, Any]
    rows: Path


def import_bundle(
    folder: str | Path,
    out: Path,
    *,
    draft: str | Path | None = None,
    variant: str | None = None,
    draft_variant: str | None = None,
    max_context: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Make a bundle of ONNX folders: of onnxruntime-genai's builder, of optimum, or as they lie on the hub.

    Args:
        folder: the target's.
        out: the bundle's folder; appears whole at the end, or not at all. Weights are copied into it.
        draft: folder of a draft; the same one is taken only once.
        variant, draft_variant: which of several graphs (`q4` for `model_q4.onnx`).
        max_context: most tokens of the context; by default what the folder says, up to 32,768.
        overwrite: replace a bundle that is there already.
        progress: is told about every step.
    Raises:
        ExportError: a folder or a graph cannot be used, or does not compute the same with its cache as without.
        IncompatibleDraftError: the draft has other tokens.
        MissingExtraError: the `export` extra is not installed.
    """
    started = time.monotonic()
    require_extra()
    if draft is not None and find_distilled(str(draft)) is not None:
        raise ExportError(
            f"{draft} was distilled and goes on from inside its target, whose graph must be made for that: use "
            "`edgespec export` with the target's weights"
        )
    target = read_onnx_folder(Path(folder).expanduser(), variant)
    other = None if draft is None else read_onnx_folder(Path(draft).expanduser(), draft_variant or variant)
    job = _Importer(progress or SilentProgress(), max_context)
    with workspace(out, overwrite) as space:
        space.clear()
        if other is not None:
            job.compare_tokens(target, other)
        made = job.take(target, "target", space)
        check = dict(made.check)
        second: _Made | None = None
        if other is not None:
            is_same = other.graph.samefile(target.graph)
            second = made if is_same else job.take(other, "draft", space)
            figures = {} if is_same else second.check
            check |= figures | {"pair_overlap": pair_overlap(made.rows, second.rows)}
        job.progress.step("writing the bundle")
        manifest = make_manifest(space.bundle, target, [made.info, *([second.info] if second else [])], check)
        space.publish(manifest)
    size = sum(info.size for info in manifest.files.values())
    return ExportReport(out, manifest, size, time.monotonic() - started, peak_memory_bytes(), job.warnings)


class _Importer:
    """One import under way."""

    def __init__(self, progress: Progress, max_context: int | None) -> None:
        self.progress, self.max_context = progress, max_context
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.progress.warn(text)

    def compare_tokens(self, target: OnnxFolder, draft: OnnxFolder) -> None:
        for line in compare_sources(target, draft):
            self.warn(line)

    def take(self, folder: OnnxFolder, role: str, space: Workspace) -> _Made:
        """Bring one graph into the bundle."""
        self.progress.step(f"reading {folder.name}")
        size = sum(file.stat().st_size for file in folder.graph.parent.iterdir() if file.is_file())
        require_space(space.work, size)
        weights = inspect_weights(_read(folder))
        context, remark = self._context(folder)
        if remark is not None:
            self.warn(f"{folder.name}: {remark}")
        tokens = check_text_tokens(folder.tokenizer, context, folder.name)
        self.progress.step(f"running {folder.name} as it came")
        reference = _reference(folder, tokens, space.work / f"{role}-reference.npy")
        rows = space.work / f"{role}-rows.npy"
        path, context, figures, reason = self._adapt(folder, weights, context, reference, space.bundle / role, rows)
        rule = find_row_rule(path, context, reference)
        if rule == "none":
            self.warn(f"the {role}'s logits depend on how rows are batched on this machine: no exact mode with it")
        info = _model_info(folder, f"{role}/{path.name}", path, context, weights)
        check: dict[str, Any] = {role: figures.as_dict(), f"{role}_probe": record_probe(path, context)}
        check[f"{role}_steps"] = measure_steps(path, context)
        if reason is not None:
            check[f"{role}_unfused"] = reason
        return _Made(replace(info, row_invariance=rule), check, rows)

    def _context(self, folder: OnnxFolder) -> tuple[int, str | None]:
        config = {**folder.config, "max_position_embeddings": folder.context_length}
        return resolve_context(config, self.max_context)

    def _adapt(
        self, folder: OnnxFolder, weights: Weights, context: int, reference: Reference, place: Path, rows: Path
    ) -> tuple[Path, int, Figures, str | None]:
        """The fastest form of the graph that computes what it computed before, and why it is not fused if it is not."""
        limits, reason = _limits(weights.precision), None
        if not has_shared_attention(_read(folder)):
            try:
                path, longest = self._fuse(folder, context, place)
                return path, longest, self._check(path, longest, reference, limits, rows), None
            except (NoMatch, ExportError) as error:
                reason = str(error)
                self.warn(f"{folder.name} is not fused ({reason}): it keeps its growing cache, which is slower")
        model = _read(folder)
        if has_shared_attention(model):
            context = share_cache(model, folder.head_dim, context)
        else:
            fix_cache_sizes(model, folder.heads, folder.head_dim)
            if not adapt_rows(model):
                self.warn(f"{folder.name}: its LM head was not found, so it is computed for every row of a prompt")
        require_known_inputs(model)
        path = save_graph(model, place)
        return path, context, self._check(path, context, reference, limits, rows), reason

    def _fuse(self, folder: OnnxFolder, context: int, place: Path) -> tuple[Path, int]:
        self.progress.step(f"fusing the attention of {folder.name}")
        model = _read(folder)
        fix_cache_sizes(model, folder.heads, folder.head_dim)
        model, report = fuse(model, folder.config, context)
        return save_graph(model, place), min(context, report.max_len or context)

    def _check(self, path: Path, context: int, reference: Reference, limits: Limits, rows: Path) -> Figures:
        self.progress.step(f"checking the {path.parent.name}")
        return check_graph(path, context, reference, limits, rows)


def _read(folder: OnnxFolder) -> ir.Model:
    """A new copy of the checked graph, its inputs and outputs under their usual names."""
    model = read_foreign(folder.graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = folder.names.get(value.name or "", value.name)
    check_decoder(folder.graph, model)
    return model


def _limits(precision: str) -> Limits:
    """A graph against itself: only the order of additions may differ, which rounded activations magnify."""
    known = LIMITS.get(precision, LIMITS["int8"])
    return replace(known, mean_tv=known.path_tv, perplexity=LIMITS["int8"].perplexity)


def _reference(folder: OnnxFolder, tokens: Tokens, file: Path) -> Reference:
    """Logits of the graph as it came, of the whole text in one call with an empty cache."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    try:
        session = ort.InferenceSession(str(folder.graph), options, providers=["CPUExecutionProvider"])
        name = next((theirs for theirs, ours in folder.names.items() if ours == "logits"), "logits")
        logits = session.run([name], {i.name: _feed(folder, i, tokens) for i in session.get_inputs()})[0][0]
    except ExportError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class but this one
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"{folder.graph}: ONNX Runtime cannot run the graph ({reason})") from error
    if logits.ndim != 2 or len(logits) != len(tokens):
        raise ExportError(f"{folder.graph} gives logits of the shape {logits.shape} for {len(tokens)} tokens")
    np.save(file, logits.astype(np.float32))
    return Reference(tokens, np.load(file, mmap_mode="r"))


def _feed(folder: OnnxFolder, value: Any, tokens: Tokens) -> Any:
    """What an input of the original graph holds for a whole text."""
    name = folder.names.get(value.name, value.name)
    integers = np.int32 if value.type == "tensor(int32)" else np.int64
    if name.startswith("past_key_values."):
        heads, head_dim = (n if isinstance(n, int) else None for n in (value.shape[1], value.shape[3]))
        shape = (1, heads or folder.heads, 0, head_dim or folder.head_dim)
        if None in shape:
            raise ExportError(f"{name} leaves the size of a head open, and no configuration beside it says it")
        return np.zeros(shape, np.float16 if value.type == "tensor(float16)" else np.float32)
    known = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, len(tokens)), integers),
        "position_ids": np.arange(len(tokens), dtype=integers)[None],
        "num_logits_to_keep": np.zeros([1] * len(value.shape), integers),
        "logits_to_keep": np.zeros([1] * len(value.shape), integers),
    }
    if name not in known:
        raise ExportError(f"{folder.graph} has an input {name} that a decoder does not need; choose another variant")
    return known[name].astype(integers)


def _model_info(folder: OnnxFolder, name: str, path: Path, context: int, weights: Weights) -> ModelInfo:
    model = ir.load(path)
    dimensions = graph_dimensions(path)
    return ModelInfo(
        path=name,
        cache=cache_kind(model),
        num_layers=dimensions.num_layers,
        num_kv_heads=dimensions.num_kv_heads,
        head_dim=dimensions.head_dim,
        vocab_size=dimensions.vocab_size,
        context_length=context,
        precision=weights.precision,
        block_size=weights.block_size,
        row_invariance="none",
        num_parameters=weights.count,
        source=folder.origin,
        licence=folder.licence,
    )
