"""Putting a bundle where the user wants it, all or nothing. Owns the working folder, the swap and the graph files.

All work happens in a hidden folder beside the destination (the same disk, so that the last step is a rename). It goes
away however the export ends; what a killed process left is taken over by the next export to the same place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgespec.bundle import MANIFEST, Manifest, write_manifest
from edgespec.errors import ExportError
from edgespec.export.disk import explain_disk_errors

GRAPH = "model.onnx"
WEIGHTS = "model.onnx.data"


@dataclass(frozen=True, slots=True)
class Workspace:
    """Two folders on the destination's disk, empty but for what a killed process left.

    Attributes:
        destination: where the bundle will be.
        bundle: becomes the destination.
        work: everything else; never seen by anybody.
    """

    destination: Path
    bundle: Path
    work: Path

    def clear(self) -> None:
        """Empty the bundle of what a killed process left, for work that does not go on from it."""
        shutil.rmtree(self.bundle)
        self.bundle.mkdir()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest and move the finished bundle to the destination.

        An old bundle is moved aside first. Whatever stops the process, the destination holds the old bundle, the
        new one, or nothing: never a mixture.
        """
        write_manifest(manifest, self.bundle)
        aside = self.work / "replaced"
        had_one = self.destination.is_dir()
        if had_one:
            if any(self.destination.iterdir()):
                os.replace(self.destination, aside)
            else:
                self.destination.rmdir()
        try:
            os.replace(self.bundle, self.destination)
        except BaseException:
            if aside.is_dir():
                os.replace(aside, self.destination)
            raise


def check_destination(path: Path, overwrite: bool) -> None:
    """Refuse a destination that cannot become a bundle, before any work is done.

    Raises:
        ExportError: something is there that is not a bundle, or is one and `overwrite` is false, or the disk
            cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ExportError(f"{path} is a file; name a folder for the bundle")
    if not path.exists() or not any(path.iterdir()):
        return
    if not (path / MANIFEST).is_file():
        raise ExportError(f"{path} is not empty and not an edgespec bundle, so it is left alone; name another folder")
    if not overwrite:
        raise ExportError(f"{path} already is a bundle; use --force to replace it, or name another folder")


@contextlib.contextmanager
def workspace(destination: Path, overwrite: bool) -> Iterator[Workspace]:
    """A place to build a bundle in; removed at the end, whether the bundle was published or not.

    Raises:
        ExportError: `check_destination` refuses, or the disk is full, at any point inside the `with`.
    """
    check_destination(destination, overwrite)
    with explain_disk_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = _open_folder(destination)
        try:
            made = Workspace(destination, folder / "bundle", folder / "work")
            made.bundle.mkdir(exist_ok=True)
            made.work.mkdir(exist_ok=True)
            yield made
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _open_folder(destination: Path) -> Path:
    """A working folder: the newest that a killed process left, taken over, or a new one. Older ones are removed."""
    prefix = f".{destination.name}.edgespec-"
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=destination.parent))
    left = sorted(_abandoned(destination.parent, prefix), key=lambda path: path.stat().st_mtime)
    if left:
        folder.rmdir()
        os.replace(left.pop(), folder)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def save_graph(model: ir.Model, folder: Path) -> Path:
    """Write `model.onnx` with its weights in `model.onnx.data`, and return the graph's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GRAPH
    ir.save(model, path, external_data=WEIGHTS)
    return path


def copy_graph(source: Path, folder: Path) -> Path:
    """Copy a saved graph and its weights into `folder` (a hard link would be taken for an attack by ONNX tools)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (GRAPH, WEIGHTS):
        shutil.copyfile(source.with_name(name), folder / name)
    return folder / GRAPH


def _abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Working folders whose process is gone."""
    for folder in parent.glob(f"{prefix}*"):
        owner = folder.name.removeprefix(prefix).split("-")[0]
        if folder.is_dir() and owner.isdigit() and not _is_running(int(owner)):
            yield folder


def _is_running(process_id: int) -> bool:
    if process_id == os.getpid():
        return True
    if sys.platform == "win32":  # os.kill would end it
        import ctypes

        query_limited_information = 0x1000
        handle = ctypes.windll.kernel32.OpenProcess(query_limited_information, False, process_id)
        if handle:
            ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True
