"""`export_bundle`: the whole way from a source to a bundle on disk. Owns the order of the steps, and no step."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from edgespec import __version__
from edgespec.bundle import Manifest, ModelInfo, list_files
from edgespec.errors import ConfigError
from edgespec.export.check import mean_overlap
from edgespec.export.convert import require_extra
from edgespec.export.distilled import Distilled, find_distilled, read_distilled
from edgespec.export.draft import Role, check_target, make_draft
from edgespec.export.options import Precision, make_plan, resolve_precision
from edgespec.export.pair import compare_sources
from edgespec.export.progress import Progress, SilentProgress
from edgespec.export.share import share_weights
from edgespec.export.source import Source, fetch_source, recipe_options
from edgespec.export.steps import Graph, Job, Made, finish, prepare
from edgespec.export.write import workspace
from edgespec.memory import peak_memory_bytes

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"


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


class Texts(Protocol):
    """What a bundle says about text, and its name."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Path: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_tokens(self) -> dict[str, str]: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the weights come from; `draft` is the same object as `target` where both are one model."""

    target: Source
    draft: Source | Distilled | None
    inner: Distilled | None = None

    def layers(self, source: Source) -> tuple[int, ...] | None:
        """Of a model, those from whose input something in the bundle drafts."""
        drafts = [self.draft] if source is self.target else []
        drafts += [self.inner] if source is self.draft else []
        return next((d.hidden_layers for d in drafts if isinstance(d, Distilled)), None)


