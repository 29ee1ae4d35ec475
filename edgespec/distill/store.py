"""Texts with the target's distributions, in files that appear whole. Owns their format; knows no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.state import write_atomically

# What a token is: put there by the template, written in a turn, or read.
TEMPLATE, USER, ANSWER, READ = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Rows of tokens and what the target says after each.

    Attributes:
        tokens: int32, shape (n, length).
        kinds: uint8, shape (n, length): of each token, one of the four above.
        temperatures: float32, shape (n,): that an answer was written at; 1 for what was read.
        ids: shape (n, length, kept): the most probable tokens after each, best first.
        logps: float16, the same shape: their log probabilities at temperature 1.
        chosen: float16, shape (n, length): log probability of the token that follows; of the last one 0.
    """

    tokens: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    temperatures: NDArray[np.float32]
    ids: NDArray[Any]
    logps: NDArray[np.float16]
    chosen: NDArray[np.float16]

    def rows(self, index: Any) -> Texts:
        """Some of the rows."""
        return Texts(*(getattr(self, name)[index] for name in _NAMES))

    @property
    def is_chosen(self) -> NDArray[np.bool_]:
        """Where what follows was chosen and not put there by a template: shape (n, length - 1)."""
        return self.kinds[:, 1:] != TEMPLATE  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Layers:
    """What a draft reads of its target.

    Attributes:
        hidden: layers whose attention's input is read, beside the head's.
        attended: the layer whose keys and values are attended to; None for none.
    """

    hidden: tuple[int, ...]
    attended: int | None = None

    def __str__(self) -> str:
        read = ", ".join(map(str, self.hidden))
        return read if self.attended is None else f"{read} and keys of {self.attended}"


class Seen(NamedTuple):
    """What a target computes of texts, as far as a draft reads it.

    Attributes:
        hidden: float16, shape (rows, length, features).
        keys: float16, shape (rows, length, 2, kv_heads, head_dim): keys, rotated, and values of a layer; None where no
            layer is attended to.
    """

    hidden: NDArray[np.float16]
    keys: NDArray[np.float16] | None


_NAMES = tuple(Texts.__dataclass_fields__)


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest type that holds a token id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


class Store:
    """A folder of numbered files of each sort (`written`, `asked`, `read`). File 0 of a sort is for validation.

    The target's hidden states of a file's texts, and the keys and values of a layer, lie beside it, each choice of
    layers in a folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def count(self, sort: str) -> int:
        """Files of a sort that are there, without a gap."""
        index = 0
        while self._path(sort, index).is_file():
            index += 1
        return index

    def fill(self, sort: str, wanted: int, make: Callable[[int], Texts], tell: Callable[[int, int], None]) -> None:
        """Make the files that are missing, each by its number alone, and tell how many there are."""
        for index in range(self.count(sort), wanted):
            tell(index, wanted)
            texts = make(index)
            arrays = {name: getattr(texts, name) for name in _NAMES}
            write_atomically(self._path(sort, index), lambda stream, arrays=arrays: np.savez(stream, **arrays))  # type: ignore[misc]

    def load(self, sort: str, numbers: Sequence[int]) -> Texts:
        """Some files of a sort as one."""
        found = [self._load(self._path(sort, index)) for index in numbers]
        return Texts(*(np.concatenate([getattr(texts, name) for texts in found]) for name in _NAMES))

    def fill_seen(
        self,
        sort: str,
        wanted: int,
        layers: Layers,
        make: Callable[[NDArray[np.int64]], Seen],
        tell: Callable[[int, int], None],
    ) -> None:
        """Make what the target computes that is missing of the first files of a sort."""
        for index in range(wanted):
            paths = self._seen_paths(sort, index, layers)
            if not all(path.is_file() for path in paths):
                tell(index, wanted)
                made = make(self.load(sort, [index]).tokens.astype(np.int64))
                for path, array in zip(paths, made, strict=False):
                    path.parent.mkdir(exist_ok=True)
                    write_atomically(path, lambda stream, array=array: np.save(stream, array, allow_pickle=False))  # type: ignore[misc]

    def seen(self, sort: str, index: int, layers: Layers) -> Seen:
        """What the target computes of a file's texts, left on the disk until it is used."""
        found = [_open_array(path) for path in self._seen_paths(sort, index, layers)]
        return Seen(found[0], found[1] if len(found) > 1 else None)

    def _seen_paths(self, sort: str, index: int, layers: Layers) -> list[Path]:
        folders = [f"hidden-{'-'.join(map(str, layers.hidden))}"]
        folders += [] if layers.attended is None else [f"keys-{layers.attended}"]
        return [self.folder / folder / f"{sort}-{index:05d}.npy" for folder in folders]

    def _path(self, sort: str, index: int) -> Path:
        return self.folder / f"{sort}-{index:05d}.npz"

    def _load(self, path: Path) -> Texts:
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                return Texts(*(archive[name] for name in _NAMES))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise _damaged(path, error) from error


def _open_array(path: Path) -> NDArray[np.float16]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def write_json(path: Path, value: object) -> None:
    """A small document beside the texts, which appears whole or not at all as well."""
    write_atomically(path, lambda stream: stream.write(json.dumps(value).encode()))


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged ({error}): delete it, it will be made again")
