"""`edgespec export` and `edgespec import` as functions. Needs the `export` extra, which nothing outside may import.

The names below are imported on first use, so that a missing extra is one clear line and not a failed import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.export.importer import import_bundle
    from edgespec.export.pipeline import ExportReport, export_bundle

__all__ = ["ExportReport", "export_bundle", "import_bundle"]
_HOMES = {"ExportReport": "pipeline", "export_bundle": "pipeline", "import_bundle": "importer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgespec.export.convert import require_extra

    require_extra()
    return getattr(import_module(f"edgespec.export.{_HOMES[name]}"), name)
