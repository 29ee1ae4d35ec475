"""`distill`: the whole way from a target to a trained draft on disk. Owns the order of the steps, and no step."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgespec.distill.card import write_card
from edgespec.distill.cost import predict_cost_ratio
from edgespec.distill.data import Data, make_data, make_seen, places, rank_head
from edgespec.distill.loss import HeadMap
from edgespec.distill.options import Settings
from edgespec.distill.places import Places
from edgespec.distill.search import Pair, attendable_layers, candidates, induction_scores, search
from edgespec.distill.store import Layers, Store, Texts, write_json
from edgespec.distill.student import DraftShape, HiddenDraft, draft_shape, go_on_from, make_student
from edgespec.distill.teacher import Machine, Teacher, find_machine, load_target
from edgespec.distill.train import State, Trainer
from edgespec.distill.validate import Acceptance, baselines
from edgespec.errors import ConfigError, ExportError
from edgespec.export.convert import require_extra
from edgespec.export.distilled import (
    FORMAT_VERSION,
    MARK,
    WEIGHTS,
    Distilled,
    find_distilled,
    read_distilled,
    vocabulary_digest,
    write_distilled,
)
from edgespec.export.progress import Progress, SilentProgress
from edgespec.export.source import Source, fetch_source


@dataclass(frozen=True, slots=True)
class DistillReport:
    """What a distillation did.

    Attributes:
        path: of the draft's folder.
        layers: of the target, that the draft reads.
        cost_ratio: predicted c.
        acceptance: at the end, on validation texts.
        baselines: greedy acceptance of a bigram table and of prompt lookup on the same texts.
        tokens: by sort, to train on.
        trained_tokens, steps: of the training; tokens are places, repetitions counted.
        curve: of the validations.
        size: of the folder, bytes.
        seconds: this call took.
    """

    path: Path
    layers: Layers
    cost_ratio: float
    acceptance: Acceptance
    baselines: dict[str, float]
    tokens: dict[str, int]
    trained_tokens: int
    steps: int
    curve: list[dict[str, Any]]
    size: int
    seconds: float


@dataclass(slots=True)
class _Job:
    """One distillation under way."""

    source: Source
    settings: Settings
    machine: Machine
    work: Path
    progress: Progress
    packages: list[str]
    cost_ratio: float = 0.0
    start: Distilled | None = None


def distill(
    target: str,
    out: Path,
    settings: Settings | None = None,
    *,
    work: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DistillReport:
    """Make a draft for a target from what the target itself writes.

    A killed run is taken up where it was by the next one with the same settings.

    Args:
        target: a Hugging Face folder, a hub id, a GGUF file or a recipe; built like a llama.
        out: the draft's folder; appears whole at the end, or not at all.
        settings: how.
        work: the folder for texts and checkpoints, by default beside `out`. It stays: a later run with other
            settings of the draft finds the texts there.
        overwrite: replace a draft that is there already.
        progress: is told about every step.
    Raises:
        ConfigError: a setting cannot work, or does not go with what is in the working folder.
        ExportError: the target cannot be fetched, or is not built like a llama.
        MissingExtraError: the `export` extra is not installed.
    """
    started = time.monotonic()
    require_extra()
    _check_out(out, overwrite)
    progress = progress or SilentProgress()
    work = work or out.with_name(f"{out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    progress.step(f"fetching {target}")
    folder = work / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    source = fetch_source(target, folder)
    job = _Job(source, settings or Settings(), _machine(work), work, progress, [])
    report = _run(job, out)
    return replace(report, seconds=time.monotonic() - started)


def _run(job: _Job, out: Path) -> DistillReport:
    progress = job.progress
    job.start = _find_start(job)
    model = load_target(job.source, job.machine)
    vocab_size = _vocab_size(job.source, model)
    job.settings = _fit(job, model.config, vocab_size)
    attended = _attended_layer(job, model, vocab_size)
    pairs = candidates(model.config.num_hidden_layers) if job.start is None else [job.start.hidden_layers]
    choices = [Layers(pair, attended) for pair in pairs]
    job.cost_ratio = predict_cost_ratio(model.config, _shape(job, model, choices[0]))
    progress.note(f"a draft step is predicted to cost {job.cost_ratio:.3f} of a target step (8 bits, one row)")
    teacher = Teacher(model, job.settings, vocab_size, job.machine)
    data = _make_data(job, teacher)
    ids = rank_head(data, vocab_size, job.settings.head_size) if job.start is None else job.start.head_ids
    heads = HeadMap(ids, vocab_size)
    progress.note(f"the head has {_coverage(heads, data.check['written']):.1%} of what the target writes")
    found = baselines(data.train["written"], data.check["written"])
    progress.note(", ".join(f"{name.replace('_', ' ')} alone {value:.3f}" for name, value in found.items()))
    folder = _training_folder(job)
    layers = _search(job, teacher, choices, heads, data, folder)
    progress.step("what the target computes is read")
    make_seen(teacher, data, layers, lambda sort, done, wanted: progress.advance(done / wanted))
    train, check = places(data, layers, job.settings.depth)
    torch.manual_seed(job.settings.seed)
    student = make_student(model, _shape(job, model, layers), heads.head_ids)
    if job.start is not None:
        go_on_from(student, job.start.read_weights())
    file = folder / "checkpoint.safetensors"
    trainer = Trainer(student, heads, train, check, job.settings, job.machine, file, job.settings.budget)
    _train(job, trainer)
    progress.step("measuring acceptance")
    report = DistillReport(
        out,
        layers,
        job.cost_ratio,
        trainer.finish(),
        found,
        data.num_tokens,
        trainer.state.tokens,
        trainer.state.step,
        trainer.state.curve,
        0,
        0.0,
    )
    return _write(job, report, student, heads.head_ids)


def _shape(job: _Job, model: Any, layers: Layers) -> DraftShape:
    settings = job.settings
    return draft_shape(model.config, layers, settings.layers, settings.width, settings.head_size)


def _fit(job: _Job, config: Any, vocab_size: int) -> Settings:
    """The settings within what the target can do, and with the sizes of the draft to start from."""
    settings, start = job.settings, job.start
    if start is not None:
        settings = replace(settings, layers=start.num_blocks, width=start.intermediate_size, head_size=start.head_size)
    longest = int(getattr(config, "max_position_embeddings", settings.read_length))
    return replace(
        settings,
        head_size=min(settings.head_size, vocab_size),
        write_length=min(settings.write_length, longest),
        read_length=min(settings.read_length, longest),
    )


def _find_start(job: _Job) -> Distilled | None:
    """The draft to start from.

    Raises:
        ConfigError: it is none, or another shape is asked for than it has.
        ExportError, IncompatibleDraftError: it is damaged, or of another target.
    """
    name, settings = job.settings.start, job.settings
    if name is None:
        return None
    folder = find_distilled(str(name))
    if folder is None:
        raise ConfigError(f"{name} is no distilled draft to start from; name one, or start without")
    start, usual = read_distilled(folder, job.source), Settings()
    sizes = {"layers": start.num_blocks, "width": start.intermediate_size, "head_size": start.head_size}
    for option, size in sizes.items():
        if getattr(settings, option) not in (getattr(usual, option), size):
            raise ConfigError(f"{option} is {getattr(settings, option)}, but {name} keeps its {size}: leave it out")
    if start.attended_layer is not None and not settings.attention:
        raise ConfigError(f"attention is off, but {name} keeps the one it has: leave it on, or start without")
    return start


def _vocab_size(source: Source, model: Any) -> int:
    tokens = Tokenizer.from_file(str(source.tokenizer)).get_vocab(True).values()
    num_tokens: int = max(tokens) + 1
    return min(num_tokens, int(model.config.vocab_size))


def _make_data(job: _Job, teacher: Teacher) -> Data:
    said: set[str] = set()
    names = {
        "written": "the target writes conversations",
        "asked": "the target is asked about passages",
        "read": "the target reads documentation",
    }

    def tell(sort: str, done: int, wanted: int) -> None:
        if sort not in said:
            said.add(sort)
            job.progress.step(names[sort])
        job.progress.advance(done / wanted)

    store = Store(job.work / "data")
    _check_same(store.folder / "about.json", _data_key(job), "texts of another target or of other settings")
    data = make_data(teacher, job.source, store, job.settings, tell)
    job.packages = data.packages
    for sort, count in data.num_tokens.items():
        job.progress.note(f"{count:,} tokens {sort} to train on")
    return data


def _attended_layer(job: _Job, model: Any, vocab_size: int) -> int | None:
    """The layer whose keys are best for copying, of those that a draft can attend to."""
    settings = job.settings
    if job.start is not None and job.start.attended_layer is not None:
        return job.start.attended_layer
    if not settings.attention:
        return None
    longest = max(settings.write_length, settings.read_length)
    possible = set(attendable_layers(model, vocab_size, longest, settings.seed))
    scores = {i: score for i, score in induction_scores(model, vocab_size, settings.seed).items() if i in possible}
    if not scores:
        job.progress.note(f"no layer of {job.source.name} has a cache to attend to, so the draft has no attention")
        return None
    layer = max(scores, key=scores.__getitem__)
    job.progress.note(f"attends to layer {layer}, where {scores[layer]:.0%} of a head's attention copies")
    return layer


def _search(job: _Job, teacher: Teacher, choices: list[Layers], heads: HeadMap, data: Data, folder: Path) -> Layers:
    """The layers to read, found on one file of texts; kept."""
    file = folder / "layers.json"
    attended = choices[0].attended
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Layers(tuple(kept["layers"]), kept.get("attended", attended))
    settings = job.settings
    job.progress.step("looking for the layers to read")
    rows = max(2, len(data.check["written"].tokens) // 2)
    train, check = (texts.rows(slice(0, rows)) for texts in (data.train["written"], data.check["written"]))
    done = 0

    def score(pair: Pair) -> float:
        nonlocal done
        layers = Layers(pair, attended)
        parts = [
            Places([texts], [teacher.see(texts.tokens.astype(np.int64), layers)], settings.depth)
            for texts in (train, check)
        ]
        torch.manual_seed(settings.seed)
        student = make_student(teacher.model, _shape(job, teacher.model, layers), heads.head_ids)
        budget = 2 * settings.search_steps * settings.batch_tokens
        trainer = Trainer(student, heads, parts[0], parts[1], settings, job.machine, None, budget)
        trainer.run(lambda state, loss: None, settings.search_steps)
        done += 1
        job.progress.advance(done / len(choices))
        found = trainer.validate().score
        job.progress.note(f"layers {', '.join(map(str, pair))}: acceptance {found:.3f} after a few steps")
        return found

    best, scores = search([layers.hidden for layers in choices], score)
    named = {" ".join(map(str, pair)): value for pair, value in scores.items()}
    write_json(file, {"layers": best, "attended": attended, "scores": named})
    return Layers(best, attended)


def _train(job: _Job, trainer: Trainer) -> None:
    job.progress.step("training")
    shown = len(trainer.state.curve)

    def tell(state: State, loss: float) -> None:
        nonlocal shown
        job.progress.advance(state.tokens / trainer.end)
        for point in state.curve[shown:]:
            found = Acceptance(point["greedy"], point["sampled"], point["read"])
            job.progress.note(f"{point['tokens']:,} places, loss {point['loss']:.3f}; {found.line()}")
        shown = len(state.curve)

    trainer.run(tell)


def _write(job: _Job, report: DistillReport, student: HiddenDraft, head_ids: NDArray[np.int64]) -> DistillReport:
    """The draft's folder, all or nothing."""
    job.progress.step("writing the draft")
    part = report.path.with_name(f"{report.path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = {name: w.detach().cpu().float().numpy() for name, w in student.state_dict().items()}
    about = {"format_version": FORMAT_VERSION, "base": job.source.origin, "licence": job.source.licence}
    about |= {"vocabulary": vocabulary_digest(job.source.tokenizer)} | asdict(student.shape)
    write_distilled(part, about, weights, head_ids)
    write_card(part, report, job.source, job.settings, job.packages)
    if report.path.is_dir():
        shutil.rmtree(report.path)
    part.rename(report.path)
    size = sum(file.stat().st_size for file in report.path.iterdir())
    return replace(report, size=size)


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse to replace what is not a draft, or a draft that was not asked to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    config = out / "config.json"
    if not config.is_file() or MARK not in config.read_text(encoding="utf-8", errors="replace"):
        raise ExportError(f"{out} is there and not a distilled draft, so it is left alone; name another folder")
    if not overwrite:
        raise ExportError(f"{out} already is a draft; use --force to replace it, or name another folder")


def _machine(work: Path) -> Machine:
    """Where the models run, as it was when the working folder was made: a run that goes on must round alike."""
    file = work / "machine.json"
    if file.is_file():
        found = Machine(**json.loads(file.read_text(encoding="utf-8")))
        if found.device == "cpu" or torch.cuda.is_available():
            return found
    found = find_machine()
    write_json(file, asdict(found))
    return found


def _data_key(job: _Job) -> dict[str, Any]:
    """What the texts depend on. More of them may be asked for later."""
    digest = hashlib.sha256()
    for file in job.source.files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    s = job.settings
    prompts = None if s.prompts is None else hashlib.sha256(s.prompts.read_bytes()).hexdigest()
    sizes = [s.kept, s.write_rows, s.write_length, s.read_rows, s.read_length]
    return {"target": digest.hexdigest(), "seed": s.seed, "sizes": sizes, "prompts": prompts}


def _check_same(file: Path, key: dict[str, Any], what: str) -> None:
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != key:
        raise ConfigError(f"{file.parent} has {what}: name another working folder, or delete it")
    write_json(file, key)


def _coverage(heads: HeadMap, texts: Texts) -> float:
    """Share of written tokens that the head has."""
    return float((heads.columns[texts.tokens[:, 1:]] >= 0)[texts.is_chosen].mean())


def _training_folder(job: _Job) -> Path:
    """A folder for a training with these settings."""
    values = {name: str(value) for name, value in asdict(job.settings).items() if name != "checkpoint_every"}
    values["format"] = str(FORMAT_VERSION)
    if job.start is not None:
        values["start"] = hashlib.sha256((job.start.folder / WEIGHTS).read_bytes()).hexdigest()
    name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
    folder = job.work / f"training-{name}"
    folder.mkdir(exist_ok=True)
    return folder
