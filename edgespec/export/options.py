"""What may be asked of an export: options checked, a recipe's filled in, defaults chosen. Knows no step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import ConfigError

Precision = Literal["fp32", "fp16", "int8", "int4", "auto"]
PRECISIONS = ("fp32", "fp16", "int8", "int4", "auto")
FLOATS = ("fp32", "fp16")
BLOCK_SIZES = (32, 128)
BITS: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4}

# The fastest block. In 4 bits smaller ones are better, and slower where several rows are checked.
_DEFAULT_BLOCK = 128
_AUTO_INT4_FROM = 1_000_000_000  # parameters: 4 bits cost a small model too much, and a large one little
_LONGEST_DEFAULT = 32_768  # rope tables are stored for every position, so a longer context is on request
_SHORTEST = 32
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_RUN_WHOLE = 2 << 30  # bytes in float32: a larger model is run whole in its final precision only
_FEWEST_LAYERS = 3
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of one export, the recipe's filled in.

    Attributes:
        source, draft, inner_draft: what the user named; `draft` is None for a bundle without one, and `inner_draft` for
            one in which nothing drafts for the draft.
        precision, block_size: of the target; a `block_size` of None is the precision's default.
        draft_precision, draft_block_size: of the draft.
        max_context: None is the model's own, up to 32,768.
        allow_pickle: read pickled weights where there are no others.
    """

    source: str
    draft: str | None
    precision: Precision
    block_size: int | None
    draft_precision: Precision
    draft_block_size: int | None
    max_context: int | None
    allow_pickle: bool = False
    inner_draft: str | None = None


def make_plan(source: str, given: Mapping[str, Any], recipe: Mapping[str, Any]) -> Plan:
    """Check the options that were given (None is not given) over those of the recipe.

    Raises:
        ConfigError: a value, or a combination, that cannot work.
    """
    values = dict(recipe) | {key: value for key, value in given.items() if value is not None}
    draft = values.get("draft")
    plan = Plan(
        source=source,
        draft=None if draft == "none" else draft,
        precision=values.get("precision", "auto"),
        block_size=_block_size(values, given, ""),
        draft_precision=values.get("draft_precision", "auto"),
        draft_block_size=_block_size(values, given, "draft_"),
        max_context=values.get("max_context"),
        allow_pickle=bool(values.get("allow_pickle")),
        inner_draft=values.get("inner_draft"),
    )
    for role in ("", "draft_"):
        _check_role(role, getattr(plan, f"{role}precision"), getattr(plan, f"{role}block_size"))
    if plan.draft is None and (given.get("draft_precision") or given.get("draft_block_size")):
        raise ConfigError("draft_precision and draft_block_size need a draft: name one, or leave them out")
    if plan.inner_draft is not None and plan.draft is None:
        raise ConfigError("inner_draft drafts for the draft: name a draft, or leave it out")
    context = plan.max_context
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < _SHORTEST):
        raise ConfigError(f"max_context is {context!r}; it must be an integer of at least {_SHORTEST}")
    return plan


def resolve_precision(precision: Precision, block_size: int | None, num_parameters: int) -> tuple[str, int | None]:
    """The precision and the block size that are meant; the block size of floats is None."""
    chosen = precision
    if precision == "auto":
        chosen = "int4" if num_parameters >= _AUTO_INT4_FROM else "int8"
    return chosen, None if chosen in FLOATS else block_size or _DEFAULT_BLOCK


def resolve_context(config: Mapping[str, Any], wanted: int | None) -> tuple[int, str | None]:
    """Most tokens of the context, and what to tell the user where that is less than the model promises.

    Raises:
        ConfigError: more than the model was made for, or than its export can do.
    """
    text = config.get("text_config") or config
    longest = next((int(text[key]) for key in _CONTEXT_KEYS if text.get(key)), _LONGEST_DEFAULT)
    reason, remark = "the model was made for", None
    frozen = _frozen_rope_limit(text)
    if frozen is not None and frozen < longest:
        reason = "its rotary embedding changes with the length, and an export freezes it after"
        remark = f"the context is {frozen} instead of {longest} tokens: {reason} {frozen}"
        longest = frozen
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_context is {wanted}, but {reason} {longest} tokens: ask for less")
    return (wanted, None) if wanted else (min(longest, _LONGEST_DEFAULT), remark)


def layers_to_check(config: Mapping[str, Any], num_parameters: int) -> int | None:
    """How many of the first layers stand for all in the float32 check of a model that is too large to run whole.

    Enough for every kind of layer that the configuration lists. None for all of them.
    """
    text = config.get("text_config") or config
    count = next((int(text[key]) for key in _LAYER_KEYS if text.get(key)), 0)
    if 4 * num_parameters <= _RUN_WHOLE or count <= _FEWEST_LAYERS:
        return None
    lists = [value for value in text.values() if isinstance(value, list) and len(value) == count]
    firsts = [max(value.index(kind) for kind in value) + 1 for value in lists]
    return min(count, max([_FEWEST_LAYERS, *firsts]))


def _frozen_rope_limit(config: Mapping[str, Any]) -> int | None:
    """Length up to which a rotary embedding that depends on the length is constant; None for all others."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("longrope", "dynamic"):
        return None
    places = (rope.get(_ORIGINAL), config.get(_ORIGINAL), config.get("max_position_embeddings"))
    return next((int(length) for length in places if length), None)


def _block_size(values: Mapping[str, Any], given: Mapping[str, Any], role: str) -> int | None:
    """A recipe's block size belongs to the recipe's precision: another precision has its own default."""
    if given.get(f"{role}precision") is not None and given.get(f"{role}block_size") is None:
        return None
    block: int | None = values.get(f"{role}block_size")
    return block


def _check_role(role: str, precision: str, block: int | None) -> None:
    if precision not in PRECISIONS:
        raise ConfigError(f"{role}precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if block is not None and block not in BLOCK_SIZES:
        raise ConfigError(f"{role}block_size is {block!r}; it must be 32 or 128")
    if precision in FLOATS and block is not None:
        raise ConfigError(f"{role}block_size is {block}, but {precision} weights have no blocks: leave it out")
