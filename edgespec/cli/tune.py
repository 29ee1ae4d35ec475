"""`edgespec tune`: what calls cost on this machine, and how to run a bundle best. Owns the options and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from edgespec.bench.machine import machine
from edgespec.bundle import Bundle, cache_dir, default_bundle_path, read_bundle
from edgespec.cli import tables, terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, option
from edgespec.cli.progress import progress, seconds
from edgespec.cli.run import ensure_default_bundle
from edgespec.params import RuntimeParams
from edgespec.state import bundle_digest
from edgespec.tuning import BreakEven, Tuning, tune

_BAR = 40  # characters of the longest bar
_BUSY = 0.1  # uncertainty that is worth a remark


@dataclass(frozen=True, slots=True)
class Tuned:
    """A bundle and what was found out about it."""

    bundle: Bundle
    tuning: Tuning

    @property
    def plain_tokens_per_s(self) -> float:
        """After few cached tokens."""
        return 1 / self.tuning.target.seconds[0][0]

    @property
    def agreement(self) -> float | None:
        """Share of the positions where its first choice is the original model's, if the export measured it."""
        check = self.bundle.manifest.check.get("target")
        found = check.get("top1") if isinstance(check, dict) else None
        return found if isinstance(found, float) else None

    @property
    def overlap(self) -> float | None:
        """Acceptance that the export measured on a text."""
        found = self.bundle.manifest.check.get("pair_overlap")
        return found if isinstance(found, float) else None


