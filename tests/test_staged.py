"""A draft model that is drafted for: its proposals, the whole loop, sessions that share a cache. Exact oracles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import edgespec
from edgespec.bundle import list_files, manifest_to_dict, read_bundle, write_manifest
from edgespec.contracts import Drafter
from edgespec.costs import CostCurve, CostTable
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter, StagedDrafter
from edgespec.errors import EdgespecError
from edgespec.models import open_draft, open_inner_draft, open_target
from edgespec.noise import Noise
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.policy import AdaptivePolicy, FixedPolicy
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from edgespec.verify import Draft
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

GREEDY = Shaper(SamplingParams())
RNG = np.random.default_rng(5)
SIZE = 4
# Logits after each token, of three models that are neither alike nor sure.
P, Q, R = RNG.standard_normal((3, SIZE, SIZE)).astype(np.float32) * 1.5
MODEL = tiny_model(eos_bonus=EOS_BONUS)
MIDDLE = half_right(MODEL)


def scorer(rows: np.ndarray, **options: int) -> TableScorer:
    return TableScorer(lambda context: rows[context[-1]], rows.shape[1], **options)


def softmax(rows: np.ndarray) -> np.ndarray:
    weights = np.exp(rows.astype(np.float64))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def staged(inner: Drafter, depth: int = 2, rows: np.ndarray = Q, width: int = SIZE) -> StagedDrafter:
    return StagedDrafter(scorer(rows), width, {"inner": inner}, FixedPolicy(depth))


def model_inner() -> ModelDrafter:
    return ModelDrafter(scorer(R), SIZE)


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_greedy_draft_is_the_model_s_own(limit: int) -> None:
    """Whatever is drafted for it, rightly or wrongly; never longer than asked for, and in fewer calls where right."""
    rows = np.roll(np.eye(5, dtype=np.float32), 1, axis=1)  # counts: 0 1 2 3 4 0 1 ...
    for drafts in ([[1, 2, 3]] * 9, [[1, 9 % 5]] * 9, [[3, 3, 3]] * 9, []):
        drafter = StagedDrafter(scorer(rows), 5, {"inner": ScriptedDrafter(drafts)}, FixedPolicy(3))
        draft = drafter.propose(np.array([0]), limit, GREEDY, Noise(0))
        assert draft.tokens.tolist() == [(i + 1) % 5 for i in range(limit)]
        assert draft.dists is None
        assert len(draft.confidences) == limit
    right = StagedDrafter(model := scorer(rows), 5, {"inner": ScriptedDrafter([[1, 2, 3]])}, FixedPolicy(3))
    right.propose(np.array([0]), 4, GREEDY, Noise(0))
    assert model.calls == [(4, 4)]


@pytest.mark.parametrize("inner", [model_inner(), NgramDrafter(2), ScriptedDrafter([[1, 2]] * 10**6)])
def test_sampled_drafts_follow_the_model(inner: Drafter) -> None:
    """Triples of drafted tokens have the model's own probabilities, and the distributions carried are its rows."""
    shaper = Shaper(SamplingParams(temperature=1))
    drafter, q = staged(inner), softmax(Q)
    expected = np.einsum("a,ab,bc->abc", q[0], q, q).ravel() * 6000
    counts = np.zeros((SIZE, SIZE, SIZE))
    for seed in range(6000):
        draft = drafter.propose(np.array([1, 2, 0]), 3, shaper, Noise(seed))
        first, second, third = draft.tokens.tolist()
        counts[first, second, third] += 1
        assert draft.dists is not None
        np.testing.assert_allclose(draft.dists, q[[0, first, second]], atol=1e-6)
    assert stats.chisquare(counts.ravel(), expected).pvalue > 1e-4


class Hesitant(FixedPolicy):
    """Goes on only after tokens of which the draft model was sure."""

    def goes_on(self, name: str, confidences: Sequence[float], past: int) -> bool:
        return confidences[-1] > 0.6


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("policy", [FixedPolicy, Hesitant])
def test_sampled_text_follows_the_target(coupled: bool, policy: type[FixedPolicy]) -> None:
    """Through the whole loop, where drafts begin and end anywhere and rounds inside come back to a position."""
    p, n = softmax(P), 5000
    drafter = StagedDrafter(
        scorer(Q), SIZE, {"inner": ModelDrafter(scorer(R), SIZE, is_coupled=coupled)}, Hesitant(2), is_coupled=coupled
    )
    loop = SpeculativeDecoder(
        scorer(P),
        drafter,
        policy=policy(3),
        eos_token_ids=(),
        prefill_chunk=8,
        verifier="coupled" if coupled else "standard",
    )
    counts, drafted, accepted = np.zeros((SIZE,) * 4), 0, 0
    for seed in range(n):
        params, found = SamplingParams(temperature=1, max_new_tokens=4, seed=seed), GenerationStats()
        steps = loop.generate(np.array([1, 2, 0]), params, found)
        counts[tuple(token for step in steps for token in step.tokens)] += 1
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
    assert 0.2 < accepted / drafted < 0.9
    for seen, expected in (
        (counts.sum((2, 3)), np.einsum("a,ab->ab", p[0], p)),
        (counts.sum((0, 3)), np.einsum("a,ab,bc->bc", p[0], p, p)),
        (counts.sum((0, 1)), np.einsum("a,ab,bc,cd->cd", p[0], p, p, p)),
    ):
        assert stats.chisquare(seen.ravel(), expected.ravel() * n).pvalue > 1e-4


