"""`export_bundle`: the whole way from a source to a bundle on disk. Owns the order of the steps, and no step."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgespec import __version__
from edgespec.bundle import CacheKind, Manifest, ModelInfo, list_files
from edgespec.export.check import Figures, check_graph, find_row_rule, mean_overlap
from edgespec.export.convert import convert, require_extra
from edgespec.export.disk import require_space
from edgespec.export.graph import fuse_graph, graph_dimensions, quantize_graph
from edgespec.export.options import Plan, Precision, make_plan, resolve_context, resolve_precision
from edgespec.export.pair import check_pair
from edgespec.export.progress import Progress, SilentProgress, peak_memory_bytes
from edgespec.export.reference import Reference, check_tokens, compute_reference
from edgespec.export.source import Source, fetch_source, recipe_options
from edgespec.export.write import Workspace, copy_graph, workspace
from edgespec.params import RowInvariance

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
_FLOAT_COPIES = 3  # on the disk at once: the plain graph or the draft's, the fused one, and one in the bundle


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: of the bundle.
        manifest: as written; `manifest.check` has the figures.
        size: of the bundle's files, bytes.
        seconds: it took.
        peak_memory: most bytes that this process ever held, or None where the system does not tell.
        warnings: what was degraded, one line each.
    """

    path: Path
    manifest: Manifest
    size: int
    seconds: float
    peak_memory: int | None
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A converted source: its float32 graph on disk, fused if that was possible, and what it must compute.

    Attributes:
        rows: file with the graph's logits of the check text (.npy).
    """

    source: Source
    path: Path
    cache: CacheKind
    context_length: int
    reference: Reference
    figures: Figures
    rows: Path


@dataclass(frozen=True, slots=True)
class _Made:
    """A graph in its final precision, in the bundle: for the manifest, and its logits of the check text."""

    info: ModelInfo
    check: dict[str, Any]
    rows: Path


@dataclass(frozen=True, slots=True)
class _Job:
    """One export under way."""

    plan: Plan
    space: Workspace
    progress: Progress
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.progress.warn(text)

    def folder(self, name: str) -> Path:
        path = self.space.work / name
        path.mkdir()
        return path


def export_bundle(
    source: str,
    out: Path,
    *,
    draft: str | None = None,
    precision: Precision | None = None,
    block_size: int | None = None,
    draft_precision: Precision | None = None,
    draft_block_size: int | None = None,
    max_context: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Make a bundle of a target and, if wanted, a draft.

    An option that is None is the recipe's, where the source is a recipe, and the default otherwise.

    Args:
        source: a Hugging Face folder, a hub id, a GGUF file or the name of a recipe.
        out: the bundle's folder; appears whole at the end, or not at all.
        draft: a source as well (the same one is converted only once), or `none`.
        precision: of the weights; `auto`, the default, is int8 under a billion parameters and int4 above.
        block_size: weights that share a scale, 32 or 128; by default 128 for int8 and 32 for int4.
        draft_precision, draft_block_size: the same for the draft.
        max_context: most tokens of the context; by default the model's, up to 32,768.
        overwrite: replace a bundle that is there already. Nothing but a bundle is ever replaced.
        progress: is told about every step.
    Raises:
        ConfigError: an option has a value that cannot work.
        ExportError: the source, the conversion, a check or the disk failed.
        IncompatibleDraftError: the draft has other tokens.
        MissingExtraError: the `export` extra is not installed.
    """
    started = time.monotonic()
    require_extra()
    given = {"draft": draft, "precision": precision, "block_size": block_size, "max_context": max_context}
    given |= {"draft_precision": draft_precision, "draft_block_size": draft_block_size}
    plan = make_plan(source, given, recipe_options(source))
    with workspace(out, overwrite) as space:
        job = _Job(plan, space, progress or SilentProgress())
        manifest = _build(job)
        space.publish(manifest)
    size = sum(info.size for info in manifest.files.values())
    return ExportReport(out, manifest, size, time.monotonic() - started, peak_memory_bytes(), job.warnings)


def _build(job: _Job) -> Manifest:
    """Everything but the last rename."""
    plan = job.plan
    source = _fetch(job, plan.source, "target")
    draft_source = _fetch_draft(job, source)
    graph = _prepare(job, source, "target")
    target = _finish(job, graph, "target", plan.precision, plan.block_size)
    draft: _Made | None = None
    check = dict(target.check)
    if draft_source is not None:
        draft_graph = graph if draft_source is source else _prepare(job, draft_source, "draft")
        draft = _finish(job, draft_graph, "draft", plan.draft_precision, plan.draft_block_size)
        check |= draft.check | {"pair_overlap": _overlap(target, draft)}
    job.progress.step("writing the bundle")
    return _manifest(job, source, target.info, draft.info if draft else None, check)


def _fetch(job: _Job, name: str, role: str) -> Source:
    job.progress.step(f"fetching {name}")
    source = fetch_source(name, job.folder(f"{role}-source"))
    job.progress.note(f"{role}: {source.origin}; licence {source.licence or 'unknown'}")
    return source


