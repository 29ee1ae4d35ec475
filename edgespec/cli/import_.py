"""`edgespec import`: a bundle from ONNX graphs that somebody else made. Owns the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli import terminal
from edgespec.cli.export import closing_line, pair_line
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath

_VARIANT = "Which of several graphs: q4 for model_q4.onnx."


@click.command("import", context_settings=HELP)
@click.argument("folder", metavar="DIR", type=NamedPath())
@click.option("-o", "--output", "out", required=True, metavar="BUNDLE", type=NamedPath(), help="Bundle.")
@click.option("--draft", metavar="DIR", type=NamedPath(), help="Folder of a draft.  [default: none]")
@click.option("--variant", metavar="NAME", help=_VARIANT)
@click.option("--draft-variant", metavar="NAME", help="The same for the draft.  [default: as --variant]")
@click.option("--max-context", type=int, help="Most tokens of the context.  [default: the model's, up to 32768]")
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
def import_command(folder: Path, out: Path, force: bool, **options: Any) -> int:
    """Make a bundle from a model in ONNX.

    DIR is a folder of onnxruntime-genai's model builder, one that optimum wrote, or a hub repository with an onnx
    folder. Attention is fused where it is not yet, and the result is compared with the graph as it came. BUNDLE
    appears whole at the end, or not at all.
    """
    from edgespec.export import import_bundle

    with terminal.ExportProgress() as progress:
        report = import_bundle(folder, out, overwrite=force, progress=progress, **options)
    manifest = report.manifest
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is not None and role in manifest.check:
            figures = manifest.check[role]
            blocks = f" in blocks of {model.block_size}" if model.block_size else ""
            terminal.write(
                f"{role}: {model.precision}{blocks}, {model.cache} cache; total variation to the graph as it came "
                f"{figures['mean_tv']:.2g} on average, same first choice {figures['top1']:.1%}, "
                f"row invariance {model.row_invariance}, context {model.context_length}\n"
            )
    if manifest.draft is not None:
        terminal.write(f"{pair_line(report)}\n")
    terminal.write(f"{closing_line(report)}\n")
    return 0
