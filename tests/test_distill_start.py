"""Which draft a distillation goes on from, and what cannot be asked of it then."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.options import Settings
    from edgespec.distill.pipeline import _find_start

from edgespec.errors import ConfigError
from tests.test_distilled import write_draft
from tests.tiny_distill import make_source

pytestmark = pytest.mark.export


def test_a_draft_to_start_from_keeps_its_shape(tmp_path: Path) -> None:
    """Another one is not passed over in silence; what was not asked for, or is the same, is no question."""
    source = make_source(tmp_path)
    sizes = {"attended_layer": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    folder = write_draft(tmp_path / "draft", source, **sizes)

    def start(**values: Any) -> Any:
        return _find_start(SimpleNamespace(settings=Settings(start=folder, **values), source=source))  # type: ignore[arg-type]

    for values in ({}, {"layers": 2, "width": 96, "head_size": 120}):
        assert start(**values).attended_layer == 1
    for name, value in (("layers", 3), ("width", 40), ("head_size", 100)):
        with pytest.raises(ConfigError, match=rf"{name} is {value}, but .*draft keeps its \d+: leave it out"):
            start(**{name: value})
    with pytest.raises(ConfigError, match=r"attention is off, but .*draft keeps the one it has"):
        start(attention=False)
