"""Bundles with a draft model that has a draft of its own: sessions on one cache, whole answers. Whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.bundle import list_files, manifest_to_dict, read_bundle, write_manifest
from edgespec.drafters import StagedDrafter
from edgespec.errors import EdgespecError, SessionError
from edgespec.models import open_draft, open_inner_draft, open_target
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.policy import FixedPolicy
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession
from tests.tiny import EOS, VOCAB, half_right, reference_logits, rewrite_manifest, save_graph, tiny_info, tiny_model
from tests.tiny_hidden import (
    EOS_BONUS,
    HEAD_IDS,
    add_hidden,
    draft_info,
    draft_logits,
    make_hidden_bundle,
    read_bundle_unchecked,
    save_draft,
    target_hidden,
)

MODEL = tiny_model(eos_bonus=EOS_BONUS)
MIDDLE = half_right(MODEL)


def make_staged_bundle(folder: Path, *, shares: bool = True) -> Path:
    """Target, a draft that is right half of the time, on the target's cache if it `shares`, and one that is the draft's
    own draft and looks back at the draft's cache."""
    make_hidden_bundle(folder)
    for name, model in (("target", MODEL), ("draft", MIDDLE)):
        add_hidden(save_graph(model, folder / name / "model.onnx"))
    (folder / "draft" / "head_ids.npy").unlink()
    save_draft(MODEL, half_right(MIDDLE, seed=2).table, folder / "inner_draft" / "model.onnx", attends=True)
    np.save(folder / "inner_draft" / "head_ids.npy", HEAD_IDS.astype(np.int32))
    draft = replace(tiny_info("draft/model.onnx"), hidden_layers=(0,), source="the same" if shares else "another")
    inner = replace(draft_info(), path="inner_draft/model.onnx", head_ids="inner_draft/head_ids.npy")
    manifest = read_bundle_unchecked(folder)
    target = replace(manifest.target, source="the same")
    manifest = replace(manifest, target=target, draft=draft, inner_draft=inner, files=list_files(folder))
    write_manifest(manifest, folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "own"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return make_staged_bundle(tmp_path_factory.mktemp("staged") / "three", shares=request.param)


def test_a_borrower_keeps_what_it_wrote_itself(bundle: Path) -> None:
    """Until the lender reads on: over a walk of all three models, every row is that of the text alone."""
    opened, runtime = read_bundle(bundle), RuntimeParams(prefill_chunk=8, initial_capacity=8)
    rng = np.random.default_rng(5)
    with ExitStack() as stack:
        target = open_target(opened, runtime)
        stack.callback(target.close)
        draft = open_draft(opened, runtime, target)
        stack.callback(draft.close)
        inner = open_inner_draft(opened, runtime, draft)
        assert isinstance(draft, DecoderSession)
        assert isinstance(inner, RecurrentSession)
        stack.callback(inner.close)
        assert inner.borrows
        text = context = rng.integers(0, 5, 6)
        kept = started = 0
        for _ in range(300):
            if rng.random() < 0.5:
                pending = target.sync(text)
                rows = target.forward(pending, 1)
                np.testing.assert_array_equal(rows[0], reference_logits(MODEL, text))
            if rng.random() < 0.3:  # something else, over what the draft has written
                other = np.append(text, rng.integers(5, 9, 3))
                target.forward(target.sync(other), 1)
            context = text if rng.random() < 0.5 else context
            for _ in range(rng.integers(1, 4)):
                if rng.random() < 0.7:
                    before = context[:-1]
                    row = draft.hidden_after(before) if len(draft.sync(context)) == 1 else None
                    started += row is not None
                    found = inner.forward(inner.sync(context), 1)[0]
                    start = np.zeros(2, np.float32) if row is None else target_hidden(MODEL, before)
                    seen = context[: len(draft.tokens)]
                    expected = draft_logits(MODEL, half_right(MIDDLE, seed=2).table, start, context[-1:], seen)
                    np.testing.assert_array_equal(found, expected)
                pending = draft.sync(context)
                kept += len(draft.tokens) > len(target.tokens)
                more = rng.integers(0, 5, rng.integers(0, 4))
                rows = draft.forward(np.concatenate([pending, more]), len(more) + 1)
                for i, found in enumerate(rows):
                    after = np.concatenate([context, more[:i]])
                    np.testing.assert_array_equal(found, reference_logits(MIDDLE, after))
                context = np.concatenate([context, more[: rng.integers(0, len(more) + 1)], rng.integers(0, 5, 1)])
            context = context[-150:]
            text = context[: rng.integers(1, len(context) + 1)]
        assert kept > 100
        assert started > 100


@pytest.fixture
def lent(tmp_path: Path) -> Iterator[tuple[DecoderSession, DecoderSession]]:
    """A target, and a draft on its cache; both keep `hidden`."""
    bundle, runtime = read_bundle(make_staged_bundle(tmp_path / "three")), RuntimeParams()
    with closing(open_target(bundle, runtime)) as target, closing(open_draft(bundle, runtime, target)) as draft:
        assert isinstance(draft, DecoderSession)
        draft.keep_hidden()
        yield target, draft


def test_rows_of_hidden_are_of_the_text_that_is_asked_about(lent: tuple[DecoderSession, DecoderSession]) -> None:
    """Also where the lender has read another text since; and what only it has read, the borrower need not have seen."""
    target, draft = lent
    text = np.arange(3, 20)
    target.forward(text[:10], 1)
    draft.forward(draft.sync(text[:12]), 2)
    other = np.append(text[:9], [40, 41, 42])
    target.forward(target.sync(other), 12 - len(target.tokens))
    assert draft.hidden_after(text[:10]) is None
    for length in (10, 11, 12):
        np.testing.assert_array_equal(draft.hidden_after(other[:length]), target_hidden(MODEL, other[:length]))


@pytest.mark.parametrize("how", ["failed call", "pretended", "rewound"])
def test_a_borrower_trusts_nothing_that_may_be_gone(lent: tuple[DecoderSession, DecoderSession], how: str) -> None:
    """What a call of the lender that failed may have overwritten, or what was never there, is read anew."""
    target, draft = lent
    text = np.arange(3, 30)
    target.forward(text[:10], 1)
    draft.forward(draft.sync(text[:14]), 1)
    if how == "failed call":
        with pytest.raises(SessionError):
            target.forward(np.array([40, 41, 42, VOCAB + 1000]), 1)
    elif how == "pretended":
        draft.pretend(20)
    else:
        draft.rewind(3)
    pending = draft.sync(text[:15])
    assert len(draft.tokens) == 10
    np.testing.assert_array_equal(draft.forward(pending, 1)[0], reference_logits(MIDDLE, text[:15]))


def answers(engine: edgespec.Engine, params: SamplingParams) -> list[list[int]]:
    prompts = np.random.default_rng(8).integers(3, 100, (6, 20))
    found = []
    for prompt in prompts:
        stream = engine.generate(prompt.tolist(), params)
        stream.text()
        found.append(list(stream.token_ids))
    return found


def test_whole_answers(bundle: Path, tmp_path: Path) -> None:
    """Greedy text is the definition's, coupled text that of plain decoding; a fork, kept caches and closing work."""
    greedy = SamplingParams(max_new_tokens=60, ignore_eos=True)
    sampled = replace(greedy, temperature=1.0, seed=4)
    with edgespec.load(bundle, spec=SpecParams(drafter="none", verifier="coupled")) as engine:
        plain = [answers(engine, params) for params in (greedy, sampled)]
    prompt = np.random.default_rng(8).integers(3, 100, (6, 20))[0]
    for _ in range(60):
        prompt = np.append(prompt, reference_logits(MODEL, prompt).argmax())
    assert plain[0][0] == prompt[20:].tolist()
    with edgespec.load(bundle, spec=SpecParams(drafter="model", verifier="coupled")) as engine:
        drafter = engine._decoder.drafters["model"]
        assert isinstance(drafter, StagedDrafter)
        engine.policy = FixedPolicy(5)
        drafter.policy = watched = Watched(2)
        assert [answers(engine, params) for params in (greedy, sampled)] == plain
        assert watched.accepted
        assert len(engine.providers) == 3
        with engine.fork() as fork:
            fork.policy = FixedPolicy(5)
            assert answers(fork, greedy) == plain[0]
        engine.save_caches(tmp_path / "caches")
        engine.load_caches(tmp_path / "caches")
        assert answers(engine, greedy) == plain[0]


def test_exact_mode(bundle: Path) -> None:
    """Its rule is the target's alone: the draft's calls may be as they like."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    runtime = RuntimeParams(exact=True)
    with edgespec.load(bundle, spec=SpecParams(drafter="none"), runtime=runtime) as engine:
        plain = answers(engine, params)
    with edgespec.load(bundle, spec=SpecParams(drafter="model"), runtime=runtime) as engine:
        engine.policy = FixedPolicy(5)
        assert answers(engine, params) == plain


def test_cancelled_in_the_middle_of_a_draft(bundle: Path) -> None:
    """At any call of any of the three models; the next answer is as if nothing had been."""
    params, rng = SamplingParams(max_new_tokens=40, ignore_eos=True), np.random.default_rng(0)
    with edgespec.load(bundle, spec=SpecParams(drafter="model")) as engine:
        engine.policy = FixedPolicy(5)
        plain, ends = answers(engine, params), set()
        for _ in range(20):
            stream = engine.generate(rng.integers(3, 100, 20).tolist(), params)
            session = engine._sessions[rng.integers(3)]
            wait, run = int(rng.integers(1, 20)), session.session

            class Stops:
                calls = 0

                def run_with_iobinding(self, *arguments: object, wait=wait, run=run, stream=stream) -> None:  # type: ignore[no-untyped-def]
                    Stops.calls += 1
                    if Stops.calls == wait:
                        stream.cancel()
                    run.run_with_iobinding(*arguments)

            session.session = Stops()
            stream.text()
            session.session = run
            ends.add(stream.finish_reason)
        assert "cancelled" in ends
        assert answers(engine, params) == plain


class Watched(FixedPolicy):
    """Counts what was accepted of the inner model's tokens."""

    accepted = 0

    def learn(self, outcome) -> None:  # type: ignore[no-untyped-def]
        self.accepted += outcome.num_accepted

    def choose(self, offers, past, room):  # type: ignore[no-untyped-def]
        return super().choose([offer for offer in offers if offer.name == "model"], past, room)


def test_the_proof_tries_it(bundle: Path) -> None:
    """`edgespec verify` runs the draft as an engine does."""
    from edgespec.proof import Proof, Setting
    from edgespec.proof.subject import open_subject

    setting = Setting("T 1", SamplingParams(temperature=100.0))
    with open_subject(bundle, RuntimeParams(), with_draft=True) as subject:
        proof = Proof(subject, [setting], drafters=["model"], budget=5.0, max_samples=300)
        assert isinstance(proof._drafter("model", subject.stages), StagedDrafter)
        assert proof.run().passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": None}, "inner_draft must"),
        ({"draft": {"hidden_layers": None}}, "inner_draft must"),
        ({"inner_draft": {"cache": "shared", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}}, "inner_draft must"),
        ({"inner_draft": {"path": "inner_draft/other.onnx"}}, "is not among its files"),
        ({"inner_draft": {"vocab_size": VOCAB - 100}}, "rows of logits"),
    ],
)
def test_a_manifest_that_cannot_be(tmp_path: Path, changes: dict[str, dict[str, object]], message: str) -> None:
    """An inner draft without anything to draft for, of the wrong kind, or not there."""
    folder = make_staged_bundle(tmp_path / "three")
    manifest = manifest_to_dict(read_bundle_unchecked(folder))
    rewrite_manifest(folder, **{name: change and manifest[name] | change for name, change in changes.items()})
    with pytest.raises(EdgespecError, match=message):
        edgespec.load(folder).close()


def test_the_end_token_of_the_tiny_model_is_drafted_last(bundle: Path) -> None:
    """Answers that end by themselves end at the same place."""
    params = SamplingParams(max_new_tokens=200)
    with edgespec.load(bundle, spec=SpecParams(drafter="none")) as engine:
        plain = answers(engine, params)
    assert any(answer[-1] == EOS for answer in plain)
    with edgespec.load(bundle, spec=SpecParams(drafter="model")) as engine:
        engine.policy = FixedPolicy(6)
        assert answers(engine, params) == plain
