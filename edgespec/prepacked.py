"""Graphs of a bundle with weights that are mapped from a file instead of copied into the process.

ONNX Runtime brings most weights into another order before it computes with them, in memory of its own. It can also
write them down in that order: the first session of a graph does so in the user's cache folder, later ones map that
file. The system shares its pages between processes and takes them back when memory is short.

Owns those files: their names, when they are written and when they go. Knows nothing of what is in a graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from edgespec.bundle import Bundle, ModelInfo, cache_dir
from edgespec.errors import SessionError
from edgespec.ort import open_session, provider_name, runtime_version
from edgespec.params import RuntimeParams
from edgespec.selfcheck import machine_name

_VERSION = 1
_ENTRY = "entry.json"
_GRAPH = "model.onnx"
_LEAST = 4 << 20  # bytes of weights from which on mapping is worth a file
_ROOM = 5  # times the weights that must be free on the disk; they take up to 2.3 times
_ABANDONED_S = 3600.0  # age of an unfinished entry that nobody can be writing any more


def open_graph(bundle: Bundle, info: ModelInfo, runtime: RuntimeParams) -> Any:
    """ONNX Runtime's session of a graph of a bundle, on mapped weights where that is possible and asked for.

    Results are the same to the last bit. What cannot be kept in the cache folder is loaded in the usual way.

    Raises:
        SessionError, ConfigError: as `open_session`.
    """
    path = bundle.path / info.path
    folder = info.path.rpartition("/")[0]
    files = {n: f for n, f in bundle.manifest.files.items() if n.rpartition("/")[0] == folder}
    size = sum(f.size for f in files.values())
    is_cpu = provider_name(runtime.provider) == "CPUExecutionProvider"
    if not runtime.map_weights or not is_cpu or size < _LEAST:
        return open_session(path, runtime)
    hashes = {name: f.sha256 for name, f in files.items()}
    # Files that are not hashed at load may have been changed.
    stamps = [os.path.getmtime(bundle.path / name) for name in sorted(files)]
    key = _digest([_VERSION, hashes, stamps, runtime_version(), machine_name()])
    entry = cache_dir() / "prepacked" / _digest(os.path.abspath(path)) / key
    session = _read(entry, runtime)
    return _write(entry, path, size, runtime) if session is None else session


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(entry: Path, runtime: RuntimeParams) -> Any:
    """A session on an entry, or `None` where there is none that is whole."""
    try:
        sizes = json.loads((entry / _ENTRY).read_text(encoding="utf-8"))["sizes"]
        if sizes == _sizes(entry):
            return open_session(entry / _GRAPH, runtime)
    except (OSError, ValueError, KeyError, TypeError, SessionError):
        pass
    shutil.rmtree(entry, ignore_errors=True)
    return None


def _write(entry: Path, path: Path, size: int, runtime: RuntimeParams) -> Any:
    """A session on the graph itself that leaves an entry behind, if it can."""
    part = entry.with_name(f"{entry.name}.{secrets.token_hex(4)}.part")
    session = None
    try:
        part.mkdir(parents=True)
        if shutil.disk_usage(part).free < _ROOM * size:
            raise OSError("no room")
        session = open_session(path, runtime, save_to=part / _GRAPH)
        _finish(part, path)
        part.rename(entry)  # fails where another process was faster
        _tidy(entry)
    except (OSError, SessionError):
        pass  # whatever is wrong with the graph itself is wrong again without the entry
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_session(path, runtime) if session is None else session


def _finish(part: Path, path: Path) -> None:
    """Describe an entry, and see that its files are on the disk before they have their final name."""
    for file in part.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
    document = {"graph": os.path.abspath(path), "sizes": _sizes(part)}
    (part / _ENTRY).write_text(json.dumps(document), encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.name != _ENTRY}


def _tidy(kept: Path) -> None:
    """Remove what no load will look at again: other entries of the same graph, and those of graphs that are gone."""
    for entry in kept.parent.parent.glob("*/*"):
        with contextlib.suppress(OSError):
            if entry != kept and _is_useless(entry, kept.parent):
                shutil.rmtree(entry, ignore_errors=True)
                entry.parent.rmdir()  # where it was the last


def _is_useless(entry: Path, current: Path) -> bool:
    if entry.suffix == ".part":
        return time.time() - entry.stat().st_mtime > _ABANDONED_S
    if entry.parent == current:
        return True
    try:
        return not Path(json.loads((entry / _ENTRY).read_text(encoding="utf-8"))["graph"]).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return True
