"""`edgespec info`: what is installed, what the machine offers, what is in a bundle."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from edgespec import __version__
from edgespec.bundle import MANIFEST, Manifest, ModelInfo, default_bundle_path, manifest_to_dict, read_bundle
from edgespec.cli import terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath
from edgespec.errors import MissingExtraError
from edgespec.params import RuntimeParams

_FIGURES = {
    "mean_tv": "total variation to the original {:.2g} on average",
    "max_tv": "{:.2g} at most",
    "top1": "same first choice {:.1%}",
    "perplexity": "perplexity {:.2f}",
    "original_perplexity": "of the original {:.2f}",
}
_MOST = 1e9  # a figure beyond is none


@click.command("info", context_settings=HELP)
@click.argument("bundle", required=False, type=NamedPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def info_command(bundle: Path | None, as_json: bool) -> None:
    """Show versions, providers and what is in a bundle.

    BUNDLE is checked, hashes included. Without it the default bundle is shown, if it is there.
    """
    if bundle is None and (default_bundle_path() / MANIFEST).exists():
        bundle = default_bundle_path()
    with terminal.busy("reading"):
        found = None if bundle is None else read_bundle(bundle)
    document = _machine()
    document["bundle"] = found and {"path": str(found.path), "manifest": manifest_to_dict(found.manifest)}
    if as_json:
        terminal.write_json(document)
    else:
        lines = _machine_lines(document)
        lines += _bundle_lines(found.path, found.manifest) if found else [_no_bundle()]
        terminal.write("\n".join(lines) + "\n")


def _machine() -> dict[str, Any]:
    providers, problem = _providers()
    return {
        "versions": {
            "edgespec": __version__,
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            "onnxruntime": _version("onnxruntime", "onnxruntime-gpu"),
            "tokenizers": _version("tokenizers"),
        },
        "platform": platform.platform(),
        "providers": providers,
        "problem": problem,
        "cpu_cores": _num_cores(),
        "threads": RuntimeParams().threads,
    }


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _providers() -> tuple[list[str], str | None]:
    """What the installed onnxruntime offers, or none and the reason: this command is for finding that out."""
    from edgespec.ort import available_providers

    try:
        return available_providers(), None
    except MissingExtraError as error:
        return [], str(error)


def _num_cores() -> int | None:
    """Logical cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _machine_lines(document: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in document["versions"].items())
    rows = [
        ("versions", versions),
        ("platform", document["platform"]),
        ("providers", ", ".join(document["providers"]) or document["problem"]),
        ("cpu cores", document["cpu_cores"]),
        ("threads", document["threads"] or "onnxruntime's default, one per physical core"),
    ]
    return [f"{name:11}{value}" for name, value in rows]


def _no_bundle() -> str:
    return f"{'bundle':11}none yet in {default_bundle_path()}; `edgespec run` makes it"


def _bundle_lines(path: Path, manifest: Manifest) -> list[str]:
    size = sum(file.size for file in manifest.files.values()) / 2**20
    rows = [
        ("bundle", path),
        ("name", f"{manifest.name}, {size:.0f} MiB, made by {manifest.created_by}"),
        ("target", _model_line(manifest.target)),
        ("draft", _model_line(manifest.draft) if manifest.draft else "none"),
    ]
    if manifest.inner_draft is not None:
        rows.append(("its draft", _model_line(manifest.inner_draft)))
    rows += [("checked", line) for line in _checked(manifest.check)]
    # In one line each, so that no name can pass for a line of its own.
    return [f"{name:11}{terminal.clean_line(str(value))}" for name, value in rows]


def _checked(check: dict[str, Any]) -> Iterator[str]:
    """What people want to know of what the export measured, all of which is in the JSON. It may be anything."""
    for role in ("target", "draft", "inner_draft"):
        figures = check.get(role)
        if isinstance(figures, dict):
            shown = [form.format(figures[name]) for name, form in _FIGURES.items() if _is_number(figures.get(name))]
            if shown:
                yield f"{role.replace('_', ' ')}: {', '.join(shown)}"
        if isinstance(reason := check.get(f"{role}_unfused"), str):
            yield f"{role}: not fused: {reason}"
    if _is_number(check.get("pair_overlap")):
        yield f"pair: they agree on {check['pair_overlap']:.1%} of the probability"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _model_line(model: ModelInfo) -> str:
    block = f" in blocks of {model.block_size}" if model.block_size else ""
    cache = "no" if model.cache == "none" else model.cache
    return (
        f"{model.num_parameters / 1e6:.0f} M parameters, {model.precision}{block}, {cache} cache, "
        f"context {model.context_length}, vocabulary {model.vocab_size}, row invariance {model.row_invariance}, "
        f"from {model.source} ({model.licence or 'licence unknown'})"
    )
