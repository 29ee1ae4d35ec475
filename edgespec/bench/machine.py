"""What a figure depends on beside the code: the machine, versions, the bundle. Stored with every trial."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import edgespec

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")


def machine() -> dict[str, Any]:
    """Processor, cores, system and versions."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform(), "versions": versions()}


def versions() -> dict[str, str]:
    """Of edgespec, Python and what runs the models."""
    found = {"edgespec": edgespec.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """As the system calls it; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
