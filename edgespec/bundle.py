"""Reading and checking a bundle: `edgespec.json`, hashes, the compatibility of the pair.

A bundle is untrusted input: every path stays inside the folder and every size is checked before it is used.
Knows nothing of ONNX Runtime, of ONNX files or of how bundles are made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from platformdirs import user_cache_dir

from edgespec.errors import BundleError, IncompatibleDraftError
from edgespec.fields import Fields, check_path
from edgespec.head import Head, read_head
from edgespec.params import RowInvariance

FORMAT = "edgespec"
FORMAT_VERSION = 1
MANIFEST = "edgespec.json"

CacheKind = Literal["shared", "growing", "none"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One graph of a bundle: its files, its contract and what the export found out about it.

    Attributes:
        path: of the graph, relative to the bundle, with forward slashes.
        cache: `shared` (past and present are one buffer, rollback is a number), `growing` (concatenated), or `none`: a
            draft that starts from the target's `hidden` and reads no text.
        num_layers, num_kv_heads, head_dim: the cache is `[1, num_kv_heads, capacity, head_dim]` twice a layer; 0
            where there is none.
        vocab_size: columns of the logits; at least the tokenizer's, padding rows included.
        context_length: most tokens the cache may hold.
        precision: `fp32`, `fp16`, `int8` or `int4`; `block_size` is None for floats.
        row_invariance: the smallest rule under which a row's logits do not depend on the call's other rows.
        num_parameters: of the original.
        source: where the weights came from, and their licence (SPDX where known).
        head_ids: relative path of the file with the token of each column of the graph's logits, where its head has
            not all tokens; `vocab_size` is then that of all tokens.
        hidden_layers: layers whose input is in the graph's output `hidden`, before that of the head; None where the
            graph has no such output.
    """

    path: str
    cache: CacheKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    precision: str
    block_size: int | None
    row_invariance: RowInvariance
    num_parameters: int
    source: str
    licence: str | None
    head_ids: str | None = None
    hidden_layers: tuple[int, ...] | None = None

    @property
    def has_hidden(self) -> bool:
        return self.hidden_layers is not None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes and sha256 (hex) of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`edgespec.json`.

    Attributes:
        name: of the bundle, for people.
        created_by: the edgespec version that wrote it.
        target, draft: the two models; `draft` is None where there is none.
        inner_draft: drafts for the draft, which then works speculatively itself; None where there is none.
        eos_token_ids: tokens that end an answer.
        chat_template: relative path of the template, or None (then only plain text can be generated).
        tokenizer: relative path of `tokenizer.json`.
        special_tokens: name -> text as templates use them (`bos_token`, `eos_token`, ...).
        files: relative path -> size and sha256, for every file but the manifest.
        check: what the export measured, as it was written.
    """

    name: str
    created_by: str
    target: ModelInfo
    draft: ModelInfo | None
    eos_token_ids: tuple[int, ...]
    tokenizer: str
    chat_template: str | None
    special_tokens: dict[str, str]
    files: dict[str, FileInfo]
    check: dict[str, Any]
    inner_draft: ModelInfo | None = None

    @property
    def models(self) -> dict[str, ModelInfo]:
        """By the name of the field, those that are there."""
        named = {"target": self.target, "draft": self.draft, "inner_draft": self.inner_draft}
        return {name: info for name, info in named.items() if info is not None}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder whose manifest was read and checked."""

    path: Path
    manifest: Manifest


DEFAULT_BUNDLE = "smollm2-135m"

# Far above any model that exists, low enough that no product of them overflows or allocates without end.
MAX_LAYERS = 1024
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_VOCAB = 1 << 23
MAX_CONTEXT = 1 << 25
MAX_FILE_SIZE = 1 << 44
MAX_MANIFEST_SIZE = 8 << 20
MAX_TEMPLATE_SIZE = 1 << 20
MAX_TOKENIZER_SIZE = 512 << 20

_EXPORT_AGAIN = "export or copy the bundle again"
# File managers drop these into any folder that they show.
_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


def cache_dir() -> Path:
    """Where bundles of this user are kept: `EDGESPEC_CACHE` if it is set, else the platform's cache folder."""
    chosen = os.environ.get("EDGESPEC_CACHE")
    return Path(chosen) if chosen else Path(user_cache_dir("edgespec", appauthor=False))


def default_bundle_path() -> Path:
    """The bundle that is meant when none is named. It may not exist yet."""
    return cache_dir() / "bundles" / DEFAULT_BUNDLE


