"""Every family through the whole export, against torch; writes and checks `docs/families.md`.

`EDGESPEC_WRITE_DOCS=1 python -m pytest tests/test_families.py` writes the page anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.export.graph import FusedGraph, fuse_graph, quantize_graph
from edgespec.export.options import resolve_context
from edgespec.export.source import Source
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.export_models import total_variation
from tests.families import CAPACITY, Family, get_family, parity_steps

pytestmark = [pytest.mark.export, pytest.mark.matrix]

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
TOLERANCE = 1e-4  # of a logit, in float32
INT8_TOLERANCE = 0.15  # mean total variation: what the export itself allows
STEPS = ("prefill", "decode", "verify", "rollback", "decode again")

#: name in tests/families.py -> what is special about it
ROWS = {
    "llama": "grouped heads, tied embedding",
    "llama-wide-heads": "yarn rope; heads wider than hidden / heads",
    "llama3": "llama3 rope",
    "llama-dynamic": "dynamic rope",
    "llama-head-20": "head size 20",
    "mistral": "no window",
    "mistral-window": "window of 16",
    "mistral-far-window": "window of 64",
    "qwen2": "biases on q, k and v",
    "qwen2-mixed": "full and sliding layers",
    "qwen3": "norms on q and k",
    "gemma": "one-plus norms, no position input",
    "gemma2": "soft cap of 50 on scores and of 30 on logits, alternating window of 16",
    "gemma2-no-cap": "no soft cap on scores",
    "gemma3": "two ropes, alternating window of 16",
    "phi": "rotary width 8",
    "phi-half": "rotary width 16",
    "phi3": "one product for q, k and v",
    "phi3-window": "window of 16",
    "phi3-longrope": "longrope, original length 64",
    "gpt2": "learned positions",
    "gpt_neox": "rotary width 4",
    "gpt_neox-half": "rotary width 16",
    "opt": "learned positions, scaled queries",
    "bloom": "position bias (ALiBi)",
    "smollm3": "layers without positions",
    "granite": "attention scale 0.1",
    "olmo2": "norms over all of q and k",
    "stablelm": "rotary width 4",
    "stablelm-half": "rotary width 16, biases",
    "falcon": "one key head for all queries",
    "gptj": "interleaved rotary embedding",
    "glm": "half of each head rotated, interleaved",
}
#: What ends up with a growing cache, and why.
GROWING = {"llama-head-20": "head size 20 is not a multiple of 8"}
#: Contexts that are shorter than the model promises.
SHORTENED = {"phi3-longrope": 64}


@dataclass(frozen=True)
class Row:
    """What became of a family.

    Attributes:
        differences: step -> largest difference of logits to torch in fp32.
        agrees: every arg max is torch's, in fp32.
        int8: step -> mean total variation to torch in 8 bits.
    """

    graph: FusedGraph
    context: int
    warnings: tuple[str, ...]
    differences: dict[str, float]
    agrees: bool
    int8: dict[str, float]


class SessionRunner:
    """Runs a graph by the session that serves bundles, in the way that `parity_steps` asks for."""

    def __init__(self, session: DecoderSession) -> None:
        self._session = session

    def __call__(self, tokens: NDArray[np.int64], past: int, keep: int) -> NDArray[np.float32]:
        self._session.rewind(past)
        return self._session.forward(tokens, keep).copy()


def compare(path: Path, context: int, family: Family, prefill: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (step, rows of the graph, torch's rows)."""
    with closing(DecoderSession(path, context_length=context, runtime=RuntimeParams(threads=1))) as session:
        yield from parity_steps(family, SessionRunner(session), prefill)


