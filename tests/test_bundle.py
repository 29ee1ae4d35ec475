"""Every way in which a bundle can be wrong is told in one line, and a right one is read as it was written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.bundle import (
    MANIFEST,
    Manifest,
    ModelInfo,
    cache_dir,
    check_vocab,
    default_bundle_path,
    list_files,
    manifest_from_dict,
    manifest_to_dict,
    read_bundle,
    write_manifest,
)
from edgespec.errors import BundleError, IncompatibleDraftError

TARGET = ModelInfo(
    path="target/model.onnx",
    cache="shared",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=40,
    context_length=256,
    precision="int8",
    block_size=128,
    row_invariance="even",
    num_parameters=1000,
    source="somewhere",
    licence="Apache-2.0",
)
DRAFT = dataclasses.replace(TARGET, path="draft/model.onnx", vocab_size=48, precision="fp32", block_size=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of files that hold nothing of use, with a manifest that is true of them."""
    root = tmp_path / "büchse"
    for name in ("target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "tokenizer.json", "t.jinja"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 3)
    write_manifest(make_manifest(root), root)
    return root


def make_manifest(root: Path) -> Manifest:
    return Manifest(
        name="tiny",
        created_by="0.1.0",
        target=TARGET,
        draft=DRAFT,
        eos_token_ids=(1, 2),
        tokenizer="tokenizer.json",
        chat_template="t.jinja",
        special_tokens={"bos_token": "<s>"},
        files=list_files(root),
        check={"perplexity": 16.4, "note": "é"},
    )


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply a change to the JSON of the manifest."""
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def refusal(folder: Path, **options: bool) -> str:
    """The one line that reading the bundle ends in."""
    with pytest.raises(BundleError) as caught:
        read_bundle(folder, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_reads_what_was_written(folder: Path) -> None:
    """A manifest comes back equal, and nothing else is left in the folder."""
    bundle = read_bundle(str(folder))
    assert bundle.path == folder
    assert bundle.manifest == make_manifest(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["draft", MANIFEST, "t.jinja", "target", "tokenizer.json"]


def test_manifest_has_the_documented_keys(folder: Path) -> None:
    """The JSON's keys are the field names, after the format and its version."""
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert list(data)[:2] == ["format", "format_version"]
    assert (data["format"], data["format_version"]) == ("edgespec", 1)
    assert list(data)[2:] == [f.name for f in dataclasses.fields(Manifest)]
    assert data["files"]["tokenizer.json"]["size"] == 42


def test_optional_parts_may_be_absent_and_unknown_keys_are_ignored(folder: Path) -> None:
    """No draft, no template and no licence are legal; keys of a later version do no harm."""
    data = manifest_to_dict(make_manifest(folder))
    data.update(draft=None, later={"x": 1})
    del data["chat_template"], data["target"]["licence"]
    data["target"]["also_later"] = []
    manifest = manifest_from_dict(data)
    assert (manifest.draft, manifest.chat_template, manifest.target.licence) == (None, None, None)


def test_missing_folder(tmp_path: Path) -> None:
    """A folder that is not there is named, with the command that makes it."""
    assert "nowhere is not a folder; make a bundle with `edgespec export" in refusal(tmp_path / "nowhere")


def test_folder_without_manifest(tmp_path: Path) -> None:
    """A folder that is no bundle says so."""
    assert "has no edgespec.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"format": "edge', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "not an edgespec manifest"),
        (b'{"model_type": "llama"}', "not an edgespec manifest"),
        (b'{"format": "edgespec", "format_version": 2}', "format version 2 is not supported"),
        (b'{"format": "edgespec"}', "format version None is not supported"),
        (b'{"format": "edgespec", "format_version": "1"}', "format version '1' is not supported"),
        (b'{"format": "edgespec", "format_version": 1}', "name is missing; it must be a string"),
        (b" " * (9 << 20), "larger than 8 MiB"),
    ],
)
def test_foreign_manifest(folder: Path, content: bytes, reason: str) -> None:
    """A manifest that is truncated, foreign, of another version or huge is refused with its path."""
    (folder / MANIFEST).write_bytes(content)
    message = refusal(folder)
    assert reason in message
    assert str(folder / MANIFEST) in message


WRONG = {
    ("target",): [None, 1, []],
    ("target", "num_layers"): [0, -1, 10**9, 2.0, "2", True, None],
    ("target", "num_kv_heads"): [0, 10**9],
    ("target", "head_dim"): [0, 10**9],
    ("target", "vocab_size"): [0, 10**12],
    ("target", "context_length"): [0, 10**12],
    ("target", "cache"): ["paged", 1, [], {}],
    ("target", "precision"): ["int3", None],
    ("target", "row_invariance"): [">=3", None],
    ("target", "block_size"): [0, "32"],
    ("draft", "num_layers"): [0],
    ("eos_token_ids",): [None, 2, ["2"], [-1], [True], [40]],
    ("special_tokens",): [None, ["<s>"]],
    ("special_tokens", "bos_token"): [1, None],
    ("tokenizer",): [None, "absent.json"],
    ("chat_template",): [7, "absent.jinja"],
    ("name",): [None, 7],
    ("check",): [None, []],
    ("files",): [None, []],
    ("files", "tokenizer.json"): [None, "x"],
    ("files", "tokenizer.json", "size"): [-1, "42", 10**18],
    ("files", "tokenizer.json", "sha256"): [None, "abc", "z" * 64, "A" * 64],
}


