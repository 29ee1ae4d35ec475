"""Caches in a file: what the models have read, so that a long conversation resumes at once.

The file is an uncompressed .npz: a JSON document, and for each model its tokens and its cache tensors. It is
untrusted: nothing in it is unpickled, and every name, shape and size is checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from edgespec.bundle import Manifest
from edgespec.errors import ConfigError
from edgespec.session import DecoderSession

_FORMAT_VERSION = 1
_MAX_HEADER = 4096  # bytes of the JSON document and of the header of an array


@dataclass(frozen=True, slots=True)
class CacheFile:
    """What caches depend on besides the tokens: another model or another way of computing has other ones.

    Attributes:
        bundle: `bundle_digest` of it.
        provider: ONNX Runtime's name of the provider that ran the models, or the two names of two.
        row_rule: of exact mode, or `off`.
    """

    bundle: str
    provider: str
    row_rule: str


def bundle_digest(manifest: Manifest) -> str:
    """One sha256 (hex) for all files of a bundle."""
    lines = [f"{name} {info.sha256}\n" for name, info in sorted(manifest.files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that appears whole or not at all."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("wb") as stream:
            write(stream)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_caches(path: Path, origin: CacheFile, sessions: Mapping[str, DecoderSession]) -> None:
    """Write the caches of named sessions."""
    document = json.dumps({"format_version": _FORMAT_VERSION, **asdict(origin)}).encode()
    arrays: dict[str, Any] = {"about": np.frombuffer(document, np.uint8)}
    for model, session in sessions.items():
        arrays[f"{model}/tokens"] = session.tokens
        arrays |= {f"{model}/{name}": array for name, array in session.read_cache().items()}
    write_atomically(path, lambda stream: np.savez(stream, **arrays))


def read_caches(path: Path, origin: CacheFile, sessions: Mapping[str, DecoderSession]) -> None:
    """Fill the caches of named sessions. Nothing is changed unless all of the file is sound.

    Raises:
        ConfigError: the file is damaged, or was made with another bundle or way of running it.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            reader = _Reader(archive)
            reader.check_origin(origin)
            found = {model: reader.model(model, session) for model, session in sessions.items()}
    except _Unfit as error:
        raise ConfigError(f"{path}: {error}; delete the file, the text will be read again") from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise ConfigError(f"{path} is no cache file, or damaged ({reason}): delete it") from error
    for model, (tokens, arrays) in found.items():
        sessions[model].write_cache(tokens, arrays)


class _Unfit(Exception):
    """The file is sound, but not for this engine, or not for any."""


class _Reader:
    """Arrays out of an archive, each with the type and shape that it must have."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def check_origin(self, origin: CacheFile) -> None:
        size = self._archive.getinfo("about.npy").file_size
        if size > _MAX_HEADER:
            raise _Unfit(f"its description has {size} bytes")
        with io.BytesIO(self._archive.read("about.npy")) as stream:
            length = _header(stream, np.dtype(np.uint8))[0]
            about = json.loads(stream.read(length))
        if not isinstance(about, dict) or about.get("format_version") != _FORMAT_VERSION:
            raise _Unfit("it was written by another version of edgespec")
        for name, value in asdict(origin).items():
            if about.get(name) != value:
                raise _Unfit(f"it was made with another {name.replace('_', ' ')}")

    def model(self, model: str, session: DecoderSession) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Tokens and cache tensors of one model."""
        tokens = self._array(f"{model}/tokens", np.dtype(np.int64), most=session.context_length)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < session.vocab_size:
            raise _Unfit("it has token ids outside the vocabulary")
        shapes = session.cache_shapes(len(tokens))
        types = session.cache_types()
        arrays = {n: self._array(f"{model}/{n}", np.dtype(types[n]), shape=s) for n, s in shapes.items()}
        return tokens, arrays

    def _array(
        self, name: str, dtype: np.dtype[Any], *, shape: tuple[int, ...] | None = None, most: int = 0
    ) -> NDArray[Any]:
        info = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(info) as stream:
            found = _header(stream, dtype)
            if shape is None:
                if len(found) != 1 or found[0] > most:
                    raise _Unfit(f"{name} has the shape {found}")
            elif found != shape:
                raise _Unfit(f"{name} has the shape {found} and not {shape}")
            size = int(np.prod(found)) * dtype.itemsize
            # One byte more than there may be, so that the end is reached and the checksum looked at.
            data = stream.read(size + 1)
        if len(data) != size:
            raise _Unfit(f"{name} has {len(data)} bytes or more, not {size}")
        return np.frombuffer(data, dtype).reshape(found)


def _header(stream: IO[bytes], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The shape that the header of an array gives, whose type and order must be ours."""
    if npy.read_magic(stream) != (1, 0):
        raise _Unfit("an array has another version of the .npy format")
    try:
        shape, is_fortran, found = npy.read_array_header_1_0(stream, max_header_size=_MAX_HEADER)
    except Exception as error:  # it is parsed as Python, and fails in as many ways
        raise ValueError("an array's header cannot be read") from error
    if is_fortran or found != dtype:
        raise _Unfit(f"an array has the type {found} and not {dtype}")
    return tuple(shape)
