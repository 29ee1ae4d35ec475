"""A torch model whose weights are not in memory: to trace, or to run with one weight at a time.

Every parameter lives on torch's `meta` device, where it has a shape and no contents. Buffers, which models compute
themselves, are real.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.weights import Checkpoint


def make_skeleton(folder: Path, num_layers: int | None = None, *, eager: bool = True) -> Any:
    """The model of `folder` in float32 without its weights.

    Args:
        folder: a Hugging Face folder.
        num_layers: only so many of its first layers.
        eager: attention in the plain way, without fused kernels that leave out a model's peculiarities.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if num_layers is not None:
        _cut_layers(config.get_text_config(), num_layers)
    chosen = {"attn_implementation": "eager"} if eager else {}
    with _weightless(), torch.no_grad():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen).eval()


def find_weights(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Which weight of the checkpoint each parameter is: its name in the model -> its name in the file.

    A parameter may be stored under the name of another that is tied to it, with or without the prefix that sets the
    decoder apart from its head, and under an older name that the model's class knows.

    Raises:
        ExportError: one is missing, or has another shape.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    prefix = f"{model.base_model_prefix}."
    renamed = {_rename(model, name): name for name in checkpoint}
    found = {}
    for name, parameter in model.named_parameters():
        candidates = [c for n in names[id(parameter)] for c in (n, n.removeprefix(prefix), prefix + n)]
        stored = next((c for c in candidates if c in checkpoint), None)
        stored = stored or next((renamed[c] for c in candidates if c in renamed), None)
        if stored is None:
            raise ExportError(f"{checkpoint.folder} lacks the weight {name}; download it again")
        if checkpoint.shape(stored) != tuple(parameter.shape):
            raise ExportError(
                f"{checkpoint.folder}: {stored} has the shape {list(checkpoint.shape(stored))} and config.json asks "
                f"for {list(parameter.shape)}; the two do not belong together"
            )
        found[name] = stored
    return found


def _rename(model: Any, stored: str) -> str:
    """The present name of a weight that was stored under an earlier one, as transformers maps it on loading."""
    for pattern, replacement in getattr(model, "_checkpoint_conversion_mapping", {}).items():
        name, count = re.subn(pattern, replacement, stored)
        if count:
            return name
    return stored


def stand_in(model: Any) -> None:
    """Give all parameters of a skeleton room that they share: enough to trace it, and as large as the largest."""
    import torch

    most = max(parameter.numel() for parameter in model.parameters())
    room = torch.zeros(most)
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                view = room[: parameter.numel()].view(parameter.shape)
                module._parameters[name] = made.setdefault(id(parameter), _parameter(view))


def stream_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Let each module of a skeleton read its weights when it is called, and forget them afterwards."""
    import torch

    stored = find_weights(model, checkpoint)
    places = {id(parameter): stored[name] for name, parameter in model.named_parameters()}

    def hook(module: Any) -> None:
        meta = {name: p for name, p in module._parameters.items() if p is not None}

        def load(*_: Any) -> None:
            for name, parameter in meta.items():
                weight = torch.from_numpy(checkpoint.read(places[id(parameter)]))
                module._parameters[name] = _parameter(weight)

        def forget(*_: Any) -> None:
            module._parameters.update(meta)

        if meta:
            module.register_forward_pre_hook(load)
            module.register_forward_hook(forget, always_call=True)

    for module in model.modules():
        hook(module)


def load_buffers(model: Any, checkpoint: Checkpoint) -> None:
    """Take over the few buffers that a checkpoint stores."""
    import torch

    for name, buffer in model.named_buffers():
        if name in checkpoint and checkpoint.shape(name) == tuple(buffer.shape) and buffer.is_floating_point():
            buffer.copy_(torch.from_numpy(checkpoint.read(name)))


@contextlib.contextmanager
def _weightless() -> Iterator[None]:
    """Move every parameter to `meta` as soon as a module registers it, so that one at a time exists."""
    import torch

    register = torch.nn.Module.register_parameter

    def register_parameter(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one that is tied to another must stay the same object
            module._parameters[name] = _parameter(parameter.to("meta"))

    torch.nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _parameter(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=False)


def _cut_layers(config: Any, num_layers: int) -> None:
    """Fewer layers, and as much less of every list that has an entry for each."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = num_layers