def _fetch_draft(job: _Job, target: Source) -> Source | None:
    name = job.plan.draft
    if name is None or _is_same(name, job.plan.source):
        return target if name is not None else None
    draft = _fetch(job, name, "draft")
    lines = check_pair(
        Tokenizer.from_file(str(target.tokenizer)),
        Tokenizer.from_file(str(draft.tokenizer)),
        target.eos_token_ids,
        draft.eos_token_ids,
        target.chat_template,
        draft.chat_template,
    )
    for line in lines:
        job.warn(line)
    return draft


def _is_same(one: str, other: str) -> bool:
    paths = [Path(text).expanduser() for text in (one, other)]
    return one == other or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def _prepare(job: _Job, source: Source, role: str) -> _Graph:
    """Convert, fuse, and hold the float32 graph tightly against the original, before anything is rounded."""
    require_space(job.space.work, _FLOAT_COPIES * 4 * source.num_parameters)
    context_length, remark = resolve_context(source.config, job.plan.max_context)
    if remark is not None:
        job.warn(f"{source.name}: {remark}")
    job.progress.step(f"converting {source.name} to ONNX")
    plain = convert(source.folder, source.config, job.folder(f"{role}-onnx"))
    job.progress.step(f"fusing the attention of {source.name}")
    fused = fuse_graph(plain, source, context_length, job.folder(f"{role}-fp32"), job.warn)
    for file in plain.parent.iterdir():
        file.unlink()  # as large as the model
    job.progress.step(f"running {source.name} in torch")
    tokens = check_tokens(source, fused.context_length)
    reference = compute_reference(source, tokens, job.space.work / f"{role}-reference.npy")
    job.progress.step(f"checking {source.name} in fp32")
    rows = job.space.work / f"{role}-fp32.npy"
    figures = check_graph(fused.path, fused.context_length, reference, "fp32", rows)
    return _Graph(source, fused.path, fused.cache, fused.context_length, reference, figures, rows)


def _finish(job: _Job, graph: _Graph, role: str, precision: Precision, block_size: int | None) -> _Made:
    """The graph of one role in its final precision, inside the bundle, checked."""
    chosen, block = resolve_precision(precision, block_size, graph.source.num_parameters)
    folder, progress = job.space.bundle / role, job.progress
    check: dict[str, Any] = {f"{role}_fp32": graph.figures.as_dict()}
    figures, rows = graph.figures, graph.rows
    if block is None:
        path = copy_graph(graph.path, folder)
    else:
        progress.step(f"quantising the {role} to {chosen}, blocks of {block}")
        path, check[f"{role}_quantization"] = quantize_graph(graph.path, folder, chosen, block, progress.advance)
        for line in check[f"{role}_quantization"]["kept_fp32"]:
            job.warn(f"the {role} keeps a weight in fp32: {line}")
        progress.step(f"checking the {role} in {chosen}")
        rows = job.space.work / f"{role}-rows.npy"
        figures = check_graph(path, graph.context_length, graph.reference, chosen, rows)
    check[role] = figures.as_dict()
    progress.step(f"looking for the row rule of the {role}")
    rule = find_row_rule(path, graph.context_length, graph.reference)
    if rule == "none":
        job.warn(f"the {role}'s logits depend on how rows are batched on this machine: no exact mode with it")
    return _Made(_model_info(graph, f"{role}/{path.name}", path, (chosen, block, rule)), check, rows)


def _model_info(graph: _Graph, name: str, path: Path, made: tuple[str, int | None, RowInvariance]) -> ModelInfo:
    precision, block, rule = made
    source, dimensions = graph.source, graph_dimensions(path)
    return ModelInfo(
        path=name,
        cache=graph.cache,
        num_layers=dimensions.num_layers,
        num_kv_heads=dimensions.num_kv_heads,
        head_dim=dimensions.head_dim,
        vocab_size=dimensions.vocab_size,
        context_length=graph.context_length,
        precision=precision,
        block_size=block,
        row_invariance=rule,
        num_parameters=source.num_parameters,
        source=source.origin,
        licence=source.licence,
    )


def _overlap(target: _Made, draft: _Made) -> float:
    """How much of the target's probability the draft agrees on: the acceptance to expect at temperature 1."""
    rows = [np.load(made.rows, mmap_mode="r") for made in (target, draft)]
    count = min(len(rows[0]), len(rows[1]))
    return mean_overlap(rows[0][:count], rows[1][:count])


def _manifest(job: _Job, source: Source, target: ModelInfo, draft: ModelInfo | None, check: dict[str, Any]) -> Manifest:
    folder = job.space.bundle
    (folder / TOKENIZER).write_bytes(source.tokenizer.read_bytes())
    if source.chat_template is not None:
        (folder / TEMPLATE).write_text(source.chat_template, encoding="utf-8", newline="\n")
    where = {"onnxruntime": version("onnxruntime"), "machine": platform.machine(), "system": platform.system()}
    return Manifest(
        name=source.name,
        created_by=f"edgespec {__version__}",
        target=target,
        draft=draft,
        eos_token_ids=source.eos_token_ids,
        tokenizer=TOKENIZER,
        chat_template=TEMPLATE if source.chat_template is not None else None,
        special_tokens=source.special_tokens,
        files=list_files(folder),
        check=check | {"measured_on": where},
    )
