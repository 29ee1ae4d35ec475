"""Drafts that were distilled from a target: their folder, and how they are joined with the target for an export.

Such a folder has the layers and the head only: the embedding is the target's, the tokenizer and the template, too. It
is `config.json` with the table `edgespec_draft`, `model.safetensors` with weights rounded to 8 bits, `head_ids.npy`
with the token of each column of the head, and a card.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, IncompatibleDraftError
from edgespec.export.quantize import Blocks, dequantize_blocks, quantize_blocks
from edgespec.export.source import Source
from edgespec.export.texts import read_json
from edgespec.export.weights import Checkpoint

MARK = "edgespec_draft"
FORMAT_VERSION = 1
HEAD_IDS = "head_ids.npy"
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
_BLOCK = 32
_PACKED, _SCALES, _WIDTH = ".packed", ".scales", ".width"
_PACKAGE = Path(__file__).resolve().parent.parent


def find_distilled(name: str) -> Path | None:
    """The folder of a distilled draft: a path, or the name of one that travels with edgespec; None if it is neither."""
    installed = _PACKAGE / "_data" / "models"
    models = installed if installed.is_dir() else _PACKAGE.parent / "models"
    places = [Path(name).expanduser()]
    places += [models / name] if Path(name).name == name else []
    return next((place for place in places if MARK in read_json(place / "config.json")), None)


def vocabulary_digest(tokenizer: Path) -> str:
    """sha256 (hex) of which id means which token."""
    from tokenizers import Tokenizer

    tokens = sorted(Tokenizer.from_file(str(tokenizer)).get_vocab(True).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def write_distilled(
    folder: Path, config: dict[str, Any], weights: dict[str, NDArray[np.float32]], head_ids: NDArray[np.int64]
) -> None:
    """Write configuration, weights and head.

    Args:
        folder: an empty one.
        config: with the table `edgespec_draft`.
        weights: by name, without the embedding. Matrices are rounded to 8 bits, the rest to float16.
        head_ids: ascending.
    """
    from safetensors.numpy import save_file

    arrays: dict[str, NDArray[Any]] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            arrays[name] = weight.astype(np.float16)
            continue
        blocks = quantize_blocks(weight, 8, _BLOCK)
        arrays[name + _PACKED], arrays[name + _SCALES] = blocks.packed, blocks.scales.astype(np.float16)
        arrays[name + _WIDTH] = np.array([blocks.width], np.int64)
    save_file(arrays, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # the library lets only the owner read it
    np.save(folder / HEAD_IDS, head_ids.astype(np.int32), allow_pickle=False)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")


def join_distilled(folder: Path, target: Source, work: Path) -> Source:
    """A whole model of a distilled draft and its target's embedding.

    Args:
        folder: of the draft.
        target: that it will draft for.
        work: an empty folder for the model.
    Raises:
        IncompatibleDraftError: it was made for a model with other tokens or another embedding.
        ExportError: the folder is damaged.
    """
    config = read_json(folder / "config.json")
    about = config.pop(MARK)
    if about.get("format_version") != FORMAT_VERSION:
        raise ExportError(f"{folder} is a draft of another format version; distil it again")
    if about.get("vocabulary") != vocabulary_digest(target.tokenizer):
        raise IncompatibleDraftError(
            f"{folder} was distilled from {about.get('base')}, whose tokens are not those of {target.name}; "
            "distil a draft from this target"
        )
    embedding = _embedding(target, (config.get("vocab_size"), config.get("hidden_size")), folder)
    head_ids = _read_head_ids(folder, config)
    weights = _read_weights(folder)
    _write_whole(work, config, weights | {EMBEDDING: embedding}, head_ids)
    origin = f"{folder.resolve().name}, distilled from {about.get('base')}"
    return replace(
        target,
        name=folder.resolve().name,
        folder=work,
        origin=origin,
        licence=about.get("licence") or target.licence,
        config=config,
        head_ids=work / HEAD_IDS,
    )


def _write_whole(
    work: Path, config: dict[str, Any], weights: dict[str, NDArray[np.float32]], head_ids: NDArray[np.int32]
) -> None:
    from safetensors.numpy import save_file

    save_file(weights, work / WEIGHTS)
    np.save(work / HEAD_IDS, head_ids, allow_pickle=False)
    (work / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _embedding(target: Source, shape: tuple[Any, Any], folder: Path) -> NDArray[np.float32]:
    checkpoint = Checkpoint(target.folder)
    name = next((n for n in (EMBEDDING, EMBEDDING.removeprefix("model.")) if n in checkpoint), None)
    if name is None or checkpoint.shape(name) != shape:
        raise IncompatibleDraftError(
            f"{folder} needs a target with an embedding of {shape[0]} x {shape[1]}; distil a draft from {target.name}"
        )
    return checkpoint.read(name)


def _read_head_ids(folder: Path, config: dict[str, Any]) -> NDArray[np.int32]:
    try:
        ids = np.load(folder / HEAD_IDS, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ExportError(f"{folder / HEAD_IDS} cannot be read ({error}); distil the draft again") from error
    if ids.dtype != np.int32 or ids.shape != (config.get("head_size"),):
        raise ExportError(f"{folder / HEAD_IDS} does not fit config.json; distil the draft again")
    return ids  # type: ignore[no-any-return]


def _read_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    from safetensors.numpy import load_file

    try:
        stored = load_file(folder / WEIGHTS)
        made = {n: w.astype(np.float32) for n, w in stored.items() if not n.endswith((_PACKED, _SCALES, _WIDTH))}
        for name in (n.removesuffix(_PACKED) for n in stored if n.endswith(_PACKED)):
            scales, width = stored[name + _SCALES].astype(np.float32), int(stored[name + _WIDTH][0])
            made[name] = dequantize_blocks(Blocks(stored[name + _PACKED], scales, width, 8, _BLOCK))
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{folder / WEIGHTS} cannot be read ({error}); distil the draft again") from error
    return {name: np.ascontiguousarray(weight) for name, weight in made.items()}
