"""What lies in a folder of ONNX files that somebody else made: which graph is meant, and what is said beside it.

Known are folders of onnxruntime-genai's model builder (`genai_config.json`) and folders with `config.json` and the
graphs beside it or in `onnx/`, as optimum writes them and as they lie on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.texts import chat_template, eos_token_ids, licence, read_json, special_tokens

_GENAI = "genai_config.json"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class OnnxFolder:
    """A model in ONNX that is there already.

    Attributes:
        name, origin: for people.
        graph: path of the graph.
        tokenizer: path of `tokenizer.json`.
        config: the model's `config.json`, or an empty table.
        context_length: most tokens that are promised.
        heads, head_dim: of the cache, where something beside the graph says so.
        names: the graph's name -> the usual one, for inputs and outputs called otherwise.
        chat_template, special_tokens, eos_token_ids, licence: as in a bundle.
    """

    name: str
    origin: str
    graph: Path
    tokenizer: Path
    config: dict[str, Any]
    context_length: int
    heads: int | None
    head_dim: int | None
    names: dict[str, str]
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    licence: str | None


def read_onnx_folder(folder: Path, variant: str | None = None) -> OnnxFolder:
    """Find the graph and what belongs to it.

    Args:
        folder: as users have it.
        variant: of several graphs `model_VARIANT.onnx`.
    Raises:
        ExportError: a part is missing, or several graphs could be meant.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder; name the folder of an ONNX model")
    config = read_json(folder / "config.json")
    genai = read_json(folder / _GENAI)
    if not config and not genai:
        raise ExportError(f"{folder} has neither config.json nor {_GENAI}; name the folder of an ONNX model")
    if not (folder / "tokenizer.json").is_file():
        raise ExportError(f"{folder} has no tokenizer.json; put the one of the model there")
    described = _from_genai(folder, genai) if genai else _from_config(config)
    settings = read_json(folder / "tokenizer_config.json")
    special = special_tokens(settings | read_json(folder / "special_tokens_map.json"))
    stated = config | ({"eos_token_id": described.eos} if described.eos is not None else {})
    graph = described.graph or _choose_graph(folder, variant)
    maker = "onnxruntime-genai" if genai else graph.relative_to(folder).as_posix()
    return OnnxFolder(
        name=folder.resolve().name,
        origin=f"folder {folder.resolve().name} ({maker})",
        graph=graph,
        tokenizer=folder / "tokenizer.json",
        config=config,
        context_length=described.context_length,
        heads=described.heads,
        head_dim=described.head_dim,
        names=described.names,
        chat_template=chat_template(folder, settings),
        special_tokens=special,
        eos_token_ids=eos_token_ids(folder, stated, folder / "tokenizer.json", special),
        licence=licence(folder),
    )


@dataclass(frozen=True, slots=True)
class _Described:
    graph: Path | None
    context_length: int
    heads: int | None
    head_dim: int | None
    names: dict[str, str]
    eos: Any = None


def _from_config(config: Mapping[str, Any]) -> _Described:
    text = config.get("text_config") or config
    heads = _count(text, "num_key_value_heads") or _count(text, "num_attention_heads") or _count(text, "n_head")
    return _Described(None, _context(text), heads, _head_dim(text), {})


def _from_genai(folder: Path, genai: Mapping[str, Any]) -> _Described:
    model = genai.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise ExportError(f"{folder / _GENAI} describes no decoder; name the folder of a text model")
    file = str(decoder.get("filename", "model.onnx"))
    graph = folder / file
    if not graph.resolve().is_relative_to(folder.resolve()):
        raise ExportError(f"{folder / _GENAI} names a graph outside of its folder ({file}); do not use it")
    if not graph.is_file():
        raise ExportError(f"{folder} lacks {file}, which {_GENAI} names; make it again")
    layers = _count(decoder, "num_hidden_layers") or 0
    return _Described(
        graph,
        _count(model, "context_length") or _DEFAULT_CONTEXT,
        _count(decoder, "num_key_value_heads"),
        _count(decoder, "head_size"),
        _usual_names(decoder, min(layers, 1024)),
        model.get("eos_token_id"),
    )


def _usual_names(decoder: Mapping[str, Any], layers: int) -> dict[str, str]:
    """What the configuration calls the graph's inputs and outputs -> what we call them, where that differs."""
    found = {}
    for side in ("inputs", "outputs"):
        table = decoder.get(side)
        for key, value in (table if isinstance(table, dict) else {}).items():
            if not isinstance(value, str):
                continue
            pattern = _PATTERNS.get(key)
            if pattern is None:
                found[value] = key
            elif value.count("%d") == 1:
                found |= {value.replace("%d", str(i)): pattern.replace("%d", str(i)) for i in range(layers)}
    return {theirs: ours for theirs, ours in found.items() if theirs != ours}


_PATTERNS = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}


def _choose_graph(folder: Path, variant: str | None) -> Path:
    places = [folder / "onnx", folder]
    found = {file.stem: file for place in places if place.is_dir() for file in sorted(place.glob("*.onnx"))}
    if variant is not None:
        wanted = variant.removesuffix(".onnx")
        named = [name for name in (f"model_{wanted}", wanted) if name in found]
        if named:
            return found[named[0]]
        raise ExportError(f"{folder} has no variant {variant!r}; it has {', '.join(sorted(found)) or 'no graph'}")
    if "model" in found:
        return found["model"]
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ExportError(f"{folder} has no .onnx file, nor has a folder onnx in it; name the folder of an ONNX model")
    raise ExportError(f"{folder} has several graphs ({', '.join(sorted(found))}); choose one with --variant")


def _context(config: Mapping[str, Any]) -> int:
    return next((size for key in _CONTEXT_KEYS if (size := _count(config, key))), _DEFAULT_CONTEXT)


def _head_dim(config: Mapping[str, Any]) -> int | None:
    own = _count(config, "head_dim")
    width, heads = (_count(config, a) or _count(config, b) for a, b in (("hidden_size", "n_embd"), _HEADS))
    return own or (width // heads if width and heads else None)


_HEADS = ("num_attention_heads", "n_head")


def _count(table: Mapping[str, Any], key: str) -> int | None:
    value = table.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
