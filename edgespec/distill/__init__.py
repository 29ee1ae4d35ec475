"""`edgespec distill` as a function: a draft of one's own for a target, without a data set. Needs the `export` extra.

The names below are imported on first use, so that a missing extra is one clear line and not a failed import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.distill.options import Settings
    from edgespec.distill.pipeline import DistillReport, distill

__all__ = ["DistillReport", "Settings", "distill"]
_HOMES = {"DistillReport": "pipeline", "Settings": "options", "distill": "pipeline"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgespec.export.convert import quiet, require_extra

    require_extra()
    with quiet():
        return getattr(import_module(f"edgespec.distill.{_HOMES[name]}"), name)
