"""The step of an export that makes a distilled draft: its graph in its precision, checked beside the target."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from edgespec.bundle import ModelInfo
from edgespec.contracts import Rows, Tokens
from edgespec.errors import ExportError
from edgespec.export.check import LIMITS, Limits, distribution, total_variation
from edgespec.export.distilled import HEAD_IDS, Distilled, Weights
from edgespec.export.draft_attention import Rotary, Seen, read_rotary
from edgespec.export.draft_graph import build_draft, compute_step, read_embedding
from edgespec.export.graph import halve_graph, quantize_graph
from edgespec.export.options import resolve_precision
from edgespec.export.steps import Graph, Job, Made, read_info
from edgespec.export.write import copy_graph
from edgespec.head import Head
from edgespec.lookup import find_hints
from edgespec.params import RuntimeParams
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession

Role = Literal["draft", "inner_draft"]
_READ = 64  # rows of a call while the target reads the text
_TIMED = 30


def check_target(made: Distilled, graph: Graph) -> None:
    """Refuse a target that the draft cannot go on from, before more is done with it.

    Raises:
        ExportError, IncompatibleDraftError: it has another embedding, or other attention than the draft needs.
    """
    read_embedding(graph.path, made, graph.source.name)
    read_rotary(graph.path, made, graph.source.name)


def make_draft(job: Job, made: Distilled, graph: Graph, target: Made, role: Role = "draft") -> Made:
    """The draft's graph in the bundle.

    Args:
        made: the draft.
        graph: what it drafts for in float32, whose embedding the draft takes.
        target: that as it is in the bundle, with `hidden`.
        role: an `inner_draft` drafts for the bundle's draft.
    Returns:
        With `pair_overlap`, or `inner_overlap`, among the figures.
    """
    step = f"the {role}"
    found = job.finished(step)
    if found is None:
        first = len(job.warnings)
        found = _make(job, made, graph, target, role)
        job.finish(step, found, first)
    return Made(read_info(found["info"]), found["check"], target.rows)


def _make(job: Job, made: Distilled, graph: Graph, target: Made, role: Role) -> dict[str, Any]:
    job.progress.step(f"building {made.name}")
    weights = made.read_weights()
    embedding = read_embedding(graph.path, made, graph.source.name)
    rotary = read_rotary(graph.path, made, graph.source.name)
    plain = build_draft(made, weights, embedding, job.folder(f"{role}-fp32"), rotary)
    folder = job.space.bundle / role
    shutil.rmtree(folder, ignore_errors=True)
    precision, block = _precision(job, made, target, role)
    path, report = _round(job, plain, folder, precision, block)
    check: dict[str, Any] = {f"{role}_quantization": report} if report else {}
    shutil.copyfile(made.folder / HEAD_IDS, folder / HEAD_IDS)
    job.progress.step(f"checking {made.name} in {precision}")
    if rotary is not None and (precision == "fp16") != (target.info.precision == "fp16"):
        job.warn(
            f"{made.name} in {precision} cannot look at the cache of a target in {target.info.precision}, so it is "
            "accepted less often: choose fp16 for both or for neither"
        )
    pair = _Pair(job.space.bundle / target.info.path, graph, made, weights, embedding, rotary)
    check[f"{role}_fp32"] = pair.check(plain, "fp32", target.rows).as_dict()
    figures = pair.check(path, precision, target.rows)
    overlap = "pair_overlap" if role == "draft" else "inner_overlap"
    check |= {role: figures.as_dict(), f"{role}_steps": pair.measure(path), overlap: figures.overlap}
    info = ModelInfo(
        path=f"{role}/{path.name}",
        cache="none",
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
        vocab_size=made.vocab_size,
        context_length=target.info.context_length,
        precision=precision,
        block_size=block,
        row_invariance=">=2",  # a call has one row, so there are no others
        num_parameters=made.num_parameters,
        source=made.origin,
        licence=made.licence,
        head_ids=f"{role}/{HEAD_IDS}",
    )
    return {"info": asdict(info), "check": check}


def _precision(job: Job, made: Distilled, target: Made, role: Role) -> tuple[str, int | None]:
    """As wanted; of an inner draft, about which nothing is said, such that it can look at the draft's cache."""
    if role == "draft":
        return resolve_precision(job.plan.draft_precision, job.plan.draft_block_size, made.num_parameters)
    return resolve_precision("fp16" if target.info.precision == "fp16" else "auto", None, made.num_parameters)


