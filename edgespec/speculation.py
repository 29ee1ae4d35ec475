"""Drafters and policy of an engine, by what a caller asked for. Owns the choice; knows no text and no bundle files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.bundle import Manifest
from edgespec.contracts import Drafter, DraftPolicy
from edgespec.costs import CostCurve, CostTable
from edgespec.drafters import HistoryDrafter, ModelDrafter, NgramDrafter, StagedDrafter
from edgespec.errors import ConfigError
from edgespec.params import RowInvariance, RuntimeParams, SpecParams, Spinning
from edgespec.policy import AdaptivePolicy, FixedPolicy
from edgespec.profile import Profile, profile_key, read_advice, read_profile, write_profile
from edgespec.state import bundle_digest

if TYPE_CHECKING:
    from edgespec.models import DraftSession
    from edgespec.recurrent import RecurrentSession
    from edgespec.session import DecoderSession

# Rows of a target call at most: copying text pays up to here on every machine measured.
MAX_ROWS = 17
# Acceptance that is assumed before anything was seen, where the bundle does not say better.
_UNKNOWN_ACCEPTANCE = 0.5
_BUILT_IN = ("history", "ngram", "model")
_QUICK_S = 0.6  # for measuring one session at the first load


def choose_drafters(spec: SpecParams, extra: Collection[str] = (), *, has_model: bool) -> tuple[str, ...]:
    """Names of the drafters that are used. Several are a chain, of which the policy takes one a round.

    Args:
        extra: names of drafters that the application brings.
    Raises:
        ConfigError: the drafter that is asked for is not there, or an extra one has the name of another.
    """
    taken = set(extra) & {"auto", "none", *_BUILT_IN}
    if taken:
        raise ConfigError(f"drafters: the name {min(taken)!r} is taken, choose another")
    there = [*extra, *(["history"] if spec.history is not None else []), "ngram", *(["model"] if has_model else [])]
    if spec.num_draft_tokens == 0 or spec.drafter == "none":
        return ()
    if spec.drafter == "auto":
        if spec.num_draft_tokens is None:
            return tuple(there)
        # A fixed length has no way of choosing between drafters.
        return (*extra,) or (there[-1],)
    if spec.drafter == "model" and not has_model:
        raise ConfigError("the bundle has no draft model: use the drafter `ngram`, or export it with --draft")
    if spec.drafter not in there:
        raise ConfigError(f"drafter is {spec.drafter!r}; it must be one of auto, none, {', '.join(there)}")
    return (spec.drafter,)


@dataclass(frozen=True, slots=True)
class Models:
    """The opened models of a bundle, and how they are run.

    Attributes:
        target, draft, inner: sessions; `inner` drafts for `draft`.
    """

    manifest: Manifest
    runtime: RuntimeParams
    target: DecoderSession
    draft: DraftSession | None = None
    inner: RecurrentSession | None = None


def make_drafting(
    names: tuple[str, ...], extra: Mapping[str, Drafter], spec: SpecParams, models: Models
) -> tuple[dict[str, Drafter], DraftPolicy]:
    """The drafters by name, and who decides among them.

    That is a fixed number of tokens, or the depth by what this machine needs for a call, measured at the first load.
    A draft model that reads text is then drafted for as well, by lookup and by the bundle's inner draft.

    Args:
        names: as `choose_drafters` gives.
        extra: the application's own, by name.
        models: the draft model's session is there if `model` is among the names.
    """
    is_fixed = spec.num_draft_tokens is not None or not names
    profile = None if is_fixed else _profile(models)
    drafters = {name: extra[name] if name in extra else _make_drafter(name, spec, models, profile) for name in names}
    if profile is None:
        return drafters, FixedPolicy(spec.num_draft_tokens or 0)
    return drafters, _adaptive(drafters, profile.target, profile.draft, _prior(models.manifest, "pair_overlap"))


def _make_drafter(name: str, spec: SpecParams, models: Models, profile: Profile | None) -> Drafter:
    width, is_coupled = models.target.vocab_size, spec.verifier == "coupled"
    if name == "ngram":
        return NgramDrafter(spec.max_ngram)
    if name == "history":
        return HistoryDrafter(Path(spec.history) if spec.history else None, width, spec.max_ngram)
    from edgespec.recurrent import RecurrentSession

    draft = models.draft
    assert draft is not None, name
    reads_text = draft.head is None and not isinstance(draft, RecurrentSession)
    if profile is None or profile.draft is None or not reads_text:
        return ModelDrafter(draft, width, is_coupled=is_coupled)
    inner: dict[str, Drafter] = {"ngram": NgramDrafter(spec.max_ngram)}
    if models.inner is not None:
        inner["model"] = ModelDrafter(models.inner, min(width, draft.vocab_size), is_coupled=is_coupled)
    # What a step of the inner draft costs is seen at work.
    policy = _adaptive(inner, profile.draft, None, _prior(models.manifest, "inner_overlap"))
    return StagedDrafter(draft, width, inner, policy, is_coupled=is_coupled)


def _adaptive(
    drafters: Mapping[str, Drafter], calls: CostTable, steps: CostTable | None, prior: float
) -> AdaptivePolicy:
    """Chooses by what checking calls and a draft model's steps cost. That model's acceptance starts at `prior`."""
    curve = None if steps is None else CostCurve(steps, MAX_ROWS)
    costs = {n: (None, _UNKNOWN_ACCEPTANCE) if d.is_lookup else (curve, prior) for n, d in drafters.items()}
    return AdaptivePolicy(CostCurve(calls, MAX_ROWS), costs)


def _prior(manifest: Manifest, figure: str) -> float:
    """Acceptance of a draft model to start from, as the export has measured it."""
    overlap = manifest.check.get(figure)
    return overlap if isinstance(overlap, float) and 0 < overlap < 1 else _UNKNOWN_ACCEPTANCE


def _profile(models: Models) -> Profile:
    """The stored profile, or a quick one that is stored. One of a busy machine is measured again at the next load."""
    from edgespec.probe import measure_costs, measure_pair

    target, draft = models.target, models.draft
    key = profile_name(models.manifest, models.runtime, target.provider, target.row_rule, has_draft=draft is not None)
    stored = read_profile(key)
    if stored is not None and not stored.is_doubtful:
        return stored
    if draft is None:
        profile = Profile(measure_costs(target, _QUICK_S), None)
    else:
        profile = Profile(*measure_pair(target, draft, 2 * _QUICK_S))
    if stored is not None:
        profile = replace(min(profile, stored, key=lambda one: one.uncertainty), tries=stored.tries + 1)
    write_profile(key, profile)
    return profile


def profile_name(
    manifest: Manifest, runtime: RuntimeParams, provider: str, row_rule: RowInvariance | None, *, has_draft: bool
) -> str:
    """The key of a profile.

    Args:
        runtime: nothing left open but perhaps the number of threads.
        provider: ONNX Runtime's name of the target's.
        row_rule: of exact mode, if it is on.
        has_draft: whether a draft model's session is open beside the target's.
    """
    from edgespec.ort import runtime_version

    facts = [bundle_digest(manifest), runtime_version(), provider, runtime.threads, runtime.spinning, row_rule]
    return profile_key(*facts, has_draft, *_apart(runtime, has_draft=has_draft))


def advice_name(manifest: Manifest, runtime: RuntimeParams, provider: str, *, has_draft: bool) -> str:
    """The key of advice. Arguments as for `profile_name`; of `runtime` only the draft's provider counts."""
    from edgespec.ort import runtime_version

    facts = ["advice", bundle_digest(manifest), runtime_version(), provider, has_draft]
    return profile_key(*facts, *_apart(runtime, has_draft=has_draft))


def _apart(runtime: RuntimeParams, *, has_draft: bool) -> list[str]:
    """The provider of a draft model that runs on another one than the target."""
    return [runtime.draft_provider] if has_draft and runtime.draft_provider is not None else []


def resolve_runtime(runtime: RuntimeParams, manifest: Manifest, *, has_draft: bool) -> RuntimeParams:
    """What the caller left open, as `edgespec tune` or the first load found it best; where neither did, by rule."""
    if runtime.spinning != "auto" and runtime.threads is not None:
        return runtime
    from edgespec.ort import provider_name

    advice = read_advice(advice_name(manifest, runtime, provider_name(runtime.provider), has_draft=has_draft))
    spinning: Spinning = runtime.spinning
    if spinning == "auto":
        # Idle threads that spin take the cores from whatever else runs, and on a busy machine cost more than they win.
        spinning = "off" if advice is None else advice.spinning
    threads = runtime.threads
    if threads is None and advice is not None:
        threads = advice.threads
    return replace(runtime, spinning=spinning, threads=threads)
