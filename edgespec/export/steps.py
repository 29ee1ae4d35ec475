"""The two long steps of an export: a model's float32 graph, and that graph in its final precision. Each is done once:
what a killed export had finished is taken from the journal.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.bundle import CacheKind, ModelInfo
from edgespec.export.check import LIMITS, check_graph, find_row_rule, measure_steps, record_probe
from edgespec.export.convert import convert
from edgespec.export.disk import require_space
from edgespec.export.graph import FusedGraph, fuse_graph, graph_dimensions, halve_graph, quantize_graph
from edgespec.export.journal import Journal, inputs_key
from edgespec.export.options import Plan, Precision, layers_to_check, resolve_context, resolve_precision
from edgespec.export.progress import Progress
from edgespec.export.reference import Reference, check_tokens, compute_reference
from edgespec.export.source import Source
from edgespec.export.write import GRAPH, Workspace, copy_graph
from edgespec.params import RowInvariance

_FLOAT_COPIES = 2.2  # on the disk at once: the fused graph, and one in the bundle; some room for the rest


@dataclass(frozen=True, slots=True)
class Graph:
    """A converted source: its float32 graph on disk, fused if that was possible, and what it must compute.

    Attributes:
        path: of the graph.
        reason: why it was not fused, or None.
        check: figures of the float32 check.
        rows: file with the graph's logits of the check text (.npy); None where only a part of it was run.
        hidden_layers: whose input the graph gives to a draft; None where it has no such output.
    """

    source: Source
    path: Path
    cache: CacheKind
    context_length: int
    reason: str | None
    reference: Reference
    check: dict[str, Any]
    rows: Path | None
    hidden_layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A graph in its final precision, in the bundle: for the manifest, and its logits of the check text."""

    info: ModelInfo
    check: dict[str, Any]
    rows: Path


@dataclass(slots=True)
class Job:
    """One export under way."""

    plan: Plan
    space: Workspace
    progress: Progress
    warnings: list[str] = field(default_factory=list)
    journal: Journal | None = None

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.progress.warn(text)

    def folder(self, name: str) -> Path:
        """An empty folder for a step, whatever a killed export left in its place."""
        path = self.space.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def open_journal(self, files: Iterable[Path]) -> None:
        """Look for finished steps of the same plan and files."""
        self.progress.step("reading the weights' hashes")
        self.journal = Journal(self.space.work, inputs_key(self.plan, files))
        if self.journal.is_empty:
            self.space.clear()

    def finished(self, step: str) -> dict[str, Any] | None:
        """What a step found out that a killed export finished; its warnings are said again."""
        found = None if self.journal is None else self.journal.get(step)
        if found is not None:
            self.progress.note(f"taken from an export that was killed: {step}")
            for line in found["warnings"]:
                self.warn(line)
        return found

    def finish(self, step: str, found: Mapping[str, Any], first_warning: int) -> None:
        if self.journal is not None:
            self.journal.put(step, {**found, "warnings": self.warnings[first_warning:]})


def prepare(job: Job, source: Source, role: str, hidden_layers: tuple[int, ...] | None = None) -> Graph:
    """Convert, fuse, and hold the float32 graph tightly against the original, before anything is rounded."""
    found = job.finished(f"{role} in fp32")
    if found is None:
        first = len(job.warnings)
        found = _convert(job, source, role, hidden_layers)
        job.finish(f"{role} in fp32", found, first)
    work = job.space.work
    tokens = check_tokens(source, found["context_length"])
    return Graph(
        source,
        work / f"{role}-fp32" / GRAPH,
        found["cache"],
        found["context_length"],
        found["reason"],
        Reference(tokens, np.load(work / f"{role}-reference.npy", mmap_mode="r")),
        found["check"],
        work / f"{role}-fp32.npy" if found["is_whole"] else None,
        hidden_layers,
    )


def _convert(job: Job, source: Source, role: str, hidden_layers: tuple[int, ...] | None) -> dict[str, Any]:
    require_space(job.space.work, int(_FLOAT_COPIES * 4 * source.num_parameters))
    context_length, remark = resolve_context(source.config, job.plan.max_context)
    if remark is not None:
        job.warn(f"{source.name}: {remark}")
    num_layers = layers_to_check(source.config, source.num_parameters)
    check: dict[str, Any] = {}
    if num_layers is not None:
        check = _check_part(job, source, role, context_length, num_layers)
    fused = _fuse(job, source, role, context_length, hidden_layers=hidden_layers)
    job.progress.step(f"running {source.name} in torch")
    tokens = check_tokens(source, fused.context_length)
    reference = compute_reference(source, tokens, job.space.work / f"{role}-reference.npy")
    if num_layers is None:
        job.progress.step(f"checking {source.name} in fp32")
        rows = job.space.work / f"{role}-fp32.npy"
        check = check_graph(fused.path, fused.context_length, reference, LIMITS["fp32"], rows).as_dict()
    found = {"cache": fused.cache, "context_length": fused.context_length, "reason": fused.reason}
    return found | {"check": check, "is_whole": num_layers is None}


