"""Opening a bundle's models: sessions of the kinds that its manifest names, joined with one another."""

from __future__ import annotations

from typing import TypeAlias

from edgespec.bundle import Bundle, Manifest, ModelInfo, model_head
from edgespec.ort import provider_name
from edgespec.params import RuntimeParams
from edgespec.prepacked import open_graph
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession

DraftSession: TypeAlias = DecoderSession | RecurrentSession


def open_target(bundle: Bundle, runtime: RuntimeParams) -> DecoderSession:
    """The target's session, compared with the manifest.

    Raises:
        BundleError: they differ.
        SessionError, ConfigError: the graph or the provider cannot be used.
    """
    info = bundle.manifest.target
    session = DecoderSession(
        bundle.path / info.path,
        context_length=info.context_length,
        runtime=runtime,
        session=open_graph(bundle, info, runtime),
        head=model_head(bundle, info),
    )
    session.check(info)
    return session


def open_draft(bundle: Bundle, runtime: RuntimeParams, target: DecoderSession, *, reads: bool = False) -> DraftSession:
    """The session of the bundle's draft model beside that of its target.

    Args:
        target: of the same bundle; lends its cache or its `hidden` to a draft that needs it. Between two providers only
            `hidden` can be lent, which goes through the host's memory.
        reads: as for `RecurrentSession`.
    Raises:
        BundleError: it is not what the manifest says.
        SessionError, ConfigError: the graph or the provider cannot be used.
    """
    info = bundle.manifest.draft
    assert info is not None, bundle.path
    runtime = runtime.for_draft()
    if info.cache == "none":
        return _open_recurrent(bundle, info, runtime, target, reads=reads)
    path, head = bundle.path / info.path, model_head(bundle, info)
    is_beside = provider_name(runtime.provider) == target.provider
    is_same = is_beside and info.path == bundle.manifest.target.path
    graph, length = target.session if is_same else open_graph(bundle, info, runtime), info.context_length
    lender = target if is_beside and _can_share_cache(bundle.manifest) else None
    session = DecoderSession(path, context_length=length, runtime=runtime, lender=lender, session=graph, head=head)
    session.check(info)
    return session


def open_inner_draft(
    bundle: Bundle,
    runtime: RuntimeParams,
    draft: DraftSession | None,
    opened: RecurrentSession | None = None,
    *,
    reads: bool = False,
) -> RecurrentSession | None:
    """The session of what drafts for the draft model; `None` where the bundle has no such thing or `draft` is `None`.

    Args:
        draft: of the same bundle.
        opened: a session of it for another draft's session, whose weights are used.
        reads: as for `RecurrentSession`.
    Raises:
        BundleError, SessionError, ConfigError: as `open_draft`.
    """
    info = bundle.manifest.inner_draft
    if info is None or draft is None:
        return None
    assert isinstance(draft, DecoderSession), "read_bundle has checked it"
    if opened is not None:
        return opened.fork(draft)
    return _open_recurrent(bundle, info, runtime.for_draft(), draft, reads=reads)


def _open_recurrent(
    bundle: Bundle, info: ModelInfo, runtime: RuntimeParams, target: DecoderSession, *, reads: bool
) -> RecurrentSession:
    session = RecurrentSession(
        bundle.path / info.path,
        target=target,
        context_length=info.context_length,
        runtime=runtime,
        head=model_head(bundle, info),
        session=open_graph(bundle, info, runtime),
        reads=reads,
    )
    session.check(info)
    return session


def fork_draft(draft: DraftSession, target: DecoderSession) -> DraftSession:
    """A session on the weights of `draft` for another session of its target."""
    if isinstance(draft, RecurrentSession):
        return draft.fork(target)
    return draft.fork(None if draft.owns_cache else target)


def _can_share_cache(manifest: Manifest) -> bool:
    """Whether the draft is the target's model in another precision, so that it can work on the target's cache.

    It then never reads the text itself: keys and values of the target stand for its own, and are the better ones.
    Nothing is at stake but acceptance, as the target overwrites what the draft writes behind the committed text.
    """
    target, draft = manifest.target, manifest.draft
    if draft is None or target.cache != "shared" or draft.cache != "shared":
        return False
    same = ("source", "num_layers", "num_kv_heads", "head_dim", "num_parameters", "context_length")
    if (target.precision == "fp16") != (draft.precision == "fp16"):
        return False  # caches of different types
    return all(getattr(target, name) == getattr(draft, name) for name in same)
