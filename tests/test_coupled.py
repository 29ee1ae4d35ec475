"""Coupled checking: one text per seed, whoever drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import edgespec
from edgespec.contracts import Drafter, Scorer
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.noise import Noise
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from edgespec.verify import Draft, verify_coupled


def run(target: Scorer, drafter: Drafter | None, params: SamplingParams, depth: int = 3) -> tuple[list[int], float]:
    """The answer to a fixed prompt, and the share of accepted tokens."""
    loop = SpeculativeDecoder(
        target, drafter, num_draft_tokens=depth, eos_token_ids=(), prefill_chunk=4, verifier="coupled"
    )
    counted = GenerationStats()
    steps = list(loop.generate(np.array([1, 2, 0, 1, 2]), params, counted))
    return [token for step in steps for token in step.tokens], counted.acceptance or 0.0


def test_the_noise_chooses_as_the_weights_say() -> None:
    """Frequencies over seeds, and over positions of one seed, are the normalised weights; zeros are never chosen."""
    weights = np.array([0, 2, 0.5, 1, 0, 0.5, 0], np.float32)
    for choices in (
        [Noise(seed).choose(weights, 5) for seed in range(6000)],
        [Noise(3).choose(weights, position) for position in range(6000)],
    ):
        counts = np.bincount(choices, minlength=7)
        assert counts[weights == 0].sum() == 0
        assert stats.chisquare(counts[weights > 0], weights[weights > 0] / 4 * 6000).pvalue > 1e-4


def test_a_choice_is_the_arg_max_of_log_weight_plus_gumbel_noise() -> None:
    """By the definition, from the same uniforms; unnormalised and cut weights see the same noise."""
    weights = np.random.default_rng(0).dirichlet(np.ones(200)).astype(np.float32)
    for position in range(200):
        uniforms = np.random.Generator(np.random.Philox(key=9, counter=[0, 0, position, 4])).random(200)
        gumbel = -np.log(-np.log1p(-uniforms))
        assert Noise(9).choose(weights, position) == (np.log(weights) + gumbel).argmax()
        assert Noise(9).choose(weights * 7, position) == (np.log(weights) + gumbel).argmax()
        cut = np.where(weights > 0.005, weights, 0).astype(np.float32)
        with np.errstate(divide="ignore"):
            assert Noise(9).choose(cut, position) == (np.log(cut) + gumbel).argmax()


def test_drafted_tokens_are_accepted_while_they_are_the_choice() -> None:
    """The first difference ends the run and the target's choice takes its place; rows behind it play no part."""
    probs = np.random.default_rng(1).dirichlet(np.ones(6), 4).astype(np.float32)
    noise = Noise(4)
    chosen = [noise.choose(row, 10 + i) for i, row in enumerate(probs)]
    for accepted in range(4):
        tokens = np.array(chosen[:3])
        if accepted < 3:
            tokens[accepted] = (tokens[accepted] + 1) % 6
        verdict = verify_coupled(probs, Draft(tokens), noise, 10)
        assert (verdict.accepted, verdict.token) == (accepted, chosen[accepted])
    assert verify_coupled(probs[:1], Draft(np.empty(0, np.int64)), noise, 10).token == chosen[0]


P_LOGITS, CHANGE = np.random.default_rng(3).standard_normal((2, 4, 4)).astype(np.float32)
Q_LOGITS = P_LOGITS + CHANGE / 2


def drafters() -> list[Drafter | None]:
    model = ModelDrafter(TableScorer(lambda context: Q_LOGITS[context[-1]], 4), 4, is_coupled=True)
    return [None, model, NgramDrafter(2), ScriptedDrafter([[1, 2]] * 10**6)]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1), SamplingParams(temperature=0.7, top_p=0.8, top_k=3)])
def test_the_text_of_a_seed_is_the_same_with_any_drafter(params: SamplingParams) -> None:
    """Drafters and depths change the number of passes, not a token."""
    target = TableScorer(lambda context: P_LOGITS[context[-1]], 4)
    for seed in range(40):
        wanted = replace(params, seed=seed, max_new_tokens=20)
        plain, _ = run(target, None, wanted)
        for drafter in drafters():
            for depth in (1, 2, 5):
                assert run(target, drafter, wanted, depth)[0] == plain


def test_a_draft_is_accepted_more_if_it_shares_the_noise() -> None:
    """Than one that draws with noise of its own."""
    target = TableScorer(lambda context: P_LOGITS[context[-1]], 4)
    params = SamplingParams(temperature=1, seed=1, max_new_tokens=400)
    coupled, uncoupled = (
        run(target, ModelDrafter(TableScorer(lambda context: Q_LOGITS[context[-1]], 4), 4, is_coupled=c), params)[1]
        for c in (True, False)
    )
    assert coupled > uncoupled + 0.2


def test_coupled_text_is_distributed_as_the_target() -> None:
    """The first three tokens over many seeds, first round drafted: chi-square against the product of the rows."""
    params = SamplingParams(temperature=1, max_new_tokens=3)
    weights = np.exp(P_LOGITS.astype(np.float64))
    p = weights / weights.sum(axis=1, keepdims=True)
    expected = np.einsum("a,ab,bc->abc", p[2], p, p).ravel() * 4000
    target = TableScorer(lambda context: P_LOGITS[context[-1]], 4)
    counts = np.zeros((4, 4, 4))
    for seed in range(4000):
        counts[tuple(run(target, drafters()[1], replace(params, seed=seed), 2)[0])] += 1
    few = expected < 5
    observed = np.append(counts.ravel()[~few], counts.ravel()[few].sum())
    assert stats.chisquare(observed, np.append(expected[~few], expected[few].sum())).pvalue > 1e-4


def test_a_bundle_with_any_drafter(tiny_pair: Path) -> None:
    """Through ONNX Runtime and real caches: the same tokens with the model, with prompt lookup and plain."""
    params = SamplingParams(temperature=60, max_new_tokens=30, ignore_eos=True)
    texts = []
    for drafter in ("none", "ngram", "model"):
        spec = SpecParams(drafter=drafter, verifier="coupled")
        with edgespec.load(tiny_pair, spec=spec, runtime=RuntimeParams(initial_capacity=8)) as engine:
            streams = [engine.generate("aabaab", replace(params, seed=seed)) for seed in range(8)]
            for stream in streams:
                stream.text()
            texts.append([stream.token_ids for stream in streams])
            if drafter == "model":
                assert sum(stream.stats.accepted for stream in streams) > 10
    assert texts[0] == texts[1] == texts[2]


def test_greedy_is_greedy_in_coupled_mode() -> None:
    """Temperature 0 has a path of its own."""
    target = TableScorer(lambda context: P_LOGITS[context[-1]], 4)
    params = SamplingParams(max_new_tokens=12)
    tokens, context = [], 2
    for _ in range(12):
        context = int(P_LOGITS[context].argmax())
        tokens.append(context)
    assert all(run(target, drafter, params)[0] == tokens for drafter in drafters())


def test_an_unknown_verifier_is_refused() -> None:
    """Only the two that there are."""
    with pytest.raises(edgespec.ConfigError, match="verifier is 'loose'; it must be standard or coupled"):
        SpecParams(verifier="loose")