@cache
def make_row(name: str) -> Row:
    """Export, fuse, quantise and compare a family, once a run."""
    family = get_family(name)
    source = Source(name, family.folder / "hf", Path(), "", None, family.config, None, {}, (2,))
    longest, _ = resolve_context(family.config, None)
    said: list[str] = []
    context = min(longest, CAPACITY - 1)
    graph = fuse_graph(family.plain, source, context, family.folder / "fp32", said.append)
    prefill = 80 if name == "mistral-far-window" else 40
    differences, agrees = {}, True
    for step, found, expected in compare(graph.path, graph.context_length, family, prefill):
        differences[step] = float(np.abs(found - expected).max())
        agrees &= bool((found.argmax(-1) == expected.argmax(-1)).all())
    path, _ = quantize_graph(graph.path, family.folder / "int8", "int8", 32, lambda fraction: None)
    steps = compare(path, graph.context_length, family, prefill)
    int8 = {step: float(total_variation(found, expected).mean()) for step, found, expected in steps}
    return Row(graph, longest, tuple(said), differences, agrees, int8)


@pytest.mark.parametrize("name", ROWS)
def test_family(name: str) -> None:
    """Reading, decoding, verifying and rolling back give torch's logits, and 8 bits stay near them."""
    row = make_row(name)
    assert tuple(row.differences) == tuple(row.int8) == STEPS
    assert max(row.differences.values()) < TOLERANCE
    assert row.agrees
    assert max(row.int8.values()) < INT8_TOLERANCE
    assert row.graph.cache == ("growing" if name in GROWING else "shared")
    assert row.context == SHORTENED.get(name, row.context)


@pytest.mark.parametrize("name", GROWING)
def test_what_is_not_fused_says_why(name: str) -> None:
    """The reason is in the result, for the manifest, and in the warning."""
    row = make_row(name)
    assert GROWING[name] in str(row.graph.reason)
    assert any(GROWING[name] in line and "growing cache" in line for line in row.warnings)


@pytest.mark.parametrize(("name", "wanted", "longest"), [("phi3-longrope", 65, 64), ("llama-dynamic", 91, 90)])
def test_a_rope_that_changes_with_the_length_is_refused_beyond_it(name: str, wanted: int, longest: int) -> None:
    """An export would freeze its frequencies, and the text would go wrong without a word."""
    config = get_family(name).config
    assert resolve_context(config, longest)[0] == longest
    with pytest.raises(ConfigError, match=f"max_context is {wanted}, but .* {longest} tokens"):
        resolve_context(config, wanted)


def page() -> str:
    """The matrix, as it is in the documentation."""
    lines = [HEAD, "| family | what is special | cache | " + " | ".join(STEPS[:4]) + " | int8 |"]
    lines.append("|---" * 8 + "|")
    for name, special in ROWS.items():
        row = make_row(name)
        cells = ["yes" if row.differences[step] < TOLERANCE else "**no**" for step in STEPS[:4]]
        cells.append("yes" if max(row.int8.values()) < INT8_TOLERANCE else "**no**")
        lines.append(f"| {name} | {special} | {row.graph.cache} | {' | '.join(cells)} |")
    lines += ["", TAIL]
    lines += [f"- {name}: {make_row(name).graph.reason}; it has a growing cache." for name in GROWING]
    lines += [f"- {name}: at most {length} tokens of context, after which its rope changes." for name, length in LIMITS]
    return "\n".join(lines) + "\n"


LIMITS = [("phi3-longrope", 64), ("llama-dynamic", 90)]
HEAD = f"""# Families

Made by `tests/test_families.py` from tiny models with random weights; `EDGESPEC_WRITE_DOCS=1 python -m pytest
tests/test_families.py` writes it anew. Each is exported and run as a bundle is, and compared with torch: a prompt
longer than its window, decoding, verification of five tokens, and verification after a rollback. "yes" is a largest
difference of logits of at most {TOLERANCE:g} in fp32, and a mean total variation of at most {INT8_TOLERANCE:g} in int8.
Architectures are not known by name: attention is found by what it computes, and what is not listed here may work too.
"""
TAIL = "What is refused or limited, and why:\n"


def test_the_page_is_up_to_date() -> None:
    """The documentation shows what this run found."""
    if os.environ.get("EDGESPEC_WRITE_DOCS"):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8", newline="\n")
    assert PAGE.read_text(encoding="utf-8") == page(), "run it with EDGESPEC_WRITE_DOCS=1"