def export_bundle(
    source: str,
    out: Path,
    *,
    draft: str | None = None,
    inner_draft: str | None = None,
    precision: Precision | None = None,
    block_size: int | None = None,
    draft_precision: Precision | None = None,
    draft_block_size: int | None = None,
    max_context: int | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Make a bundle of a target and, if wanted, a draft.

    A killed export is taken up where it was by the next one of the same models to the same place. An option that is
    None is the recipe's, where the source is a recipe, and the default otherwise.

    Args:
        source: a Hugging Face folder, a hub id, a GGUF file or the name of a recipe.
        out: the bundle's folder; appears whole at the end, or not at all.
        draft: a source as well (the same one is converted only once), a folder that `edgespec distill` made or its
            name among those that travel with edgespec, or `none`.
        inner_draft: what drafts for the draft, where that is a model that reads text: a folder that `edgespec distill`
            made for it, or a name as above.
        precision: of the weights; `auto`, the default, is int8 under a billion parameters and int4 above.
        block_size: weights that share a scale, 32 or 128; by default 128.
        draft_precision, draft_block_size: the same for the draft.
        max_context: most tokens of the context; by default the model's, up to 32,768.
        allow_pickle: read pickled weights where there are no safetensors; torch's restricted reader reads them.
        overwrite: replace a bundle that is there already. Nothing but a bundle is ever replaced.
        progress: is told about every step.
    Raises:
        ConfigError: an option has a value that cannot work, or there is no such inner draft.
        ExportError: the source, the conversion, a check or the disk failed.
        IncompatibleDraftError: the draft has other tokens.
        MissingExtraError: the `export` extra is not installed.
    """
    started = time.monotonic()
    require_extra()
    given = {
        "draft": draft,
        "inner_draft": inner_draft,
        "precision": precision,
        "block_size": block_size,
        "max_context": max_context,
    }
    given |= {"draft_precision": draft_precision, "draft_block_size": draft_block_size, "allow_pickle": allow_pickle}
    plan = make_plan(source, given, recipe_options(source))
    with workspace(out, overwrite) as space:
        job = Job(plan, space, progress or SilentProgress())
        manifest = _build(job)
        space.publish(manifest)
    size = sum(info.size for info in manifest.files.values())
    return ExportReport(out, manifest, size, time.monotonic() - started, peak_memory_bytes(), job.warnings)


def _build(job: Job) -> Manifest:
    """Everything but the last rename."""
    plan = job.plan
    sources = _fetch_all(job)
    graph = prepare(job, sources.target, "target", sources.layers(sources.target))
    if isinstance(sources.draft, Distilled):
        check_target(sources.draft, graph)
    target = finish(job, graph, "target", plan.precision, plan.block_size)
    models, check = [target.info], dict(target.check)
    if sources.draft is not None:
        last = target
        drafts = list(_make_drafts(job, sources, graph, target))  # all of them: sharing moves files
        for made, role in zip(drafts, get_args(Role), strict=False):
            check |= made.check
            last = _share(job, last, made, role)
            models.append(last.info)
    job.progress.step("writing the bundle")
    return make_manifest(job.space.bundle, sources.target, models, check)


def _make_drafts(job: Job, sources: _Sources, graph: Graph, target: Made) -> Iterator[Made]:
    """The draft, and what drafts for it if that is wanted."""
    if isinstance(sources.draft, Distilled):
        yield make_draft(job, sources.draft, graph, target)
        return
    assert sources.draft is not None
    draft_graph = graph
    if sources.draft is not sources.target:
        draft_graph = prepare(job, sources.draft, "draft", sources.layers(sources.draft))
    if sources.inner is not None:
        check_target(sources.inner, draft_graph)
    draft = _make_draft(job, sources, draft_graph, target)
    yield draft
    if sources.inner is not None:
        yield make_draft(job, sources.inner, draft_graph, draft, "inner_draft")


def _make_draft(job: Job, sources: _Sources, graph: Graph, target: Made) -> Made:
    """A draft model in its precision; nothing new where it would be the target once more.

    Args:
        graph: the draft's.
    """
    wanted = job.plan.draft_precision, job.plan.draft_block_size
    if sources.draft is sources.target:
        resolved = resolve_precision(*wanted, sources.target.num_parameters)
        if resolved == (target.info.precision, target.info.block_size):
            job.warn("target and draft are the same model in the same precision: they share their files")
            return replace(target, check={"pair_overlap": pair_overlap(target.rows, target.rows)})
    made = finish(job, graph, "draft", *wanted)
    return replace(made, check=made.check | {"pair_overlap": pair_overlap(target.rows, made.rows)})


def _share(job: Job, target: Made, draft: Made, role: Role) -> Made:
    """The draft without the weights that the target's file has as well."""
    if draft.info.path == target.info.path:
        return draft
    folder = job.space.bundle
    path = share_weights(folder / target.info.path, folder / draft.info.path, f"{role}.onnx")
    return replace(draft, info=replace(draft.info, path=path.relative_to(folder).as_posix()))


def _fetch_all(job: Job) -> _Sources:
    """Bring both models to this disk, and look for what a killed export of them left."""
    target = _fetch(job, job.plan.source, "target")
    draft = _fetch_draft(job, target)
    inner = None if job.plan.inner_draft is None else _find_inner(job.plan.inner_draft, draft)
    different = [target, *([] if draft is target else [draft]), inner]
    job.open_journal([file for source in different if source is not None for file in source.files])
    return _Sources(target, draft, inner)


def _find_inner(name: str, draft: Source | Distilled | None) -> Distilled:
    folder = find_distilled(name)
    if folder is None:
        raise ConfigError(
            f"inner_draft is {name!r}; it must be a folder that `edgespec distill` made, or the name of one that "
            "travels with edgespec"
        )
    if not isinstance(draft, Source):
        raise ConfigError("inner_draft goes with a draft that is a model, and this draft was distilled: leave it out")
    return read_distilled(folder, draft)


def _fetch(job: Job, name: str, role: str) -> Source:
    job.progress.step(f"fetching {name}")
    source = fetch_source(name, job.folder(f"{role}-source"), allow_pickle=job.plan.allow_pickle)
    job.progress.note(f"{role}: {source.origin}; licence {source.licence or 'unknown'}")
    return source


def _fetch_draft(job: Job, target: Source) -> Source | Distilled | None:
    name = job.plan.draft
    if name is None or _is_same(name, job.plan.source):
        return target if name is not None else None
    distilled = find_distilled(name)
    if distilled is not None:
        return read_distilled(distilled, target)
    draft = _fetch(job, name, "draft")
    for line in compare_sources(target, draft):
        job.warn(line)
    return draft


def _is_same(one: str, other: str) -> bool:
    paths = [Path(text).expanduser() for text in (one, other)]
    return one == other or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def pair_overlap(target: Path, draft: Path) -> float:
    """How much of the target's probability the draft agrees on: the acceptance to expect at temperature 1.

    Args:
        target, draft: files with the logits of the check text.
    """
    rows = [np.load(file, mmap_mode="r") for file in (target, draft)]
    count = min(len(rows[0]), len(rows[1]))
    return mean_overlap(rows[0][:count], rows[1][:count])


def make_manifest(folder: Path, texts: Texts, models: Sequence[ModelInfo], check: dict[str, Any]) -> Manifest:
    """Put tokenizer and template into a bundle's folder and describe all that is in it.

    Args:
        models: the target, and then what drafts for the one before it.
    """
    target, *drafts = models
    draft, inner = (*drafts, None, None)[:2]
    (folder / TOKENIZER).write_bytes(texts.tokenizer.read_bytes())
    if texts.chat_template is not None:
        (folder / TEMPLATE).write_text(texts.chat_template, encoding="utf-8", newline="\n")
    where = {"onnxruntime": version("onnxruntime"), "machine": platform.machine(), "system": platform.system()}
    return Manifest(
        name=texts.name,
        created_by=f"edgespec {__version__}",
        target=target,
        draft=draft,
        eos_token_ids=texts.eos_token_ids,
        tokenizer=TOKENIZER,
        chat_template=TEMPLATE if texts.chat_template is not None else None,
        special_tokens=texts.special_tokens,
        files=list_files(folder),
        check=check | {"measured_on": where},
        inner_draft=inner,
    )