def test_numbers_inside_a_round_are_its_own() -> None:
    """Rounds inside two rounds share no number, though they begin at the same place; positions keep theirs."""
    noise = Noise(3)
    draws = [noise.uniforms(7, purpose, 8) for purpose in (1, 2, 3)]  # type: ignore[arg-type]
    for start in (0, 5, 7):
        draws += [noise.inside(start).uniforms(7, purpose, 8) for purpose in (1, 2, 3)]  # type: ignore[arg-type]
    assert len(np.unique(np.concatenate(draws))) == 8 * len(draws)
    assert np.array_equal(noise.inside(5).uniforms(7, 1, 8), Noise(3).inside(5).uniforms(7, 1, 8))  # type: ignore[arg-type]
    weights = np.ones(50, np.float32)
    assert [noise.inside(5).choose(weights, i) for i in range(9)] == [noise.choose(weights, i) for i in range(9)]


def test_a_coupled_draft_is_what_the_noise_chooses() -> None:
    """At each position, by the draft model's distribution there: what a plain draft model would propose."""
    shaper, inner = Shaper(SamplingParams(temperature=1)), ModelDrafter(scorer(R), SIZE, is_coupled=True)
    plain = ModelDrafter(scorer(Q), SIZE, is_coupled=True)
    drafter = StagedDrafter(scorer(Q), SIZE, {"inner": inner}, FixedPolicy(2), is_coupled=True)
    for seed in range(50):
        found = [d.propose(np.array([1]), 6, shaper, Noise(seed)) for d in (plain, drafter)]
        assert found[0].tokens.tolist() == found[1].tokens.tolist()
        assert found[1].dists is None


def test_a_draft_ends_with_an_end_token() -> None:
    """Also where the round inside went on behind it."""
    rows = np.roll(np.eye(5, dtype=np.float32), 1, axis=1)
    drafter = StagedDrafter(scorer(rows), 5, {"inner": ScriptedDrafter([[1, 2, 3]] * 3)}, FixedPolicy(3))
    shaper = Shaper(SamplingParams(), eos_token_ids=[2])
    assert drafter.propose(np.array([0]), 6, shaper, Noise(0)).tokens.tolist() == [1, 2]


def test_a_draft_ends_where_nothing_is_possible() -> None:
    """A row that bans everything proposes nothing; what came before it stays."""
    shaper = Shaper(SamplingParams(temperature=1, logits_processor=ban_all_after_two, max_new_tokens=9))
    for context, length in (([1], 2), ([1, 0, 2], 0)):
        assert len(staged(ScriptedDrafter([])).propose(np.array(context), 5, shaper, Noise(0))) == length


def ban_all_after_two(tokens: np.ndarray, row: np.ndarray) -> np.ndarray:
    return np.full_like(row, -np.inf) if len(tokens) > 2 else row


def test_padding_columns_and_the_end_of_the_context() -> None:
    """Columns that one side lacks are never drafted; past its own context it proposes nothing."""
    shaper = Shaper(SamplingParams(temperature=1))
    wide = staged(ScriptedDrafter([[1, 1]] * 9), rows=np.tile([0.0, 0.0, 50.0], (3, 1)).astype(np.float32), width=2)
    narrow = staged(ScriptedDrafter([[1, 1]] * 9), rows=np.zeros((2, 2), np.float32), width=4)
    for drafter in (wide, narrow):
        draft = drafter.propose(np.array([0]), 4, shaper, Noise(1))
        assert draft.tokens.max() < 2
        assert draft.dists is not None
        np.testing.assert_allclose(draft.dists[:, :2], 0.5)
        assert draft.dists[:, 2:].sum() == 0
    short = StagedDrafter(scorer(Q, context_length=6), SIZE, {"inner": model_inner()}, FixedPolicy(3))
    assert len(short.propose(np.arange(4), 5, GREEDY, Noise(0))) == 2
    assert len(short.propose(np.arange(6) % SIZE, 5, GREEDY, Noise(0))) == 0


def test_a_useless_inner_drafter_is_parked() -> None:
    """Where what it proposes is always wrong, the draft model soon works alone, one row a call."""
    rows = np.roll(np.eye(5, dtype=np.float32), 1, axis=1)
    curve = CostCurve(CostTable((16,), (1, 2, 17), ((0.01, 0.015, 0.03),)), 17)
    policy = AdaptivePolicy(curve, {"inner": (None, 0.9)})
    drafter = StagedDrafter(model := scorer(rows), 5, {"inner": Wrong()}, policy)
    for length in range(1, 40):
        drafter.propose(np.arange(length) % 5, 4, GREEDY, Noise(0))
    assert model.calls[0][1] > 1
    assert {rows for _, rows in model.calls[-40:]} == {1}


class Wrong(Drafter):
    """Never right where the next token is the last one plus 1."""

    def propose(self, context, limit, shaper, noise, goes_on=None) -> Draft:  # type: ignore[no-untyped-def]
        return Draft(np.full(limit, context[-1]))


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
    opened, runtime, rng = read_bundle(bundle), RuntimeParams(prefill_chunk=8, initial_capacity=8), RNG
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
        text = context = RNG.integers(0, 5, 6)
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
