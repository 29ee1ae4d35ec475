"""Weights in safetensors files, read one at a time. Owns the format's header; knows nothing of models.

The files are never mapped: mapped pages count as memory until they are let go, and an export reads every weight once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError

_MAX_HEADER = 100 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Brain floats are the upper halves of floats.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a weight lies: `size` bytes from `start` in `file`, of a dtype as the format spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Checkpoint:
    """The weights of a model folder by name.

    Args:
        folder: with `model.safetensors`, with shards and their index, or with any other `.safetensors` files.
    Raises:
        ExportError: a file is not what the format allows.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self._stored = {name: found for file in self.files for name, found in _read_header(file)}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    @property
    def num_parameters(self) -> int:
        return sum(prod(found.shape) for found in self._stored.values())

    @property
    def stored_bytes(self) -> int:
        """Size of all weights as they are stored."""
        return sum(found.size for found in self._stored.values())

    def read(self, name: str) -> NDArray[np.float32]:
        """A weight in float32.

        Raises:
            ExportError: it is stored in a type that is no float, or was cut off since.
        """
        found = self._stored[name]
        dtype = _DTYPES.get(found.dtype)
        if dtype is None:
            raise ExportError(
                f"{found.file}: {name} is stored as {found.dtype}, and only 16-, 32- and 64-bit floats are read; "
                "export the model that was not quantised"
            )
        with found.file.open("rb") as stream:
            stream.seek(found.start)
            flat = np.fromfile(stream, dtype, prod(found.shape))
        if flat.nbytes != found.size:
            raise ExportError(f"{found.file} ends before the weight {name}; download it again")
        return _as_float32(flat, found.dtype).reshape(found.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: those of the index, or `model.safetensors`, or all there are."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExportError(f"{index} is not an index of weights; download it again") from error
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            raise ExportError(f"{folder} lacks {missing[0]}, which its index names; download it again")
        return [folder / name for name in names]
    single = folder / _SINGLE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _as_float32(flat: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        flat = flat.astype(np.uint32)
        flat <<= 16
        brain: NDArray[np.float32] = flat.view(np.float32)
        return brain
    return flat.astype(np.float32, copy=False)


def _read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    """Eight bytes of length, JSON of that length, then the data; offsets count from its beginning."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header has no possible length")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _entry(file, entry, 8 + length, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{file} is not a readable safetensors file ({error}); download it again") from error


def _entry(file: Path, entry: dict[str, Any], base: int, size: int) -> Stored:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (start, end, *shape)) or not start <= end <= size - base:
        raise ValueError("a weight lies outside of it")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is not None and prod(shape) * dtype.itemsize != end - start:
        raise ValueError("a weight has another size than its shape")
    return Stored(file, str(entry["dtype"]), shape, base + start, end - start)
