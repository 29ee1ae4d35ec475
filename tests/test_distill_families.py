"""What a distillation takes of targets of several families, and what it refuses before anything is trained."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.search import attendable_layers
    from edgespec.distill.store import Layers
    from edgespec.distill.student import _scale, draft_shape, make_student
    from edgespec.distill.teacher import load_target

from edgespec.errors import ExportError
from tests.families import VOCAB, get_family
from tests.tiny_distill import CPU

pytestmark = pytest.mark.export


def load(name: str) -> Any:
    """A tiny model in torch."""
    return load_target(SimpleNamespace(folder=get_family(name).folder / "hf", name=name, config={}), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [0, 1]),
        ("llama-wide-heads", [0, 1]),  # whose rotation scales, too
        ("qwen2", [0, 1]),
        ("qwen3", [0, 1]),
        ("glm", [0, 1]),
        ("smollm3", [0]),  # layer 1 has no positions
        ("gemma3", [0]),  # layer 1 has a window
        ("mistral-window", []),
        ("mistral-far-window", [0, 1]),  # which a text of 48 tokens does not fill
        ("llama-head-20", []),  # whose cache the export does not share
    ],
)
def test_layers_that_can_be_attended_to(name: str, expected: list[int]) -> None:
    """See the whole text, rotate as the draft does, and have widths that the export can write."""
    assert attendable_layers(load(name), VOCAB, 48, 0) == expected


def test_no_norm_before_the_attention() -> None:
    """The draft then starts without the layer's products, which expect no norm: at first it adds nothing."""
    model = load("olmo2")
    draft = make_student(model, draft_shape(model.config, Layers((1,), 1), 1, 40, 3), np.array([3, 5, 7]))
    assert draft.attention is not None
    assert not draft.attention.o_proj.weight.any()


def test_the_scale_of_a_norm() -> None:
    """What it multiplies by; of one that has a mean and a bias, ones."""
    one, other = torch.nn.RMSNorm(8), torch.nn.LayerNorm(8)
    with torch.no_grad():
        for parameter in (one.weight, other.weight, other.bias):
            parameter.copy_(torch.arange(1, 9))
    torch.testing.assert_close(_scale(one, 8), torch.arange(1.0, 9))
    assert _scale(other, 8).tolist() == [1] * 8


def test_other_attention_is_refused() -> None:
    """A family that does not take an attention from outside: one line."""
    with pytest.raises(ExportError, match="built like a llama only: name another target"):
        load("stablelm")
