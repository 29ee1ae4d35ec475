"""Drafters: sources of proposals. None of them decides what is emitted."""

from edgespec.drafters.history import HistoryDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.staged import StagedDrafter

__all__ = ["HistoryDrafter", "ModelDrafter", "NgramDrafter", "StagedDrafter"]
