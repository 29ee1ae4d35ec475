"""Texts with the target's distributions, in files that appear whole. Owns their format; knows no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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


_NAMES = tuple(Texts.__dataclass_fields__)


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest type that holds a token id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


class Store:
    """A folder of numbered files of each sort (`written`, `read`). File 0 of a sort is for validation.

    The target's hidden states of a file's texts lie beside it, each choice of layers in a folder of its own.
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

    def fill_hidden(
        self,
        sort: str,
        wanted: int,
        layers: Sequence[int],
        make: Callable[[NDArray[np.int64]], NDArray[np.float16]],
        tell: Callable[[int, int], None],
    ) -> None:
        """Make the hidden states that are missing of the first files of a sort."""
        for index in range(wanted):
            path = self._hidden_path(sort, index, layers)
            if not path.is_file():
                tell(index, wanted)
                path.parent.mkdir(exist_ok=True)
                made = make(self.load(sort, [index]).tokens.astype(np.int64))
                write_atomically(path, lambda stream, made=made: np.save(stream, made, allow_pickle=False))  # type: ignore[misc]

    def hidden(self, sort: str, index: int, layers: Sequence[int]) -> NDArray[np.float16]:
        """Hidden states of a file's texts, shape (n, length, features), left on the disk until they are used."""
        path = self._hidden_path(sort, index, layers)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error

    def _hidden_path(self, sort: str, index: int, layers: Sequence[int]) -> Path:
        return self.folder / f"hidden-{'-'.join(map(str, layers))}" / f"{sort}-{index:05d}.npy"

    def _path(self, sort: str, index: int) -> Path:
        return self.folder / f"{sort}-{index:05d}.npz"

    def _load(self, path: Path) -> Texts:
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                return Texts(*(archive[name] for name in _NAMES))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise _damaged(path, error) from error


def write_json(path: Path, value: object) -> None:
    """A small document beside the texts, which appears whole or not at all as well."""
    write_atomically(path, lambda stream: stream.write(json.dumps(value).encode()))


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged ({error}): delete it, it will be made again")
