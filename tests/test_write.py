"""A bundle appears whole or not at all, and nothing else is ever touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edgespec.bundle import Manifest, list_files, read_bundle
from edgespec.errors import ExportError
from edgespec.export import write as write_module
from edgespec.export.disk import explain_disk_errors, require_space
from edgespec.export.write import Workspace, check_destination, workspace
from tests.tiny import EOS, make_tiny_bundle, tiny_info

_DEAD = 2**22 + 12345  # above what systems give to processes


def fill(space: Workspace, name: str = "new") -> Manifest:
    """The least that is a bundle."""
    (space.bundle / "target").mkdir()
    (space.bundle / "target" / "model.onnx").write_bytes(b"graph")
    (space.bundle / "tokenizer.json").write_text("{}", encoding="utf-8")
    return Manifest(
        name=name,
        created_by="tests",
        target=tiny_info("target/model.onnx"),
        draft=None,
        eos_token_ids=(EOS,),
        tokenizer="tokenizer.json",
        chat_template=None,
        special_tokens={},
        files=list_files(space.bundle),
        check={},
    )


def test_a_published_bundle_is_complete_and_alone(tmp_path: Path) -> None:
    """Every hash holds, parents are made, and no working folder stays."""
    out = tmp_path / "deep" / "bundle"
    with workspace(out, overwrite=False) as space:
        (space.work / "junk").write_bytes(b"x")
        space.publish(fill(space))
    assert read_bundle(out).manifest.name == "new"
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_whatever_stops_the_export_nothing_stays(error: type[BaseException], tmp_path: Path) -> None:
    """Ctrl-C included."""
    with pytest.raises(error), workspace(tmp_path / "bundle", overwrite=False) as space:
        fill(space)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_bundle_is_whole_and_an_interrupted_replacement_keeps_the_old_one(tmp_path: Path) -> None:
    """Before the swap the old bundle is untouched; after it nothing of the old one remains."""
    out = make_tiny_bundle(tmp_path / "bundle", draft=True)
    with pytest.raises(KeyboardInterrupt), workspace(out, overwrite=True) as space:
        fill(space)
        raise KeyboardInterrupt
    assert read_bundle(out).manifest.name == "tiny"
    with workspace(out, overwrite=True) as space:
        space.publish(fill(space))
    assert read_bundle(out).manifest.name == "new"
    assert not (out / "draft").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_a_swap_that_fails_halfway_brings_the_old_bundle_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename of the new bundle fails after the old one was moved aside."""
    out = make_tiny_bundle(tmp_path / "bundle")
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name == "bundle" and Path(source).parent != tmp_path:
            raise PermissionError(errno.EACCES, "in use", str(source))
        real(source, target)

    with pytest.raises(ExportError, match="cannot be written"), workspace(out, overwrite=True) as space:
        manifest = fill(space)
        monkeypatch.setattr(write_module.os, "replace", replace)
        space.publish(manifest)
    assert read_bundle(out).manifest.name == "tiny"


def test_only_a_bundle_is_replaced_and_only_when_asked(tmp_path: Path) -> None:
    """A folder with other things, a file and an unforced bundle are left alone; an empty folder is welcome."""
    other = tmp_path / "holiday"
    other.mkdir()
    check_destination(other, overwrite=False)
    (other / "photo.jpg").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(ExportError, match="left alone"):
            check_destination(other, overwrite)
        with pytest.raises(ExportError, match="is a file"):
            check_destination(other / "photo.jpg", overwrite)
    bundle = make_tiny_bundle(tmp_path / "bundle")
    with pytest.raises(ExportError, match="--force"):
        check_destination(bundle, overwrite=False)
    check_destination(bundle, overwrite=True)
    assert (other / "photo.jpg").exists()


def test_what_a_killed_export_left_is_swept_and_a_running_one_is_not(tmp_path: Path) -> None:
    """Folders are told apart by the process that made them; other names are nobody's business."""
    dead, alive = tmp_path / f".bundle.edgespec-{_DEAD}-abc", tmp_path / f".bundle.edgespec-{os.getpid()}-abc"
    others = [tmp_path / f".other.edgespec-{_DEAD}-abc", tmp_path / ".bundle.edgespec-mine"]
    for folder in (dead, alive, *others):
        (folder / "work").mkdir(parents=True)
    with workspace(tmp_path / "bundle", overwrite=False) as space:
        space.publish(fill(space))
    assert not dead.exists()
    assert alive.exists()
    assert all(folder.exists() for folder in others)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (RuntimeError("write failed: No space left on device (os error 28)"), "is full"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), "there cannot be written"),
    ],
)
def test_a_disk_that_does_not_take_it_is_one_line(error: Exception, words: str, tmp_path: Path) -> None:
    """Native libraries have only the text of the system's error."""
    with pytest.raises(ExportError, match=words) as caught, explain_disk_errors(tmp_path):
        raise error
    assert "\n" not in str(caught.value)


def test_other_errors_pass_through(tmp_path: Path) -> None:
    """Only the disk is explained here."""
    with pytest.raises(ZeroDivisionError), explain_disk_errors(tmp_path):
        raise ZeroDivisionError


def test_missing_room_is_noticed_before_the_work(tmp_path: Path) -> None:
    """An export that cannot fit is not begun."""
    require_space(tmp_path, 1)
    with pytest.raises(ExportError, match="make room"):
        require_space(tmp_path, 1 << 60)
