"""A draft model that is drafted for: its proposals, and the whole loop. Exact oracles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from edgespec.contracts import Drafter
from edgespec.costs import CostCurve, CostTable
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import HistoryDrafter, ModelDrafter, NgramDrafter, StagedDrafter
from edgespec.noise import Noise
from edgespec.params import SamplingParams
from edgespec.policy import AdaptivePolicy, FixedPolicy
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from edgespec.verify import Draft

GREEDY = Shaper(SamplingParams())
RNG = np.random.default_rng(5)
SIZE = 4
# Logits after each token, of three models that are neither alike nor sure.
P, Q, R = RNG.standard_normal((3, SIZE, SIZE)).astype(np.float32) * 1.5


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
    for drafts in ([[1, 2, 3]] * 9, [[1, 4]] * 9, [[3, 3, 3]] * 9, []):
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


def test_numbers_inside_a_round_inside_a_round_have_no_address() -> None:
    """They would be those of another round, so a draft model's draft model cannot be drafted for."""
    with pytest.raises(AssertionError, match="one address"):
        Noise(3).inside(5).inside(6)


def test_its_drafters_are_told_what_was_written() -> None:
    """History inside a draft model learns as it does beside one."""
    history = HistoryDrafter(None, SIZE, 4)
    staged(history).learn(np.array([1, 2, 3]))
    assert len(history) > 0


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