def read_bundle(path: str | os.PathLike[str], *, verify_hashes: bool = True) -> Bundle:
    """Read a bundle's manifest and check all its files against it.

    Checked: the manifest's types and ranges; that every path in it stays inside the folder, symbolic links
    followed; that every listed file is there with its size and (`verify_hashes`) its sha256; that every file in
    a graph's folder is listed, so that external data which a graph names is covered by a hash. Not covered: the
    graphs themselves are not opened here, so an external-data location that leaves the folder is for the
    session to refuse, and a file swapped after this call is not noticed.

    Raises:
        BundleError: anything of that is wrong.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    for name, info in manifest.files.items():
        _check_size(folder, name, info)
    _check_text_sizes(folder, manifest)
    _check_unlisted(folder, manifest)
    if verify_hashes:
        for name, info in manifest.files.items():
            _check_hash(folder, name, info)
    return Bundle(folder, manifest)


def check_vocab(manifest: Manifest, num_tokens: int) -> None:
    """Check that all models have a row for every token of the bundle's tokenizer; more rows are padding.

    One bundle has one tokenizer, so they share its token map by construction: what is left to go wrong is
    a model with too few rows.

    Args:
        num_tokens: the tokenizer's highest token id + 1.
    Raises:
        BundleError: the target has too few rows.
        IncompatibleDraftError: the draft has.
    """
    target = manifest.target
    if target.vocab_size < num_tokens:
        raise BundleError(
            f"{target.path} has {target.vocab_size} rows of logits but {manifest.tokenizer} has {num_tokens} "
            f"tokens; {_EXPORT_AGAIN}"
        )
    for draft in (manifest.draft, manifest.inner_draft):
        if draft is not None and draft.vocab_size < num_tokens:
            raise IncompatibleDraftError(
                f"{draft.path} has {draft.vocab_size} rows of logits but {manifest.tokenizer} has {num_tokens} "
                "tokens; export the target with a draft that has the same tokenizer"
            )


def model_head(bundle: Bundle, info: ModelInfo) -> Head | None:
    """Which tokens the head of a model has; None where it has all.

    Raises:
        BundleError: the file that says so is damaged.
    """
    return None if info.head_ids is None else read_head(bundle.path / info.head_ids, info.vocab_size)


def list_files(folder: Path) -> dict[str, FileInfo]:
    """Size and sha256 of every file of a bundle but its manifest, sorted by path: `Manifest.files`."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {n: FileInfo((folder / n).stat().st_size, _sha256(folder / n)) for n in sorted(names) if n != MANIFEST}


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write `edgespec.json` into `folder`, all or nothing."""
    text = json.dumps(manifest_to_dict(manifest), indent=2, ensure_ascii=False, allow_nan=False)
    part = folder / f"{MANIFEST}.part"
    part.write_text(text + "\n", encoding="utf-8", newline="\n")
    os.replace(part, folder / MANIFEST)


def manifest_to_dict(manifest: Manifest) -> dict[str, Any]:
    """What `edgespec.json` holds: the fields by their names, after `format` and `format_version`."""
    fields = asdict(manifest)
    fields["eos_token_ids"] = list(manifest.eos_token_ids)
    return {"format": FORMAT, "format_version": FORMAT_VERSION, **fields}


def manifest_from_dict(data: object) -> Manifest:
    """The inverse of `manifest_to_dict`; strict about types and ranges, tolerant of unknown keys.

    Raises:
        BundleError: it is not a manifest, is of another version, or a field is missing or wrong. The message
            names the field, not the file.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BundleError(f'this is not an edgespec manifest (it has no "format": "{FORMAT}"); choose another folder')
    if data.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"format version {data.get('format_version')!r} is not supported (this edgespec reads "
            f"{FORMAT_VERSION}); export the bundle again, or install the edgespec that made it"
        )
    fields = Fields(data)
    manifest = _manifest(fields)
    _check_references(manifest)
    return manifest


def _manifest(fields: Fields) -> Manifest:
    return Manifest(
        name=fields.text("name"),
        created_by=fields.text("created_by"),
        target=_model_info(fields.table("target")),
        draft=_model_info(fields.table("draft")) if fields.has("draft") else None,
        eos_token_ids=tuple(fields.integers("eos_token_ids")),
        tokenizer=fields.path("tokenizer"),
        chat_template=fields.path("chat_template") if fields.has("chat_template") else None,
        special_tokens=fields.table("special_tokens").texts(),
        files=dict(_file_infos(fields.table("files"))),
        check=fields.table("check").data,
        inner_draft=_model_info(fields.table("inner_draft")) if fields.has("inner_draft") else None,
    )


def _model_info(fields: Fields) -> ModelInfo:
    cache = cast(CacheKind, fields.choice("cache", ("shared", "growing", "none")))
    least, most = (0, 0) if cache == "none" else (1, MAX_LAYERS)
    return ModelInfo(
        path=fields.path("path"),
        cache=cache,
        num_layers=fields.count("num_layers", most, least),
        num_kv_heads=fields.count("num_kv_heads", min(most, MAX_KV_HEADS), least),
        head_dim=fields.count("head_dim", most and MAX_HEAD_DIM, least),
        vocab_size=fields.count("vocab_size", MAX_VOCAB),
        context_length=fields.count("context_length", MAX_CONTEXT),
        precision=fields.choice("precision", ("fp32", "fp16", "int8", "int4")),
        block_size=fields.count("block_size", MAX_VOCAB) if fields.has("block_size") else None,
        row_invariance=cast(RowInvariance, fields.choice("row_invariance", (">=2", "even", "none"))),
        num_parameters=fields.count("num_parameters", 1 << 50),
        source=fields.text("source"),
        licence=fields.text("licence") if fields.has("licence") else None,
        head_ids=fields.path("head_ids") if fields.has("head_ids") else None,
        hidden_layers=tuple(fields.integers("hidden_layers")) if fields.has("hidden_layers") else None,
    )


