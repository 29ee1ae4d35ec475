"""The card of a draft: what it was made of and how, and what it reached. Numbers in it were measured or say so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.distill.options import Settings
from edgespec.export.source import Source
from edgespec.theory import expected_tokens

if TYPE_CHECKING:
    from edgespec.distill.pipeline import DistillReport

_CURVE = "training.json"
_SHOWN_POINTS = 12


def write_card(folder: Path, report: DistillReport, source: Source, settings: Settings, packages: list[str]) -> None:
    """Write `README.md` and the curve of the training, `training.json`."""
    text = "\n".join(_lines(report, source, settings, packages))
    (folder / "README.md").write_text(text + "\n", encoding="utf-8", newline="\n")
    (folder / _CURVE).write_text(json.dumps(report.curve, indent=1) + "\n", encoding="utf-8", newline="\n")


def _lines(report: DistillReport, source: Source, settings: Settings, packages: list[str]) -> Iterator[str]:
    yield from ("---", f"license: {source.licence or 'other'}", "tags: [draft, speculative-decoding]", "---", "")
    yield f"# A draft for {source.name}"
    yield ""
    yield f"Distilled by `edgespec distill` from {source.origin}; licence of the base: {source.licence or 'unknown'}."
    yield f"`edgespec export {source.name} --draft {report.path.name} -o DIR` joins it with its target, from which the"
    yield "embedding, the tokenizer and the chat template are taken."
    yield ""
    layers = ", ".join(map(str, report.layers.hidden))
    yield f"- Reads the target's hidden states: the input of the attention of layers {layers}, and what its head reads."
    if report.layers.attended is not None:
        yield f"  It attends to the target's keys and values of layer {report.layers.attended}."
    yield "  At each token it is told what prompt lookup would propose, and decides how much to trust that."
    yield "  It has no cache of its own and reads no text."
    yield f"- {settings.layers} blocks; head over {settings.head_size} tokens, all others have probability 0."
    sorts = ", ".join(f"{count:,} {sort}" for sort, count in report.tokens.items())
    yield f"- Data: no data set. Tokens with the target's distributions: {sorts}."
    yield f"- Training: {report.steps:,} steps, {report.trained_tokens:,} places, seed {settings.seed}."
    if settings.start is not None:
        yield f"  It went on from `{settings.start.resolve().name}`, whose training is not counted here."
    yield f"- Predicted cost of a step over a target step, 8 bits: {report.cost_ratio:.3f}."
    yield ""
    yield from _acceptance(report)
    yield ""
    yield from _curve(report.curve)
    if packages:
        said = "The target read documentation, and was asked about code, of these packages under permissive licences:"
        yield from ("", said, ", ".join(packages) + ".")


def _acceptance(report: DistillReport) -> Iterator[str]:
    found = report.acceptance
    yield "## Acceptance on texts kept apart"
    yield ""
    yield "Each depth given that all before were accepted; answers that the target wrote."
    yield ""
    yield "| answers | " + " | ".join(f"depth {d + 1}" for d in range(len(found.greedy))) + " |"
    yield "|---" * (len(found.greedy) + 1) + "|"
    for name, values in (("greedy", found.greedy), ("temperature 1", found.sampled)):
        yield f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
    yield ""
    if found.read is not None:
        yield f"Documentation, temperature 1, depth one: {found.read:.3f}."
    named = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in report.baselines.items())
    yield f"Baselines at depth one, greedy: {named}."
    depth, gain = _best(found.greedy[0], report.cost_ratio)
    yield f"Predicted for greedy answers, further rows free: {gain:.2f}x with {depth} drafted tokens."


def _best(alpha: float, cost_ratio: float) -> tuple[int, float]:
    gains = {n: expected_tokens(alpha, n) / (n * cost_ratio + 1) for n in range(1, 9)}
    depth = max(gains, key=gains.__getitem__)
    return depth, gains[depth]


def _curve(curve: list[Mapping[str, Any]] | list[dict[str, Any]]) -> Iterator[str]:
    if not curve:
        return
    yield "## Acceptance against places trained on"
    yield ""
    yield "| places | loss | greedy | temperature 1 |"
    yield "|---|---|---|---|"
    step = max(1, len(curve) // _SHOWN_POINTS)
    shown = curve[::-1][::step][::-1]  # the last one is among them
    for point in shown:
        yield f"| {point['tokens']:,} | {point['loss']:.3f} | {point['greedy'][0]:.3f} | {point['sampled'][0]:.3f} |"
