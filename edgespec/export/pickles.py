"""Pickled weights, which can run code when they are read: refused, or read by torch's restricted reader if allowed."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgespec.errors import ExportError

_PATTERN = "pytorch_model*.bin"


def unpickle(folder: Path, work: Path, allowed: bool) -> Path:
    """Store pickled weights as safetensors, with the folder's other files beside them, and return that folder.

    torch reads nothing but tensors from them (`weights_only`), one file at a time.

    Raises:
        ExportError: there are none, they are not allowed, or hold something else than tensors.
    """
    files = sorted(folder.glob(_PATTERN))
    if not files:
        raise ExportError(f"{folder} has no .safetensors weights; name a Hugging Face model folder")
    if not allowed:
        raise ExportError(
            f"{folder} has pickled weights only ({files[0].name}), and reading those can run code; "
            "use --allow-pickle if you trust whoever made them, or take a copy in safetensors"
        )
    output = work / "unpickled"
    output.mkdir()
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, output / file.name)
    for file in files:
        _convert(file, output / f"{file.stem}.safetensors")
    return output


def _convert(file: Path, to: Path) -> None:
    import torch
    from safetensors.torch import save_file

    try:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
    except OSError:
        raise
    except Exception as error:  # pickle's, zipfile's and torch's classes all mean the same to the user
        raise ExportError(f"{file} holds something else than weights, which is not read; do not use it") from error
    save_file(tensors, to, {"format": "pt"})