def _file_infos(fields: Fields) -> Iterator[tuple[str, FileInfo]]:
    for name in fields.data:
        check_path(name, f"{fields.where}{name!r}")
        info = fields.table(name)
        yield name, FileInfo(info.count("size", MAX_FILE_SIZE, least=0), info.sha256("sha256"))


def _check_references(manifest: Manifest) -> None:
    """Whatever the manifest names must be among its files, and an end token among the logits."""
    named = [manifest.tokenizer, *(model.path for model in manifest.models.values())]
    named += [manifest.chat_template] if manifest.chat_template else []
    named += [model.head_ids for model in manifest.models.values() if model.head_ids]
    if manifest.target.head_ids is not None:
        raise BundleError(f"the target's head must have all tokens; {_EXPORT_AGAIN}")
    for name in named:
        if name not in manifest.files:
            raise BundleError(f"{name!r} is used but is not among its files; {_EXPORT_AGAIN}")
    if manifest.target.cache == "none":
        raise BundleError(f"target.cache is none, which only a draft can do without; {_EXPORT_AGAIN}")
    draft, inner = manifest.draft, manifest.inner_draft
    if draft is not None and draft.cache == "none" and not manifest.target.has_hidden:
        raise BundleError(f"the draft needs a target with hidden_layers, and this one has none; {_EXPORT_AGAIN}")
    if inner is not None and (inner.cache != "none" or draft is None or draft.head_ids or not draft.has_hidden):
        raise BundleError(
            f"inner_draft must have no cache and go with a draft that has all tokens and hidden_layers; {_EXPORT_AGAIN}"
        )
    for token in manifest.eos_token_ids:
        if token >= manifest.target.vocab_size:
            raise BundleError(f"end token {token} is not below the target's vocab_size; {_EXPORT_AGAIN}")


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise BundleError(f"{folder} is not a folder; make a bundle with `edgespec export SOURCE -o {folder}`")
        if not file.is_file():
            raise BundleError(
                f"{folder} has no {MANIFEST}, so it is not a bundle; make one with `edgespec export SOURCE -o DIR`"
            )
        if file.stat().st_size > MAX_MANIFEST_SIZE:
            raise BundleError(f"{file} is larger than {MAX_MANIFEST_SIZE >> 20} MiB; {_EXPORT_AGAIN}")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not valid JSON; {_EXPORT_AGAIN}") from error
    try:
        return manifest_from_dict(data)
    except BundleError as error:
        raise BundleError(f"{file}: {error}") from error


def _check_size(folder: Path, name: str, info: FileInfo) -> None:
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{file} is a link that leaves the bundle; do not use this bundle")
    if not file.is_file():
        raise BundleError(f"{file} is missing; {_EXPORT_AGAIN}")
    size = file.stat().st_size
    if size != info.size:
        raise BundleError(f"{file} has {size} bytes instead of {info.size}; {_EXPORT_AGAIN}")


def _check_text_sizes(folder: Path, manifest: Manifest) -> None:
    limits = {manifest.tokenizer: MAX_TOKENIZER_SIZE, manifest.chat_template: MAX_TEMPLATE_SIZE}
    for name, limit in limits.items():
        if name is not None and manifest.files[name].size > limit:
            raise BundleError(f"{folder / name} is larger than {limit >> 20} MiB; do not use this bundle")


def _check_hash(folder: Path, name: str, info: FileInfo) -> None:
    try:
        digest = _sha256(folder / name)
    except OSError as error:
        raise BundleError(f"{folder / name} cannot be read: {error.strerror}; check its permissions") from error
    if digest != info.sha256:
        raise BundleError(f"{folder / name} was changed after the export (its sha256 differs); {_EXPORT_AGAIN}")


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    """Refuse files beside a graph that no hash covers: the graph may name them as its external data."""
    for graph_folder in {(folder / model.path).parent for model in manifest.models.values()}:
        for file in _files_and_links(graph_folder):
            name = file.relative_to(folder).as_posix()
            if name not in manifest.files and name != MANIFEST:
                raise BundleError(f"{file} does not belong to the bundle; remove it, or export the bundle again")


def _files_and_links(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        here = Path(root)
        yield from (here / name for name in files if name not in _LITTER)
        yield from (here / name for name in folders if (here / name).is_symlink())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
