"""Draft and target on different providers, the other one being a CPU session under another name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import edgespec
from edgespec import ort
from edgespec.bundle import read_bundle
from edgespec.errors import ConfigError, SessionError
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.speculation import profile_name
from tests.test_cli import cli
from tests.tiny_hidden import make_hidden_bundle

CPU, OTHER = "CPUExecutionProvider", "OtherExecutionProvider"
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
DRAFTED = SpecParams(drafter="model", num_draft_tokens=3)


class Elsewhere:
    """A session that says that another provider runs it."""

    def __init__(self, session: Any, provider: str) -> None:
        self._session, self._provider = session, provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_providers(self) -> list[str]:
        return [self._provider]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the other provider available. What is given runs what is asked of it."""

    def install(runs_on: str = OTHER) -> None:
        real = onnxruntime.InferenceSession

        def open_session(path: str, options: Any, *, providers: Sequence[str]) -> Any:
            session = real(path, options, providers=[CPU])
            return session if providers[0] == CPU else Elsewhere(session, runs_on)

        monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
        monkeypatch.setattr(ort, "available_providers", lambda: [CPU, OTHER])

    return install


def text(engine: edgespec.Engine) -> str:
    return engine.generate("some text", PARAMS).text()


@pytest.mark.parametrize(
    ("runtime", "providers"),
    [
        (RuntimeParams(draft_provider=OTHER), (CPU, OTHER)),
        (RuntimeParams(provider=OTHER, draft_provider="cpu"), (OTHER, CPU)),
        (RuntimeParams(provider=OTHER), (OTHER, OTHER)),
        (RuntimeParams(draft_provider=CPU), (CPU, CPU)),
    ],
)
def test_the_pair_runs_where_it_is_asked_to(
    runtime: RuntimeParams, providers: tuple[str, str], tiny_pair: Path, other: Callable[[], None]
) -> None:
    """The text is that of plain decoding, and the target's cache is lent only on its own provider."""
    other()
    with edgespec.load(tiny_pair, spec=SpecParams(drafter="none")) as engine:
        expected = text(engine)
    with edgespec.load(tiny_pair, spec=DRAFTED, runtime=runtime) as engine, engine.fork() as fork:
        for one in (engine, fork):
            assert one.providers == providers
            assert set(one._named_sessions()) == {"target", *(["draft"] if len(set(providers)) == 2 else [])}
            stream = one.generate("some text", PARAMS)
            assert stream.text() == expected
            assert stream.stats.accepted > 0


def test_a_draft_without_a_cache_runs_elsewhere(tmp_path: Path, other: Callable[[], None]) -> None:
    """What the target computed goes to the draft by the host's memory: as much is accepted as beside it."""
    other()
    bundle = make_hidden_bundle(tmp_path / "pair")
    accepted, texts = [], []
    for provider in (None, OTHER):
        with edgespec.load(bundle, spec=DRAFTED, runtime=RuntimeParams(draft_provider=provider)) as engine:
            assert engine.providers == (CPU, provider or CPU)
            stream = engine.generate("some text", PARAMS)
            texts.append(stream.text())
            accepted.append(stream.stats.accepted)
    assert texts[0] == texts[1]
    assert accepted[0] == accepted[1] > 0


def test_there_is_no_fall_back(tiny_pair: Path, other: Callable[[str], None]) -> None:
    """A provider that is not installed, and one that is and cannot run the draft."""
    with pytest.raises(ConfigError, match="'nowhere' is not in the installed"):
        edgespec.load(tiny_pair, spec=DRAFTED, runtime=RuntimeParams(draft_provider="nowhere"))
    other(CPU)
    with pytest.raises(SessionError, match=f"'{OTHER}' cannot be used on this machine"):
        edgespec.load(tiny_pair, spec=DRAFTED, runtime=RuntimeParams(draft_provider=OTHER))
    for name in ("", 3):
        with pytest.raises(ConfigError, match="draft_provider is"):
            RuntimeParams(draft_provider=name)  # type: ignore[arg-type]


def test_caches_of_other_providers_are_refused(tiny_pair: Path, tmp_path: Path, other: Callable[[], None]) -> None:
    """A file is for the same two providers; both models go on from it."""
    other()
    with edgespec.load(tiny_pair, spec=DRAFTED, runtime=RuntimeParams(draft_provider=OTHER)) as engine:
        text(engine)
        engine.save_caches(tmp_path / "caches.npz")
        tokens = [session.tokens.copy() for session in engine._named_sessions().values()]
    with edgespec.load(tiny_pair, spec=DRAFTED) as engine, pytest.raises(ConfigError, match="another provider"):
        engine.load_caches(tmp_path / "caches.npz")
    with edgespec.load(tiny_pair, spec=DRAFTED, runtime=RuntimeParams(draft_provider=OTHER)) as engine:
        engine.load_caches(tmp_path / "caches.npz")
        for session, wanted in zip(engine._named_sessions().values(), tokens, strict=True):
            assert np.array_equal(session.tokens, wanted)


def test_costs_are_measured_for_each_pair_of_providers(tiny_pair: Path) -> None:
    """A profile with another provider for the draft is another one, but for the target alone."""
    manifest = read_bundle(tiny_pair).manifest

    def name(provider: str | None, *, has_draft: bool) -> str:
        return profile_name(manifest, RuntimeParams(draft_provider=provider), CPU, None, has_draft=has_draft)

    assert len({name(p, has_draft=True) for p in (None, OTHER, "cuda")}) == 3
    assert name(None, has_draft=False) == name(OTHER, has_draft=False)


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["verify"], ["bench"], ["tune"]])
def test_the_option_is_passed_on(command: list[str], tiny_pair: Path) -> None:
    """Each command that loads a pair says that there is no such provider."""
    result = cli(command[0], tiny_pair, *command[1:], "--draft-provider", "nowhere")
    assert result.exit_code == 2
    assert "provider 'nowhere' is not in the installed" in result.stderr.splitlines()[-1]