def _round(job: Job, plain: Path, folder: Path, precision: str, block: int | None) -> tuple[Path, dict[str, Any]]:
    if precision == "fp32":
        return copy_graph(plain, folder), {}
    if precision == "fp16":
        return halve_graph(plain, folder, job.progress.advance), {}
    assert block is not None
    path, report = quantize_graph(plain, folder, precision, block, job.progress.advance)
    return path, report


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What was measured of a draft on the check text, two steps from each of its tokens.

    Attributes:
        tokens: of the text.
        mean_tv, max_tv, top1: against the same steps in float32 NumPy, over all rows.
        perplexity, original_perplexity: of the text's tokens that the head has, at first steps.
        overlap: mean of sum(min(p, q)) at first steps, with p the target's: acceptance at temperature 1.
    """

    tokens: int
    mean_tv: float
    max_tv: float
    top1: float
    perplexity: float
    original_perplexity: float
    overlap: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Row:
    """One place of the text: the draft's two rows there, the reference's, and the target's at the first."""

    found: tuple[Rows, Rows]
    expected: tuple[Rows, Rows]
    target: Rows
    token: int  # that follows


class _Pair:
    """A finished target and the draft's weights."""

    def __init__(
        self,
        target: Path,
        graph: Graph,
        made: Distilled,
        weights: Weights,
        embedding: ir.TensorProtocol,
        rotary: Rotary | None,
    ) -> None:
        self.target, self.context_length, self.tokens = target, graph.context_length, graph.reference.tokens
        self.made, self.weights, self.rotary = made, weights, rotary
        self.embedding = np.asarray(embedding.numpy()[self.tokens], np.float32)
        self.columns = {int(token): column for column, token in enumerate(made.head_ids)}

    def check(self, path: Path, precision: str, rows_file: Path) -> DraftFigures:
        """Compare a draft's graph with NumPy and with the target's logits of the check text.

        Raises:
            ExportError: the graph is not the draft.
        """
        columns = self.columns
        rows = list(self._rows(path, np.load(rows_file, mmap_mode="r")))
        pairs = [pair for row in rows for pair in zip(row.found, row.expected, strict=True)]
        distances = [total_variation(found, expected) for found, expected in pairs]
        known = [row for row in rows if row.token in columns]

        def perplexity(name: str) -> float:
            chosen = [distribution(getattr(row, name)[0])[columns[row.token]] for row in known]
            return float(np.exp(-np.log(chosen).mean())) if chosen else 1.0

        ids = self.made.head_ids
        overlaps = [np.minimum(distribution(row.target)[ids], distribution(row.found[0])).sum() for row in rows]
        figures = DraftFigures(
            tokens=len(self.tokens),
            mean_tv=float(np.mean(distances)),
            max_tv=max(distances),
            top1=float(np.mean([found.argmax() == expected.argmax() for found, expected in pairs])),
            perplexity=perplexity("found"),
            original_perplexity=perplexity("expected"),
            overlap=float(np.mean(overlaps)),
        )
        _enforce(figures, LIMITS[precision])
        return figures

    def measure(self, path: Path) -> dict[str, Any]:
        """Milliseconds of a step: the median, on this machine. With attention, after half of the check text."""
        with ExitStack() as stack:
            _, draft = self._open(stack, path)
            past, seconds = len(self.tokens) // 2 if draft.borrows else 0, []
            draft.pretend(past)
            for token in self.tokens[past : past + _TIMED]:
                started = time.perf_counter()
                draft.forward(np.array([token]), 1)
                seconds.append(time.perf_counter() - started)
        return {"past": past, "ms": {"1": float(np.median(seconds[1:]) * 1e3)}}

    def _open(self, stack: ExitStack, path: Path) -> tuple[DecoderSession, RecurrentSession]:
        length, runtime = self.context_length, RuntimeParams()
        target = DecoderSession(self.target, context_length=length, runtime=runtime)
        stack.callback(target.close)
        head = Head(self.made.head_ids, self.made.vocab_size)
        draft = RecurrentSession(path, target=target, context_length=length, runtime=runtime, head=head)
        stack.callback(draft.close)
        return target, draft

    def _rows(self, path: Path, logits: Rows) -> Iterator[_Row]:
        """Every place with two further tokens, as the sessions of an engine compute it."""
        with ExitStack() as stack:
            target, draft = self._open(stack, path)
            for start in range(0, len(self.tokens) - 2, _READ):
                places = np.arange(start, min(start + _READ, len(self.tokens) - 2))
                target.forward(target.sync(self.tokens[: places[-1] + 1]), len(places))
                expected = self._expected(target, draft, places)
                # Backwards, as a draft that looks at the target's cache takes from it what is not of its text.
                for i, place in reversed(list(enumerate(places))):
                    pending = draft.sync(self.tokens[: place + 2])
                    first = draft.forward(pending, 1)[0].copy()
                    second = draft.forward(self.tokens[place + 2 : place + 3], 1)[0].copy()
                    both = expected[0][i], expected[1][i]
                    yield _Row((first, second), both, logits[place + 1], int(self.tokens[place + 2]))

    def _expected(self, target: DecoderSession, draft: RecurrentSession, places: Tokens) -> tuple[Rows, Rows]:
        rows = [target.hidden_after(self.tokens[: place + 1]) for place in places]
        hidden = np.stack([row for row in rows if row is not None])
        assert len(hidden) == len(places), "every row of a call is kept"
        nothing = np.zeros((len(places), self.made.hidden_size), np.float32)
        step = partial(compute_step, self.made, self.weights)
        seen = self._seen(target, draft, places)
        first, state, seen = step(self.embedding[places + 1], hidden, nothing, self._hints(places + 1), seen)
        second, _, _ = step(self.embedding[places + 2], np.zeros_like(hidden), state, self._hints(places + 2), seen)
        return first, second

    def _hints(self, places: Tokens) -> Tokens:
        """Column and kind of what the text up to each place says, shape (n, 2)."""
        hints = find_hints(self.tokens.tolist())
        found = [hints[place] for place in places]
        known = [(self.columns[token], kind) if kind and token in self.columns else (0, 0) for token, kind in found]
        return np.array(known, np.int64)

    def _seen(self, target: DecoderSession, draft: RecurrentSession, places: Tokens) -> Seen | None:
        """What the first step after each place sees; nothing where the target's cache cannot be used."""
        if self.rotary is None:
            return None
        cache = target.read_cache()
        names = [f"past_key_values.{self.made.attended_layer}.{kind}" for kind in ("key", "value")]
        keys, values = (cache[name][0].astype(np.float32) for name in names)
        lengths = places + 1 if draft.borrows else np.zeros_like(places)
        return Seen(self.rotary, keys, values, lengths)


def _enforce(figures: DraftFigures, limits: Limits) -> None:
    for found, most, meaning in (
        (figures.mean_tv, limits.mean_tv, "mean"),
        (figures.max_tv, limits.max_tv, "largest"),
    ):
        if not found <= most:  # also true for NaN
            raise ExportError(
                f"the draft's graph is not the draft: the {meaning} total variation to it is {found:.4g}, and at most "
                f"{most:g} is rounding; use another precision"
            )