@click.command("tune", context_settings=HELP)
@click.argument("bundles", nargs=-1, metavar="[BUNDLE]...", type=NamedPath())
@option("--budget", text="Time to measure each, as in 10s or 1m.", default="10s", callback=seconds)
@option("--provider", text="Execution provider: cpu, cuda, ...", default=RuntimeParams().provider)
@option("--draft-provider", text="Execution provider of the draft model.  [default: that of --provider]")
@option("--plot", text="Draw the curves to this file.", type=NamedPath(dir_okay=False))
@option("--json", "as_json", text="Print one JSON document.", is_flag=True)
def tune_command(
    bundles: tuple[Path, ...],
    budget: float,
    provider: str,
    draft_provider: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure what calls cost here, and how to run a bundle best.

    Tries threads and spinning, and measures how long the models take for calls of one row and of several, with few and
    many cached tokens. Everything that loads the bundle later uses what was found. With several bundles, as of one
    model in several precisions, it also says which of them to use.
    """
    if plot is not None:
        tables.require_matplotlib()
    if not bundles:
        ensure_default_bundle()
        bundles = (default_bundle_path(),)
    found = [read_bundle(path) for path in bundles]
    runtime = RuntimeParams(provider=provider, draft_provider=draft_provider)
    with progress() as tell:
        tuned = [Tuned(bundle, tune(bundle, budget, runtime, tell)) for bundle in found]
    if plot is not None:
        _draw(plot, tuned)
    if as_json:
        terminal.write_json({"machine": machine(), "bundles": [*map(_document, tuned)], **_recommended(tuned)})
        return
    for one in tuned:
        _write(one)
    if len(tuned) > 1:
        _write_comparison(tuned)


def verdict(break_even: Sequence[BreakEven], overlap: float | None, *, has_model: bool) -> str:
    """Whether and when drafting can win, in one sentence.

    Args:
        break_even: as measured; those after the fewest cached tokens are spoken of.
        overlap: the pair's acceptance on a text, if it is known.
        has_model: whether there is a draft model.
    """
    near = [even for even in break_even if even.past == break_even[0].past]
    parts = ["lookups " + (_from([even.lookup for even in near]) or "lose at any acceptance")]
    if has_model:
        known = "" if overlap is None else f" (the export measured {overlap:.0%} for this pair)"
        parts.append("the draft model " + (_from([even.model for even in near]) or "loses at any acceptance") + known)
    can_win = any(even.lookup is not None or even.model is not None for even in near)
    return ("drafting can win here: " if can_win else "drafting cannot win here: ") + ", ".join(parts)


def _from(acceptances: list[float | None]) -> str:
    reached = [(alpha, gamma) for gamma, alpha in enumerate(acceptances, 1) if alpha is not None]
    if not reached:
        return ""
    (least, gamma), (last, longest) = min(reached), reached[-1]
    text = f"above an acceptance of {least:.0%} with drafts of {gamma}"
    return text if longest == gamma else f"{text}, {last:.0%} with drafts of {longest}"


def _document(tuned: Tuned) -> dict[str, Any]:
    manifest, tuning = tuned.bundle.manifest, tuned.tuning
    return {
        "bundle": {"path": str(tuned.bundle.path), "name": manifest.name, "digest": bundle_digest(manifest)},
        "precision": manifest.target.precision,
        **asdict(tuning),
        "uncertainty": tuning.uncertainty,
        "candidates": [_timed(candidate) for candidate in tuning.candidates],
        "plain_tokens_per_s": tuned.plain_tokens_per_s,
        "agreement": tuned.agreement,
        "verdict": _verdict(tuned),
    }


def _timed(candidate: Any) -> dict[str, Any]:
    both = {"single_s": candidate.single_s, "pair_s": candidate.pair_s}
    medians = {name: median(times) if times else None for name, times in both.items()}
    return {"threads": candidate.threads, "spinning": candidate.spinning, **medians}


def _verdict(tuned: Tuned) -> str:
    return verdict(tuned.tuning.break_even, tuned.overlap, has_model=tuned.tuning.draft is not None)


def _write(tuned: Tuned) -> None:
    manifest, tuning = tuned.bundle.manifest, tuned.tuning
    draft = f", draft {manifest.draft.precision}" if manifest.draft else ""
    terminal.write(f"{tuned.bundle.path}: target {manifest.target.precision}{draft}\n\n")
    _write_candidates(tuning)
    _write_curve(tuning)
    _write_break_even(tuning)
    best = [f"{tuning.single.threads} threads, spinning {tuning.single.spinning} for the target alone"]
    if tuning.pair is not None:
        best.append(f"{tuning.pair.threads} threads, spinning {tuning.pair.spinning} with the draft model")
    terminal.write(
        f"{tuned.plain_tokens_per_s:.0f} tokens/s plain, {tuning.prefill_tokens_per_s:.0f} tokens/s of a prompt\n"
        f"{_verdict(tuned)}\n{'best, and used from now on' if tuning.is_stored else 'best'}: {'; '.join(best)}\n\n"
    )
    if not tuning.is_stored:
        terminal.note(
            f"what was found could not be stored in {cache_dir()}, so that nothing will use it: make the folder "
            "writable, or name another one in EDGESPEC_CACHE"
        )
    if tuning.uncertainty > _BUSY:
        terminal.note(
            f"the machine was busy: figures above may be wrong by {tuning.uncertainty:.0%}; "
            "run it again when nothing else runs, or with a larger --budget"
        )


def _write_candidates(tuning: Tuning) -> None:
    headers = ("threads", "spinning", "target alone, ms a round", "both models", "")
    rows = []
    for candidate in tuning.candidates:
        marks = []
        marks += ["best alone"] if candidate.advice == tuning.single else []
        marks += ["best for both"] if candidate.advice == tuning.pair else []
        alone, both = (f"{median(line) * 1e3:.1f}" if line else "-" for line in (candidate.single_s, candidate.pair_s))
        rows.append([str(candidate.threads), candidate.spinning, alone, both, ", ".join(marks)])
    tables.write_table(headers, rows, title="a round: four calls of one row, then one of five rows by the target")
    terminal.write("\n")


def _write_curve(tuning: Tuning) -> None:
    """Bars: `#` up to the time after few cached tokens, `-` up to that after many."""
    table = tuning.target
    near, far = table.seconds[0], table.seconds[-1]
    scale = _BAR / max(*near, *far)
    lines = [f"ms of a target call by rows, {table.pasts[0]} (#) and {table.pasts[-1]} (-) tokens cached"]
    for rows, short, long in zip(table.rows, near, far, strict=True):
        bar = "#" * round(short * scale)
        bar += "-" * (round(long * scale) - len(bar))
        lines.append(f"{rows:4}  {bar:{_BAR}}  {short * 1e3:6.1f} {long * 1e3:6.1f}")
    if tuning.draft is not None:
        steps = [
            (f"{line[0] * 1e3:.1f} ms", past)
            for past, line in zip(tuning.draft.pasts, tuning.draft.seconds, strict=True)
        ]
        shown = ", ".join(f"{ms} after {past}" for ms, past in steps) + " cached tokens"
        if len(steps) == 1:  # one that reads no text
            shown = f"{steps[0][0]} after any text"
        lines.append(f"a step of the draft model: {shown}")
    terminal.write("\n".join(lines) + "\n\n")


def _write_break_even(tuning: Tuning) -> None:
    pasts = tuning.target.pasts
    kinds = ["lookup"] if tuning.draft is None else ["lookup", "model"]
    headers = ["draft tokens", *(f"{kind}, {past} cached" for kind in kinds for past in pasts)]
    rows = []
    for gamma in range(1, 9):
        mine = {even.past: even for even in tuning.break_even if even.draft_tokens == gamma}
        figures = [getattr(mine[past], kind) for kind in kinds for past in pasts]
        rows.append([str(gamma), *("never" if alpha is None else f"{alpha:.0%}" for alpha in figures)])
    tables.write_table(headers, rows, title="acceptance above which a draft pays")
    terminal.write("\n")


def _recommended(tuned: list[Tuned]) -> dict[str, Any]:
    if len(tuned) == 1:
        return {}
    return {"recommended": str(_best(tuned).bundle.path)}


def _best(tuned: list[Tuned]) -> Tuned:
    """The most tokens per second that the original model would have chosen, too; without that figure, the most."""
    if all(one.agreement is not None for one in tuned):
        return max(tuned, key=lambda one: one.plain_tokens_per_s * (one.agreement or 0))
    return max(tuned, key=lambda one: one.plain_tokens_per_s)


def _write_comparison(tuned: list[Tuned]) -> None:
    best = _best(tuned)
    rows = [
        [
            str(one.bundle.path),
            one.bundle.manifest.target.precision,
            f"{one.plain_tokens_per_s:.0f}",
            f"{one.tuning.prefill_tokens_per_s:.0f}",
            "-" if one.agreement is None else f"{one.agreement:.0%}",
            "best" if one is best else "",
        ]
        for one in tuned
    ]
    headers = ("bundle", "precision", "plain tokens/s", "prompt tokens/s", "agrees with the original", "")
    tables.write_table(headers, rows)
    why = "most tokens per second that are the original model's choice, too"
    if any(one.agreement is None for one in tuned):
        why = "most tokens per second; how well each agrees with the original was not measured at its export"
    terminal.write(f"use {best.bundle.path}: {why}\n")


def _draw(path: Path, tuned: list[Tuned]) -> None:
    with tables.figure(path, 6 * len(tuned), 7) as drawing:
        axes = drawing.subplots(2, len(tuned), squeeze=False)
        for column, one in enumerate(tuned):
            _draw_costs(axes[0][column], one)
            _draw_break_even(axes[1][column], one.tuning)


def _draw_costs(axes: Any, tuned: Tuned) -> None:
    for name, table in (("target", tuned.tuning.target), ("draft", tuned.tuning.draft)):
        if table is not None:
            for past, line in zip(table.pasts, table.seconds, strict=True):
                axes.plot(table.rows, [s * 1e3 for s in line], marker=".", label=f"{name}, {past} cached")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a call")
    axes.set_ylabel("ms")
    axes.set_title(f"{tuned.bundle.path.resolve().name}: {tuned.bundle.manifest.target.precision}")
    axes.legend(fontsize="small")


def _draw_break_even(axes: Any, tuning: Tuning) -> None:
    for past in tuning.target.pasts:
        mine = [even for even in tuning.break_even if even.past == past]
        for kind, style in (("lookup", "-"), ("model", "--")):
            points = [(e.draft_tokens, getattr(e, kind)) for e in mine if getattr(e, kind) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, marker=".", label=f"{kind}, {past} cached")
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft tokens")
    axes.set_ylabel("acceptance above which a draft pays")
    if axes.lines:
        axes.legend(fontsize="small")