@pytest.mark.parametrize(("keys", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_wrong_field(folder: Path, keys: tuple[str, ...], value: object) -> None:
    """A field that is missing, of another type or absurd is refused by its name."""

    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    edit(folder, change)
    message = refusal(folder)
    assert keys[-1] in message or str(value) in message or "end token 40" in message


OUTSIDE = [
    "/etc/passwd",
    "../x",
    "target/../../x",
    "a//b",
    "./x",
    "x/.",
    "",
    "C:/x",
    "c:x",
    "a\\b",
    "..\\x",
    "x\0",
    "x ",
    "x./y",
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["target", "tokenizer", "files"])
def test_path_that_leaves_the_folder(folder: Path, name: str, where: str) -> None:
    """A path that is absolute, climbs, or means something else on Windows is refused wherever it stands."""

    def change(data: dict[str, Any]) -> None:
        if where == "target":
            data["target"]["path"] = name
        elif where == "tokenizer":
            data["tokenizer"] = name
        else:
            data["files"][name] = data["files"]["tokenizer.json"]

    edit(folder, change)
    assert "not a path inside the bundle" in refusal(folder)


def link(at: Path, to: Path, *, is_folder: bool = False) -> None:
    try:
        at.symlink_to(to, target_is_directory=is_folder)
    except OSError:  # Windows without the privilege
        pytest.skip("symbolic links cannot be made here")


def test_link_that_leaves_the_folder(folder: Path) -> None:
    """A listed file that is a link to a file elsewhere is refused, even when that file has the right content."""
    outside = folder.parent / "outside.json"
    (folder / "tokenizer.json").rename(outside)
    link(folder / "tokenizer.json", outside)
    assert "is a link that leaves the bundle" in refusal(folder)


def test_linked_folder_that_leaves_the_folder(folder: Path) -> None:
    """A folder that is a link elsewhere is refused as well."""
    outside = folder.parent / "outside"
    (folder / "draft").rename(outside)
    link(folder / "draft", outside, is_folder=True)
    assert "is a link that leaves the bundle" in refusal(folder)


def test_bundle_may_itself_be_reached_by_a_link(folder: Path) -> None:
    """A link to the whole bundle is how people keep models on another disk."""
    link(folder.parent / "link", folder, is_folder=True)
    assert read_bundle(folder.parent / "link").manifest.name == "tiny"


@pytest.mark.parametrize("name", ["target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "t.jinja"])
def test_damaged_file(folder: Path, name: str) -> None:
    """A truncated, then a tampered, then a missing file is told by its path."""
    file = folder / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert f"{file} has {len(content) - 1} bytes instead of {len(content)}" in refusal(folder, verify_hashes=False)
    file.write_bytes(content[:-1] + b"!")
    assert f"{file} was changed after the export" in refusal(folder)
    assert read_bundle(folder, verify_hashes=False).manifest.name == "tiny"
    file.unlink()
    assert f"{file} is missing" in refusal(folder, verify_hashes=False)
    file.mkdir()
    assert f"{file} is missing" in refusal(folder, verify_hashes=False)


def test_unlisted_file_beside_a_graph(folder: Path) -> None:
    """A file that the graph could name as its data but no hash covers is refused; litter of file managers is not."""
    for name in (".DS_Store", "Thumbs.db"):
        (folder / "target" / name).write_text("x")
    (folder / "README.md").write_text("notes at the top level are harmless")
    read_bundle(folder)
    extra = folder / "target" / "deep" / "more.data"
    extra.parent.mkdir()
    extra.write_text("x")
    assert f"{extra} does not belong to the bundle" in refusal(folder)


def test_unlisted_link_beside_a_graph(folder: Path) -> None:
    """A link to a folder elsewhere, through which a graph could reach out, is refused."""
    link(folder / "target" / "out", folder.parent, is_folder=True)
    assert "does not belong to the bundle" in refusal(folder)


def test_huge_template_is_refused(folder: Path) -> None:
    """A template of more than a mebibyte is never read."""
    (folder / "t.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    files = {name: dataclasses.asdict(info) for name, info in list_files(folder).items()}
    edit(folder, lambda data: data.update(files=files))
    assert "larger than 1 MiB" in refusal(folder)


def test_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the system will not let us read is told as such."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    assert "cannot be read: Permission denied" in refusal(folder)


def test_models_need_a_row_for_every_token(folder: Path) -> None:
    """More rows than tokens are padding; fewer are an error of the model that has them."""
    manifest = make_manifest(folder)
    check_vocab(manifest, 40)
    with pytest.raises(BundleError, match=r"target/model\.onnx has 40 rows of logits .* 41 tokens"):
        check_vocab(manifest, 41)
    small = dataclasses.replace(manifest, draft=dataclasses.replace(DRAFT, vocab_size=39))
    with pytest.raises(IncompatibleDraftError, match=r"draft/model\.onnx has 39 rows"):
        check_vocab(small, 40)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """EDGESPEC_CACHE replaces the platform's cache folder."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    assert default_bundle_path() == tmp_path / "bundles" / "smollm2-135m"
    monkeypatch.delenv("EDGESPEC_CACHE")
    assert cache_dir().is_absolute()
    assert "edgespec" in cache_dir().parts


def test_interrupted_writing_leaves_the_old_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest is replaced as a whole or not at all."""
    before = (folder / MANIFEST).read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_manifest(dataclasses.replace(make_manifest(folder), name="new"), folder)
    assert (folder / MANIFEST).read_bytes() == before