def _fuse(
    job: Job,
    source: Source,
    role: str,
    context_length: int,
    num_layers: int | None = None,
    hidden_layers: tuple[int, ...] | None = None,
) -> FusedGraph:
    part = "" if num_layers is None else f"-{num_layers}"
    job.progress.step(f"converting {source.name} to ONNX{part and f' ({num_layers} layers)'}")
    plain = convert(source.folder, source.config, job.folder(f"{role}-onnx"), num_layers)
    job.progress.step(f"fusing the attention of {source.name}")
    warn = job.warn if num_layers is None else lambda line: None  # the whole model will say the same
    return fuse_graph(plain, source, context_length, job.folder(f"{role}-fp32{part}"), warn, hidden_layers)


def _check_part(job: Job, source: Source, role: str, context_length: int, num_layers: int) -> dict[str, Any]:
    """Check the first layers and the head in float32, of a model that is too large to run whole."""
    fused = _fuse(job, source, role, context_length, num_layers)
    job.progress.step(f"checking {num_layers} layers of {source.name} in fp32")
    tokens = check_tokens(source, fused.context_length)
    reference = compute_reference(source, tokens, job.space.work / f"{role}-part.npy", num_layers)
    rows = job.space.work / f"{role}-part-rows.npy"
    figures = check_graph(fused.path, fused.context_length, reference, LIMITS["fp32"], rows)
    shutil.rmtree(fused.path.parent)
    return figures.as_dict() | {"layers": num_layers}


def finish(job: Job, graph: Graph, role: str, precision: Precision, block_size: int | None) -> Made:
    """The graph of one role in its final precision, inside the bundle, checked."""
    found = job.finished(f"{role} in its precision")
    if found is None:
        first = len(job.warnings)
        shutil.rmtree(job.space.bundle / role, ignore_errors=True)
        found = _finish(job, graph, role, *resolve_precision(precision, block_size, graph.source.num_parameters))
        job.finish(f"{role} in its precision", found, first)
    return Made(read_info(found["info"]), found["check"], Path(found["rows"].format(work=job.space.work)))


def read_info(found: dict[str, Any]) -> ModelInfo:
    """What a journal has of a `ModelInfo`, whose tuple was a list there."""
    layers = found["hidden_layers"]
    return ModelInfo(**{**found, "hidden_layers": None if layers is None else tuple(layers)})


def _finish(job: Job, graph: Graph, role: str, chosen: str, block: int | None) -> dict[str, Any]:
    folder, progress = job.space.bundle / role, job.progress
    check: dict[str, Any] = {f"{role}_fp32": graph.check}
    rows, name = graph.rows, f"{role}-fp32.npy"
    if chosen == "fp32":
        path = copy_graph(graph.path, folder)
    elif chosen == "fp16":
        progress.step(f"writing the {role} in fp16")
        path = halve_graph(graph.path, folder, progress.advance)
        rows, name = None, f"{role}-rows.npy"
    else:
        assert block is not None
        progress.step(f"quantising the {role} to {chosen}, blocks of {block}")
        path, check[f"{role}_quantization"] = quantize_graph(graph.path, folder, chosen, block, progress.advance)
        for line in check[f"{role}_quantization"]["kept_fp32"]:
            job.warn(f"the {role} keeps a weight in fp32: {line}")
        rows, name = None, f"{role}-rows.npy"
    if rows is None:
        progress.step(f"checking the {role} in {chosen}")
        file = job.space.work / name
        figures = check_graph(path, graph.context_length, graph.reference, LIMITS[chosen], file).as_dict()
    else:
        figures = graph.check
    check[role] = figures
    rule = _measure(job, graph, role, path, check)
    info = _model_info(graph, f"{role}/{path.name}", path, (chosen, block, rule))
    return {"info": asdict(info), "check": check, "rows": "{work}/" + name}


def _measure(job: Job, graph: Graph, role: str, path: Path, check: dict[str, Any]) -> RowInvariance:
    """What is measured of every graph beside its faithfulness: row rule, probe, cost of a step."""
    job.progress.step(f"measuring the {role}")
    rule = find_row_rule(path, graph.context_length, graph.reference)
    if rule == "none":
        job.warn(f"the {role}'s logits depend on how rows are batched on this machine: no exact mode with it")
    check[f"{role}_probe"] = record_probe(path, graph.context_length)
    check[f"{role}_steps"] = measure_steps(path, graph.context_length)
    if graph.reason is not None:
        check[f"{role}_unfused"] = graph.reason
    return rule


def _model_info(graph: Graph, name: str, path: Path, made: tuple[str, int | None, RowInvariance]) -> ModelInfo:
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
        hidden_layers=graph.hidden_layers,
    )
