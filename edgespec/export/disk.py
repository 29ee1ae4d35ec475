"""A disk that is full or cannot be written, in one line. Knows nothing of bundles."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import EdgespecError, ExportError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of Python or of a native library (which only has its text) says that the disk is full."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error).lower()
    return "no space left on device" in text or "os error 28" in text or "not enough space on the disk" in text


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into an ExportError; `path` is where the user wants the bundle."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise ExportError(f"the disk of {path} is full, and nothing was written; make room there") from error
        if isinstance(error, OSError) and error.errno in _FORBIDDEN:
            where = error.filename or path
            raise ExportError(f"{where} cannot be written ({error.strerror}); name another place") from error
        raise


def require_space(path: Path, needed: int) -> None:
    """Raise ExportError unless the disk of `path`, an existing folder, has `needed` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise ExportError(
            f"the disk of {path} has {free / 1e9:.1f} GB free, and the export needs {needed / 1e9:.1f} GB while it "
            "works; make room or name another place"
        )
