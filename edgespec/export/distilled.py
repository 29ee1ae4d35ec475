"""Drafts that were distilled from a target: their folder, read and written.

Such a folder has neither embedding nor tokenizer nor template: these are the target's. It is `config.json` with the
table `edgespec_draft`, `model.safetensors` with weights rounded to 8 bits, `head_ids.npy` with the token of each column
of the head, and a card. What a draft computes is in `draft_graph`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_VOCAB
from edgespec.errors import BundleError, ExportError, IncompatibleDraftError
from edgespec.export.quantize import Blocks, dequantize_blocks, quantize_blocks
from edgespec.export.source import Source
from edgespec.export.texts import read_json
from edgespec.fields import Fields
from edgespec.head import read_head
from edgespec.lookup import NUM_HINT_KINDS

MARK = "edgespec_draft"
FORMAT_VERSION = 4
HEAD_IDS = "head_ids.npy"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_BLOCK = 32
_LEAST_ROWS = 64  # of a matrix that is worth rounding to 8 bits
_PACKED, _SCALES, _WIDTH = ".packed", ".scales", ".width"
_PACKAGE = Path(__file__).resolve().parent.parent
_AGAIN = "distil the draft again"
# What configurations call the sizes that a draft must share with its target.
_TARGET_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
}

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Distilled:
    """A draft's folder, checked but for the weights.

    Attributes:
        folder: of the draft.
        base: where the target that it was distilled from came from.
        licence: of the base.
        hidden_layers: of the target, in whose input the draft's first step begins, beside the head's.
        hidden_size: of the target's rows and of the draft's state.
        intermediate_size, num_blocks: of the draft's gated MLPs.
        rms_norm_eps: of its norms.
        head_size: tokens that it can draft.
        vocab_size: rows of the target's embedding.
        head_ids: those tokens, ascending, shape (head_size,).
        attended_layer: of the target, whose keys and values the draft's attention looks at; None where it has none.
        num_heads, num_kv_heads, head_dim: of that attention, 0 where there is none. The last two are the layer's.
    """

    folder: Path
    base: str
    licence: str | None
    hidden_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    rms_norm_eps: float
    head_size: int
    vocab_size: int
    head_ids: NDArray[np.int64]
    attended_layer: int | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def origin(self) -> str:
        return f"{self.name}, distilled from {self.base}"

    @property
    def num_features(self) -> int:
        """Width of a row of the target's `hidden`."""
        return (len(self.hidden_layers) + 1) * self.hidden_size

    @property
    def files(self) -> list[Path]:
        """All that an export depends on."""
        return [self.folder / name for name in (CONFIG, WEIGHTS, HEAD_IDS)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight."""
        size, width = self.hidden_size, self.intermediate_size
        block = {"norm": (size,), "gate_proj": (width, size), "up_proj": (width, size), "down_proj": (size, width)}
        found: dict[str, tuple[int, ...]] = {"fc": (size, self.num_features), "norm_state": (size,)}
        found |= {"norm_token": (size,), "mix": (size, 2 * size)}
        if self.attended_layer is not None:
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            attention = {"norm": (size,), "q_proj": (queries, size), "k_proj": (keys, size), "v_proj": (keys, size)}
            attention["o_proj"] = (size, queries)
            found |= {f"attention.{name}": shape for name, shape in attention.items()}
        found |= {f"blocks.{i}.{name}": shape for i in range(self.num_blocks) for name, shape in block.items()}
        found |= {"hints": (NUM_HINT_KINDS, size), "norm": (size,), "head": (self.head_size, size)}
        return {f"{name}.weight": shape for name, shape in found.items()}

    @property
    def num_parameters(self) -> int:
        """Of its weights and of the target's embedding."""
        own = sum(int(np.prod(shape)) for shape in self.shapes.values())
        return own + self.vocab_size * self.hidden_size

    def read_weights(self) -> Weights:
        """The weights by name.

        Raises:
            ExportError: the file is damaged or has other weights.
        """
        found = _read_weights(self.folder)
        shapes = {name: weight.shape for name, weight in found.items()}
        if shapes != self.shapes:
            different = sorted(n for n in shapes.keys() | self.shapes.keys() if shapes.get(n) != self.shapes.get(n))
            raise ExportError(f"{self.folder / WEIGHTS} does not fit {CONFIG} ({different[0]}); {_AGAIN}")
        return found


def find_distilled(name: str) -> Path | None:
    """The folder of a distilled draft: a path, or the name of one that travels with edgespec; None if it is neither."""
    installed = _PACKAGE / "_data" / "models"
    models = installed if installed.is_dir() else _PACKAGE.parent / "models"
    places = [Path(name).expanduser()]
    places += [models / name] if Path(name).name == name else []
    return next((place for place in places if MARK in read_json(place / CONFIG)), None)


def vocabulary_digest(tokenizer: Path) -> str:
    """sha256 (hex) of which id means which token."""
    from tokenizers import Tokenizer

    tokens = sorted(Tokenizer.from_file(str(tokenizer)).get_vocab(True).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def write_distilled(
    folder: Path, about: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], head_ids: NDArray[np.int64]
) -> None:
    """Write configuration, weights and head.

    Args:
        folder: an empty one.
        about: the table `edgespec_draft`: `format_version` and what `Distilled` has of sizes, `base`, `licence`, and
            `vocabulary`, the target's digest.
        weights: by name, as `Distilled.shapes` says. Large matrices are rounded to 8 bits, the rest to float16.
        head_ids: ascending.
    """
    from safetensors.numpy import save_file

    arrays: dict[str, NDArray[Any]] = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or len(weight) < _LEAST_ROWS:
            arrays[name] = weight.astype(np.float16)
            continue
        blocks = quantize_blocks(weight, 8, _BLOCK)
        arrays[name + _PACKED], arrays[name + _SCALES] = blocks.packed, blocks.scales.astype(np.float16)
        arrays[name + _WIDTH] = np.array([blocks.width], np.int64)
    save_file(arrays, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # the library lets only the owner read it
    np.save(folder / HEAD_IDS, head_ids.astype(np.int32), allow_pickle=False)
    text = json.dumps({MARK: dict(about)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8", newline="\n")


def read_distilled(folder: Path, target: Source) -> Distilled:
    """Read a draft's folder, but for its weights, and hold it against the target that it is to draft for.

    Raises:
        IncompatibleDraftError: it was made for a model with other tokens or sizes.
        ExportError: the folder is damaged.
    """
    about = read_json(folder / CONFIG).get(MARK)
    if not isinstance(about, dict) or about.get("format_version") != FORMAT_VERSION:
        raise ExportError(f"{folder} is a draft of another format version; {_AGAIN}")
    try:
        made = _distilled(folder, Fields(about, f"{MARK}."))
    except BundleError as error:
        reason = str(error).partition(";")[0]
        raise ExportError(f"{folder} is no sound draft: {reason}; {_AGAIN}") from error
    if about.get("vocabulary") != vocabulary_digest(target.tokenizer):
        raise IncompatibleDraftError(
            f"{folder} was distilled from {made.base}, whose tokens are not those of {target.name}; "
            "distil a draft from this target"
        )
    for name, keys in _TARGET_SIZES.items():
        found = next((target.config[key] for key in keys if key in target.config), None)
        if found is not None and found != getattr(made, name):
            raise other_target(made, target.name)
    return made


def other_target(made: Distilled, name: str) -> IncompatibleDraftError:
    """The error for a target with another embedding than the draft's."""
    return IncompatibleDraftError(
        f"{made.folder} needs a target with an embedding of {made.vocab_size} x {made.hidden_size}; "
        f"distil a draft from {name}"
    )


def _distilled(folder: Path, about: Fields) -> Distilled:
    epsilon = about.data.get("rms_norm_eps")
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise BundleError(f"rms_norm_eps is {epsilon!r}")
    layers = about.integers("hidden_layers")
    if not 0 < len(layers) <= MAX_LAYERS:
        raise BundleError(f"hidden_layers has {len(layers)} entries")
    head_size, vocab_size = about.count("head_size", MAX_VOCAB), about.count("vocab_size", MAX_VOCAB)
    ids = read_head(folder / HEAD_IDS, vocab_size).ids
    if len(ids) != head_size:
        raise BundleError(f"{HEAD_IDS} has {len(ids)} tokens and not {head_size}")
    layer, heads = _attention(about)
    return Distilled(
        folder=folder,
        base=about.text("base"),
        licence=about.text("licence") if about.has("licence") else None,
        hidden_layers=tuple(layers),
        hidden_size=about.count("hidden_size", MAX_VOCAB),
        intermediate_size=about.count("intermediate_size", MAX_VOCAB),
        num_blocks=about.count("num_blocks", MAX_LAYERS, least=0),
        rms_norm_eps=epsilon,
        head_size=head_size,
        vocab_size=vocab_size,
        head_ids=ids,
        attended_layer=layer,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
    )


def _attention(about: Fields) -> tuple[int | None, tuple[int, int, int]]:
    """The attended layer, and heads, key/value heads and head size; no layer and zeros where there is no attention."""
    most = int(about.has("attended_layer"))
    layer = about.count("attended_layer", MAX_LAYERS, least=0) if most else None
    kv_heads = about.count("num_kv_heads", most * MAX_KV_HEADS, least=most)
    heads = about.count("num_heads", most * MAX_VOCAB, least=most)
    head_dim = about.count("head_dim", most * MAX_HEAD_DIM, least=most)
    if most and heads % kv_heads:
        raise BundleError(f"num_heads is {heads}, which {kv_heads} key/value heads cannot be shared by")
    return layer, (heads, kv_heads, head_dim)


def _read_weights(folder: Path) -> Weights:
    from safetensors.numpy import load_file

    try:
        return dict(_dequantized(load_file(folder / WEIGHTS)))
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{folder / WEIGHTS} cannot be read ({error}); {_AGAIN}") from error


def _dequantized(stored: dict[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name, array in stored.items():
        if name.endswith(_PACKED):
            name = name.removesuffix(_PACKED)
            scales, width = stored[name + _SCALES].astype(np.float32), int(stored[name + _WIDTH][0])
            yield name, np.ascontiguousarray(dequantize_blocks(Blocks(array, scales, width, 8, _BLOCK)))
        elif not name.endswith((_SCALES, _WIDTH)):
            yield name, array.astype(np.float32)
