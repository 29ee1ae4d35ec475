"""What is compared: each setting is a way of drafting on one of the loaded pairs of sessions. Knows no sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from edgespec.errors import ConfigError
from edgespec.params import DrafterName, SpecParams

Opponent = Literal["none", "ngram", "model", "chain"]
OPPONENTS: tuple[Opponent, ...] = get_args(Opponent)

PLAIN = "none"
# Plain decoding in the sessions of the pair, whose threads may spin in another way.
PLAIN_IN_PAIR = "none (as pair)"
# Fixed lengths of an exhaustive search: all the short ones, then by steps up to what one call of the target checks.
_LOOKUP_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_MODEL_DEPTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of the comparison.

    Attributes:
        name: for tables and files.
        spec: who drafts.
        in_pair: whether it runs in the sessions that are shared with a draft model.
        is_fixed: whether it is one of the fixed lengths of the search.
    """

    name: str
    spec: SpecParams
    in_pair: bool
    is_fixed: bool = False

    @property
    def is_plain(self) -> bool:
        return self.spec.drafter == "none"


def default_opponent(*, has_model: bool) -> Opponent:
    """What an engine does by itself: with a draft model the chain of lookup and model, else lookup."""
    return "chain" if has_model else "ngram"


def choose_settings(
    against: Sequence[Opponent], spec: SpecParams, *, has_model: bool, search: bool = False
) -> list[Setting]:
    """Plain decoding first, then the default drafter, then the others that are asked for.

    Without a draft model the chain is lookup alone, so it is not measured apart from that.

    Args:
        against: the opponents.
        spec: what all have in common.
        search: add every fixed drafter and length.
    Raises:
        ConfigError: the model is asked for and there is none.
    """
    if "model" in against and not has_model:
        raise ConfigError("the bundle has no draft model: leave `model` out of --against, or export it with --draft")
    # Earlier answers are not looked up: those to the same prompt would flatter.
    spec = replace(spec, history=None)
    wanted = {default_opponent(has_model=has_model), *against} - {"none"}
    if not has_model:
        wanted.discard("chain")
    settings = [Setting(PLAIN, replace(spec, drafter="none"), in_pair=False)]
    if has_model:
        settings.append(Setting(PLAIN_IN_PAIR, replace(spec, drafter="none"), in_pair=True))
    drafters: dict[str, DrafterName] = {"chain": "auto", "ngram": "ngram", "model": "model"}
    for name, drafter in drafters.items():
        if name in wanted:
            settings.append(Setting(name, replace(spec, drafter=drafter), in_pair=name != "ngram"))
    if search:
        settings += _fixed("ngram", _LOOKUP_DEPTHS, spec, in_pair=False)
    if search and has_model:
        settings += _fixed("model", _MODEL_DEPTHS, spec, in_pair=True)
    return settings


def _fixed(drafter: DrafterName, depths: Sequence[int], spec: SpecParams, *, in_pair: bool) -> list[Setting]:
    return [
        Setting(f"{drafter}-{n}", replace(spec, drafter=drafter, num_draft_tokens=n), in_pair, is_fixed=True)
        for n in depths
    ]
