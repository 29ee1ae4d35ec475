"""What a killed export had finished, so that the next one with the same inputs goes on from there."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.export.options import Plan

_FILE = "journal.json"
_PACKAGES = ("torch", "transformers", "optimum-onnx", "onnx-ir", "onnxruntime", "numpy")


def inputs_key(plan: Plan, files: Iterable[Path]) -> str:
    """A digest of everything that an export depends on: options, versions, machine, and the files' contents."""
    digest = hashlib.sha256()
    where = [__version__, platform.machine(), *(version(name) for name in _PACKAGES)]
    digest.update(json.dumps([asdict(plan), where], sort_keys=True).encode())
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class Journal:
    """Finished steps by name, with what they found out; kept in a file after each one.

    Args:
        folder: where the file lies; what is there of an export with another key is forgotten.
        key: of the inputs.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._key = folder / _FILE, key
        self._steps: dict[str, dict[str, Any]] = {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if content["key"] == key:
                self._steps = content["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing to go on from

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to go on from."""
        return not self._steps

    def get(self, step: str) -> dict[str, Any] | None:
        """What a finished step found out, or None."""
        return self._steps.get(step)

    def put(self, step: str, found: dict[str, Any]) -> None:
        """Remember a step as finished. All that it wrote must be on the disk."""
        self._steps[step] = found
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"key": self._key, "steps": self._steps}), encoding="utf-8")
        os.replace(part, self._file)
