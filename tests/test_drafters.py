"""Proposals of the drafters."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.noise import Noise
from edgespec.params import SamplingParams
from edgespec.shaper import Shaper
from edgespec.testing import TableScorer

GREEDY = Shaper(SamplingParams())


def ngram(context: list[int], limit: int = 3, max_ngram: int = 3) -> list[int]:
    return NgramDrafter(max_ngram).propose(np.array(context), limit, GREEDY, Noise(0)).tokens.tolist()


@pytest.mark.parametrize(
    ("context", "proposal"),
    [
        ([1, 2, 3], []),  # nothing repeats
        ([1, 2, 3, 1], [2, 3, 1]),  # one token repeats
        ([5, 1, 8, 9, 1, 7, 9, 1], [7, 9, 1]),  # the most recent match of the longest suffix
        ([1, 2, 8, 8, 3, 2, 9, 9, 1, 2], [8, 8, 3]),  # longer beats more recent
        ([4, 4, 4, 4], [4]),  # overlapping itself
        ([7], []),
        ([1, 2], []),
        ([3, 3], [3]),  # the match may end right before the suffix
    ],
)
def test_prompt_lookup(context: list[int], proposal: list[int]) -> None:
    """What followed the longest suffix the last time it occurred."""
    assert ngram(context) == proposal


def test_prompt_lookup_keeps_to_its_limits() -> None:
    """No more tokens than asked for; suffixes no longer than allowed."""
    assert ngram([1, 2, 3, 4, 5, 1], limit=2) == [2, 3]
    context = [1, 2, 8, 0, 5, 2, 9, 0, 1, 2]
    assert ngram(context, 1, max_ngram=2) == [8]
    assert ngram(context, 1, max_ngram=1) == [9]


def test_prompt_lookup_against_brute_force() -> None:
    """Random texts over a small alphabet: the same proposal as by trying every suffix and counting every place."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        context = rng.integers(0, 4, rng.integers(1, 30)).tolist()
        places: list[int] = []
        for n in range(4, 0, -1):
            places = [i + n for i in range(len(context) - n) if context[i : i + n] == context[-n:]]
            if places:
                break
        expected: list[int] = []
        while places and len(expected) < 3:
            votes = [context[i] for i in places]
            winner = max(reversed(votes), key=votes.count)
            expected.append(winner)
            places = [i + 1 for i in places if context[i] == winner and i + 1 < len(context)]
        assert ngram(context, 3, max_ngram=4) == expected, context


def table(rows: dict[int, list[float]]) -> TableScorer:
    """Logits that depend on the last token alone."""
    return TableScorer(lambda context: np.array(rows[int(context[-1])]), len(next(iter(rows.values()))))


def test_a_greedy_model_draft_is_its_arg_max() -> None:
    """Token by token, and without distributions."""
    drafter = ModelDrafter(table({0: [0, 1, 0], 1: [0, 0, 1], 2: [1, 0, 0]}), 3)
    draft = drafter.propose(np.array([0]), 4, GREEDY, Noise(0))
    assert draft.tokens.tolist() == [1, 2, 0, 1]
    assert draft.dists is None


def test_a_draft_model_reads_only_what_is_new() -> None:
    """After full acceptance it lags one token behind, after a rejection it rewinds; nothing is read twice."""
    scorer = table({t: [0, 0, 0, 0, 0] for t in range(5)})
    drafter = ModelDrafter(scorer, 5)
    context = np.array([1, 2, 3])
    first = drafter.propose(context, 3, GREEDY, Noise(0)).tokens
    assert scorer.calls == [(3, 1), (1, 1), (1, 1)]
    scorer.calls.clear()
    drafter.propose(np.array([*context, *first, 4]), 1, GREEDY, Noise(0))
    assert scorer.calls == [(2, 1)]
    scorer.calls.clear()
    drafter.propose(np.array([*context, first[0], 4, 4]), 1, GREEDY, Noise(0))
    assert scorer.calls == [(2, 1)]


def test_sampled_drafts_come_from_the_distributions_they_carry() -> None:
    """q is the shaped distribution, and the tokens are drawn from it: chi-square over 5,000 drafts."""
    shaper = Shaper(SamplingParams(temperature=0.5, top_k=3))
    drafter = ModelDrafter(table({t: [0.0, 1.0, 0.5, 0.2, -1.0] for t in range(5)}), 5)
    drafts = [drafter.propose(np.array([0]), 2, shaper, Noise(seed)) for seed in range(5000)]
    weights = np.exp(np.array([-np.inf, 1.0, 0.5, 0.2, -np.inf]) / 0.5)
    expected = weights / weights.sum()
    assert np.abs(drafts[0].dists - expected).max() < 1e-6
    for i in range(2):
        counts = np.bincount([d.tokens[i] for d in drafts], minlength=5)
        assert counts[[0, 4]].sum() == 0
        assert stats.chisquare(counts[1:4], expected[1:4] * 5000).pvalue > 1e-4


def test_padding_columns_of_either_side() -> None:
    """A draft with fewer columns has q = 0 on the rest; columns that the target lacks are never drafted."""
    shaper = Shaper(SamplingParams(temperature=1))
    narrow = ModelDrafter(table({t: [1.0, 1.0] for t in range(2)}), 4).propose(np.array([0]), 3, shaper, Noise(1))
    assert narrow.dists.shape == (3, 4)
    assert narrow.dists[:, 2:].sum() == 0
    wide = ModelDrafter(table({t: [0.0, 0.0, 50.0] for t in range(3)}), 2)
    for draft in (wide.propose(np.array([0]), 3, shaper, Noise(1)), wide.propose(np.array([0]), 3, GREEDY, Noise(1))):
        assert draft.tokens.max() < 2


def test_a_draft_model_with_a_shorter_context_stops_drafting() -> None:
    """Past its own context it proposes nothing instead of failing."""
    drafter = ModelDrafter(TableScorer(lambda context: np.zeros(3), 3, context_length=6), 3)
    assert len(drafter.propose(np.arange(4) % 3, 5, GREEDY, Noise(0))) == 2
    assert len(drafter.propose(np.arange(6) % 3, 5, GREEDY, Noise(0))) == 0
