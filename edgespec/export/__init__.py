"""`edgespec export` as a function. Needs the `export` extra, which nothing outside this package may import.

The names below are imported on first use, so that a missing extra is one clear line and not a failed import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.export.pipeline import ExportReport, export_bundle

__all__ = ["ExportReport", "export_bundle"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgespec.export.convert import require_extra

    require_extra()
    from edgespec.export import pipeline

    return getattr(pipeline, name)
