"""From a Hugging Face folder to the plain ONNX decoder that optimum makes. Owns the call into optimum.

The result has a growing cache and float32 weights; `fuse` and `quantize` go on from there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError, MissingExtraError
from edgespec.export.disk import is_disk_full

OPSET = 18


def require_extra() -> None:
    """Raise MissingExtraError unless everything of the `export` extra can be found."""
    from importlib.util import find_spec

    wanted = {"torch": "torch", "transformers": "transformers", "optimum": "optimum-onnx", "onnx": "onnx"}
    wanted |= {"onnx_ir": "onnx-ir", "safetensors": "safetensors", "gguf": "gguf", "onnxruntime": "onnxruntime"}
    missing = [package for module, package in wanted.items() if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"exporting needs {', '.join(missing)}, which is not installed here; pip install 'edgespec[cpu,export]'"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' warnings, log lines and bars off the terminal: what matters is said by us."""
    sink = io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def convert(folder: Path, config: dict[str, Any], output: Path) -> Path:
    """Export the model in `folder` with its cache, in float32.

    Args:
        folder: a Hugging Face folder with `config.json` and safetensors weights.
        config: the content of `config.json`.
        output: an empty folder for the graph and its weights.
    Returns:
        The path of the graph.
    Raises:
        ExportError: optimum does not know the architecture or failed.
    """
    try:
        with quiet():
            _export(folder, config, output)
    except Exception as error:
        if is_disk_full(error) or isinstance(error, MemoryError):
            raise  # the machine's fault, not the model's
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExportError(
            f"{folder}: optimum could not convert this {config.get('model_type', 'unknown')} model ({reason})"
        ) from error
    return output / "model.onnx"


def _export(folder: Path, config: dict[str, Any], output: Path) -> None:
    if config.get("attn_logit_softcapping") is not None:
        _export_eager(folder, output)
        return
    from optimum.exporters.onnx import main_export

    main_export(
        str(folder),
        output,
        task="text-generation-with-past",
        opset=OPSET,
        framework="pt",
        library_name="transformers",
        dtype="fp32",
        do_validation=False,  # `check` compares with torch, further than optimum does
        no_post_process=True,  # one graph already, and its de-duplication of weights costs memory
        trust_remote_code=False,
        local_files_only=True,
    )


def _export_eager(folder: Path, output: Path) -> None:
    """For models that cap their attention scores: optimum loses the cap unless attention is eager."""
    import torch
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    model.config.use_cache = True
    onnx_export_from_model(
        model,
        output,
        task="text-generation-with-past",
        opset=OPSET,
        do_validation=False,
        no_post_process=True,
    )
