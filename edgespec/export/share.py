"""Weights that target and draft have in common, stored once. Knows files and offsets; nothing of what weights are.

A draft that was distilled from its target has the target's embedding. External data must lie in the folder of the graph
that names it, and links are taken for attacks, so the draft's graph moves to its target's folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import onnx

from edgespec.export.write import WEIGHTS

_WORTH = 0.1  # of the draft's weights from which on it is done; norms and tables of angles are less
_LEAST = 1 << 20  # bytes, likewise
_PIECE = 1 << 20

Place = tuple[str, int, int]  # file, offset, bytes


def share_weights(target: Path, draft: Path, name: str) -> Path:
    """Store weights that both graphs have to the last bit only in the target's file, if they are many.

    May be done again where it was interrupted.

    Args:
        target, draft: the graphs, in folders of their own. The target's files are not touched.
        name: of the draft's graph beside the target.
    Returns:
        The draft's graph: where it was, or beside the target.
    """
    moved, old = target.with_name(name), draft.with_name(WEIGHTS)
    if moved.exists() and not draft.exists():
        old.unlink(missing_ok=True)  # where it was interrupted just before
        return moved
    model = onnx.load(draft, load_external_data=False)
    own, theirs = _external_tensors(model), _external_tensors(onnx.load(target, load_external_data=False))
    common = _common(own, old, theirs, target.with_name(WEIGHTS)) if own and theirs else {}
    if not common or sum(place[2] for place in common.values()) < max(_LEAST, _WORTH * old.stat().st_size):
        return draft
    weights = moved.with_name(f"{name}.data")
    with weights.open("wb") as out, old.open("rb") as source:
        for name, tensor in own.items():
            _set_place(tensor, common[name] if name in common else _append(_place(tensor), source, out, weights.name))
    part = moved.with_name(f"{name}.part")
    onnx.save(model, part)
    os.replace(part, moved)
    draft.unlink()
    old.unlink()
    return moved


def _external_tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Name -> tensor in `model.onnx.data`; none at all where the graph keeps any in a place that is not looked at."""
    nested = any(a.HasField("g") or a.graphs or a.t.external_data for n in model.graph.node for a in n.attribute)
    found = {t.name: t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    is_simple = not nested and not model.functions and all(_place(t)[0] == WEIGHTS for t in found.values())
    return found if is_simple else {}


def _place(tensor: onnx.TensorProto) -> Place:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries.get("offset", 0)), int(entries["length"])


def _set_place(tensor: onnx.TensorProto, place: Place) -> None:
    del tensor.external_data[:]
    for key, value in zip(("location", "offset", "length"), place, strict=True):
        tensor.external_data.add(key=key, value=str(value))


def _common(
    own: dict[str, onnx.TensorProto], old: Path, theirs: dict[str, onnx.TensorProto], weights: Path
) -> dict[str, Place]:
    """Name of each of the draft's tensors whose bytes the target's file has -> where."""
    sizes = {_place(tensor)[2] for tensor in own.values()}
    places = [_place(tensor) for tensor in theirs.values() if _place(tensor)[2] in sizes]
    with weights.open("rb") as stream:
        known = {_digest(stream, place): place for place in places}
    with old.open("rb") as stream:
        digests = {name: _digest(stream, _place(tensor)) for name, tensor in own.items()}
    return {name: known[digest] for name, digest in digests.items() if digest in known}


def _pieces(stream: IO[bytes], place: Place) -> Iterator[bytes]:
    _, offset, size = place
    stream.seek(offset)
    for start in range(0, size, _PIECE):
        yield stream.read(min(_PIECE, size - start))


def _digest(stream: IO[bytes], place: Place) -> bytes:
    digest = hashlib.sha256()
    for piece in _pieces(stream, place):
        digest.update(piece)
    return digest.digest()


def _append(place: Place, source: IO[bytes], out: IO[bytes], name: str) -> Place:
    start = out.tell()
    out.writelines(_pieces(source, place))
    return name, start, place[2]
