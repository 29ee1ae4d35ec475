"""Options of an export: defaults, recipes, and combinations that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import ConfigError
from edgespec.export.options import Plan, make_plan, resolve_context, resolve_precision


def plan(recipe: dict[str, Any] | None = None, **given: Any) -> Plan:
    return make_plan("source", given, recipe or {})


def test_nothing_given_is_a_target_of_its_own_precision() -> None:
    """No draft, auto, and the model's own context."""
    assert plan() == Plan("source", None, "auto", None, "auto", None, None)


def test_a_recipes_options_count_until_they_are_given() -> None:
    """Given beats recipe; `none` takes a recipe's draft away."""
    recipe = {"precision": "int8", "block_size": 128, "draft": "small", "max_context": 64}
    assert plan(recipe) == Plan("source", "small", "int8", 128, "auto", None, 64)
    changed = plan(recipe, max_context=100, draft="none", block_size=32)
    assert changed == Plan("source", None, "int8", 32, "auto", None, 100)


def test_a_recipes_block_size_does_not_outlive_its_precision() -> None:
    """--precision int4 on an int8 recipe means int4's own block size, and fp32 has none."""
    recipe = {"precision": "int8", "block_size": 128}
    assert plan(recipe, precision="int4").block_size is None
    assert plan(recipe, precision="fp32").block_size is None
    assert plan(recipe, precision="int4", block_size=128).block_size == 128


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precision": "int3"}, "int3"),
        ({"block_size": 64}, "64"),
        ({"precision": "fp32", "block_size": 32}, "no blocks"),
        ({"draft_precision": "int4"}, "need a draft"),
        ({"draft": "none", "draft_block_size": 32}, "need a draft"),
        ({"max_context": 3}, "at least 32"),
        ({"max_context": True}, "True"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], words: str) -> None:
    """Before anything is fetched."""
    with pytest.raises(ConfigError, match=words):
        plan(**given)


@pytest.mark.parametrize(
    ("asked", "block", "parameters", "expected"),
    [
        ("auto", None, 134_515_008, ("int8", 128)),
        ("auto", None, 999_999_999, ("int8", 128)),
        ("auto", None, 1_000_000_000, ("int4", 128)),
        ("auto", 32, 10, ("int8", 32)),
        ("int4", 128, 10, ("int4", 128)),
        ("fp32", None, 10, ("fp32", None)),
    ],
)
def test_auto_goes_by_the_number_of_weights(
    asked: Any, block: int | None, parameters: int, expected: tuple[str, int | None]
) -> None:
    """Small models can't afford 4 bits; the default blocks are the measured ones."""
    assert resolve_precision(asked, block, parameters) == expected


def test_the_context_is_the_models_unless_it_is_very_long() -> None:
    """Up to 32,768 by default; more, up to what the model was made for, on request."""
    assert resolve_context({"max_position_embeddings": 8192}, None) == (8192, None)
    assert resolve_context({"n_positions": 1024}, None) == (1024, None)
    assert resolve_context({"max_position_embeddings": 131_072}, None) == (32_768, None)
    assert resolve_context({"max_position_embeddings": 131_072}, 100_000) == (100_000, None)
    with pytest.raises(ConfigError, match="9000"):
        resolve_context({"max_position_embeddings": 8192}, 9000)


def test_a_rotary_embedding_that_an_export_freezes_limits_the_context_and_is_mentioned() -> None:
    """longrope switches its factors after the original length, and a graph can't; llama3 scaling is constant."""
    long = {"max_position_embeddings": 131_072, "rope_scaling": {"type": "longrope"}}
    long["original_max_position_embeddings"] = 4096
    length, remark = resolve_context(long, None)
    assert length == 4096
    assert "131072" in str(remark)
    with pytest.raises(ConfigError, match="freezes it after 4096"):
        resolve_context(long, 5000)
    constant = {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3"}}
    assert resolve_context(constant, None) == (8192, None)
