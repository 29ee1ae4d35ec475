"""From a Hugging Face folder to the plain ONNX decoder of optimum's configuration. Owns the tracing.

The graph is traced without weights, and each weight is read from the checkpoint when somebody asks for it: a model
in float32 never exists as a whole. The result has a growing cache; `fuse` and `quantize` go on from there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError, ExportError, MissingExtraError
from edgespec.export.disk import is_disk_full
from edgespec.export.skeleton import find_weights, load_buffers, make_skeleton, stand_in
from edgespec.export.weights import Checkpoint

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 18
_TASK = "text-generation-with-past"


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


@dataclass(frozen=True, slots=True)
class PlainGraph:
    """A traced graph, and where its weights are.

    Attributes:
        path: of the graph, whose weights are inputs.
        checkpoint: has the weights.
        names: input of the graph -> name in the checkpoint.
        buffers: input of the graph -> contents, for what the model computes itself.
    """

    path: Path
    checkpoint: Checkpoint
    names: dict[str, str]
    buffers: dict[str, NDArray[Any]] = field(default_factory=dict)

    def load(self) -> ir.Model:
        """A new copy of the graph, with initializers that are read when they are looked at."""
        import onnx_ir as ir

        model = ir.load(self.path)
        for value in list(model.graph.inputs):
            name = value.name or ""
            if name in self.names:
                value.const_value = _lazy(self.checkpoint, self.names[name], name)
            elif name in self.buffers:
                value.const_value = ir.tensor(self.buffers[name], name=name)
            else:
                continue
            model.graph.inputs.remove(value)
            model.graph.register_initializer(value)
        return model


def convert(folder: Path, config: dict[str, Any], output: Path, num_layers: int | None = None) -> PlainGraph:
    """Trace the model in `folder` with its cache, in float32.

    Args:
        folder: a Hugging Face folder with `config.json` and safetensors weights.
        config: the content of `config.json`.
        output: an empty folder for the graph.
        num_layers: only so many of the first layers.
    Raises:
        ExportError: optimum does not know the architecture, tracing failed, or a weight is missing.
    """
    try:
        with quiet():
            return _trace(folder, config, output, num_layers)
    except EdgespecError:
        raise
    except Exception as error:
        if is_disk_full(error) or isinstance(error, MemoryError):
            raise  # the machine's fault, not the model's
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExportError(
            f"{folder}: optimum could not convert this {config.get('model_type', 'unknown')} model ({reason})"
        ) from error


def _trace(folder: Path, config: dict[str, Any], output: Path, num_layers: int | None) -> PlainGraph:
    # optimum loses the cap of attention scores unless attention is computed in the plain way
    model = make_skeleton(folder, num_layers, eager=config.get("attn_logit_softcapping") is not None)
    checkpoint = Checkpoint(folder)
    load_buffers(model, checkpoint)
    names = find_weights(model, checkpoint)
    stand_in(model)
    path = output / "model.onnx"
    _export(model, path)
    buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    return PlainGraph(path, checkpoint, names, buffers)


def _export(model: Any, path: Path) -> None:
    """What optimum's `main_export` does for a decoder, but for the weights, which stay outside as inputs."""
    import optimum.exporters.onnx.model_configs  # noqa: F401 - registers the architectures
    import torch
    from optimum.exporters.tasks import TasksManager

    make_config: Callable[..., Any] = TasksManager.get_exporter_config_constructor(
        model=model, exporter="onnx", task=_TASK, library_name="transformers"
    )
    description = make_config(
        model.config, int_dtype="int64", float_dtype="fp32", use_past=True, use_past_in_inputs=True
    )
    model.config.return_dict = True
    for key, value in (description.values_override or {}).items():
        setattr(model.config, key, value)
    example = description.rename_ambiguous_inputs(description.generate_dummy_inputs(framework="pt"))
    # All rows: which of them are wanted is decided by an input that the fusing pass adds.
    every_row = {"logits_to_keep": 0} if "logits_to_keep" in signature(model.forward).parameters else {}
    with torch.no_grad(), description.patch_model_for_export(model, model_kwargs=every_row):
        inputs, outputs = description.ordered_inputs(model), description.outputs
        torch.onnx.export(
            model,
            (example,),
            f=str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=dict(inputs) | dict(outputs),
            opset_version=OPSET,
            export_params=False,
            keep_initializers_as_inputs=True,  # or equal-looking stand-ins would be merged
            do_constant_folding=False,  # it would fold the stand-ins
            dynamo=False,
        )


def _lazy(checkpoint: Checkpoint, stored: str, name: str) -> ir.TensorProtocol:
    """A tensor that is read from its file each time that it is looked at."""
    import onnx_ir as ir

    def read() -> ir.Tensor:
        return ir.Tensor(np.ascontiguousarray(checkpoint.read(stored)), name=name)

    return ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape(checkpoint.shape(stored)), name=name)
