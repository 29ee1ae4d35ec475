"""Opening a bundle's models: sessions of the kinds that its manifest names, joined with one another."""

from __future__ import annotations

from typing import TypeAlias

from edgespec.bundle import Bundle, can_share_cache, model_head
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
    path, head = bundle.path / info.path, model_head(bundle, info)
    is_beside = provider_name(runtime.provider) == target.provider
    is_same = is_beside and info.path == bundle.manifest.target.path
    graph, length = target.session if is_same else open_graph(bundle, info, runtime), info.context_length
    session: DraftSession
    if info.cache == "none":
        session = RecurrentSession(
            path, target=target, context_length=length, runtime=runtime, head=head, session=graph, reads=reads
        )
    else:
        lender = target if is_beside and can_share_cache(bundle.manifest) else None
        session = DecoderSession(path, context_length=length, runtime=runtime, lender=lender, session=graph, head=head)
    session.check(info)
    return session


def fork_draft(draft: DraftSession, target: DecoderSession) -> DraftSession:
    """A session on the weights of `draft` for another session of its target."""
    if isinstance(draft, RecurrentSession):
        return draft.fork(target)
    return draft.fork(None if draft.owns_cache else target)
