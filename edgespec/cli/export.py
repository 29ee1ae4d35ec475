"""`edgespec export`: a bundle from a model, and perhaps a draft model. Owns the options and the closing lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from edgespec.bundle import ModelInfo
from edgespec.cli import terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, NamedSource

if TYPE_CHECKING:
    from edgespec.export import ExportReport

_PRECISIONS = click.Choice(["fp32", "fp16", "int8", "int4", "auto"])


@click.command("export", context_settings=HELP)
@click.argument("source", type=NamedSource())
@click.option("-o", "--output", "out", required=True, metavar="DIR", type=NamedPath(), help="Bundle.")
@click.option(
    "--draft",
    metavar="SOURCE",
    type=NamedSource(),
    help="Draft model: a source as well, what `edgespec distill` made, or none.  [default: none]",
)
@click.option(
    "--inner-draft",
    metavar="NAME",
    help="Drafts for a draft that is a model: what `edgespec distill` made for it.  [default: none]",
)
@click.option(
    "--precision", type=_PRECISIONS, help="Of the weights.  [default: auto: int8 below 10^9 of them, int4 above]"
)
@click.option("--block-size", type=int, metavar="32|128", help="Weights per scale.  [default: 128]")
@click.option("--draft-precision", type=_PRECISIONS, help="The same for the draft.  [default: auto]")
@click.option("--draft-block-size", type=int, metavar="32|128", help="The same for the draft.")
@click.option("--max-context", type=int, help="Most tokens of the context.  [default: the model's, up to 32768]")
@click.option("--allow-pickle", is_flag=True, help="Read pickled weights where there are no safetensors.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
def export_command(source: str, out: Path, draft: str | None, force: bool, **options: Any) -> int:
    """Make a bundle from a model.

    SOURCE is a Hugging Face folder, a hub id (owner/name or owner/name@revision), a GGUF file or a recipe (such as
    smollm2-135m); a recipe has defaults of its own. The model is converted to ONNX, fused, quantised and checked
    against the original. DIR appears whole at the end, or not at all.
    """
    from edgespec.export import export_bundle

    with terminal.ExportProgress() as progress:
        report = export_bundle(source, out, draft=draft, overwrite=force, progress=progress, **options)
    for line in summary(report):
        terminal.write(f"{line}\n")
    return 0


def summary(report: ExportReport) -> Iterator[str]:
    """What was made and what was measured, a line each."""
    manifest, check = report.manifest, report.manifest.check
    yield _model_line("target", manifest.target, check["target"])
    if manifest.draft is not None:
        # Where both are one graph, it was checked once.
        yield _model_line("draft", manifest.draft, check.get("draft", check["target"]))
        yield pair_line(report)
    if manifest.inner_draft is not None:
        yield _model_line("inner draft", manifest.inner_draft, check["inner_draft"])
    yield closing_line(report)


def pair_line(report: ExportReport) -> str:
    """How well draft and target agree."""
    return f"pair: they agree on {report.manifest.check['pair_overlap']:.1%} of the probability"


def closing_line(report: ExportReport) -> str:
    """Where the bundle is, and what it took."""
    memory = "" if report.peak_memory is None else f", peak memory {report.peak_memory / 1e9:.1f} GB"
    return f"{report.path}: {report.size / 1e6:.0f} MB in {report.seconds:.0f} s{memory}"


def _model_line(role: Literal["target", "draft", "inner draft"], model: ModelInfo, figures: dict[str, Any]) -> str:
    blocks = f" in blocks of {model.block_size}" if model.block_size else ""
    return (
        f"{role}: {model.precision}{blocks}; total variation to the original {figures['mean_tv']:.2g} on average and "
        f"{figures['max_tv']:.2g} at most, same first choice {figures['top1']:.1%}, "
        f"perplexity {figures['perplexity']:.2f} (original {figures['original_perplexity']:.2f}), "
        f"row invariance {model.row_invariance}, context {model.context_length}"
    )
