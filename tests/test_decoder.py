"""The loop: what it emits, when it stops, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.decoder import SpeculativeDecoder, Step
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import ContextOverflowError
from edgespec.noise import Noise
from edgespec.params import RuntimeParams, SamplingParams
from edgespec.session import DecoderSession
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from edgespec.verify import Draft
from tests.tiny import EOS, VOCAB, half_right, reference_logits, save_graph, tiny_model

MODEL = tiny_model(eos_bonus=272)
SMALL = RuntimeParams(initial_capacity=8, prefill_chunk=4)


def plain(prompt: Tokens, params: SamplingParams, context_length: int) -> tuple[list[int], str]:
    """Greedy text by the definition: no cache, no loop of ours."""
    context = prompt.tolist()
    while True:
        context.append(int(reference_logits(MODEL, np.array(context)).argmax()))
        new = context[len(prompt) :]
        if new[-1] == EOS and not params.ignore_eos:
            return new, "eos"
        if len(new) == params.max_new_tokens:
            return new, "length"
        if len(context) == context_length:
            return new, "context"


class Hostile(Drafter):
    """Drafts what the target will surely reject: never its arg max."""

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        best = int(reference_logits(MODEL, context).argmax())
        return Draft(np.full(limit, (best + 1) % VOCAB))


class Mixed(Drafter):
    """Right for a while, then wrong, by the position; sometimes silent, sometimes shorter than asked."""

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        tokens: list[int] = []
        for i in range(limit - len(context) % 2 if len(context) % 7 else 0):
            best = int(reference_logits(MODEL, np.array([*context, *tokens])).argmax())
            tokens.append(best if (len(context) * 3 + i) % 5 else (best + 2) % VOCAB)
        return Draft(np.array(tokens, np.int64))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DecoderSession]:
    folder = tmp_path_factory.mktemp("graphs")
    models = {"target": MODEL, "agreeing": MODEL, "half right": half_right(MODEL), "hostile": tiny_model(9)}
    for name, model in models.items():
        for shared in (True, False):
            save_graph(model, folder / f"{name}{shared}.onnx", shared=shared)

    def open_session(name: str, shared: bool = True, context_length: int = 120, **more: object) -> DecoderSession:
        return DecoderSession(folder / f"{name}{shared}.onnx", context_length=context_length, runtime=SMALL, **more)

    return open_session


def decoder(target: object, drafter: object, num_draft_tokens: int) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens, eos_token_ids=(EOS,), prefill_chunk=4)


def run(loop: SpeculativeDecoder, prompt: Tokens, params: SamplingParams) -> tuple[list[Step], GenerationStats]:
    stats = GenerationStats()
    return list(loop.generate(prompt, params, stats)), stats


def tokens_of(steps: list[Step]) -> list[int]:
    return [t for step in steps for t in step.tokens]


DRAFTERS = ["agreeing", "half right", "hostile", "ngram", "never right", "mixed"]
BORROWERS = ["agreeing", "half right", "hostile"]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "growing"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", [None, "even"])
def test_speculative_equals_plain(sessions: Callable[..., DecoderSession], name: str, shared: bool, rule: None) -> None:
    """Token for token and with the same ending, over random prompts, draft lengths, budgets and end tokens."""
    rng = np.random.default_rng(DRAFTERS.index(name))
    target = sessions("target", shared, row_rule=rule)
    others = {"ngram": NgramDrafter(3), "never right": Hostile(), "mixed": Mixed()}
    drafter = others.get(name) or ModelDrafter(sessions(name, shared), VOCAB)
    endings, drafted, accepted = set(), 0, 0
    for _ in range(40):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 60))
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 90)), ignore_eos=bool(rng.random() < 0.4))
        steps, stats = run(decoder(target, drafter, int(rng.integers(0, 9))), prompt, params)
        expected, finish = plain(prompt, params, target.context_length)
        assert tokens_of(steps) == expected
        assert steps[-1].finish == finish
        assert [s.finish for s in steps[:-1]] == [None] * (len(steps) - 1)
        assert stats.new_tokens == len(expected)
        assert stats.accepted == sum(s.accepted for s in steps) <= stats.drafted
        endings.add(finish)
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    assert endings == {"eos", "length", "context"}
    assert drafted > 0
    rate = accepted / drafted
    assert {"agreeing": rate > 0.8, "half right": 0.1 < rate < 0.8, "never right": rate == 0}.get(name, True), rate


@pytest.mark.parametrize("name", BORROWERS)
@pytest.mark.parametrize("rule", [None, "even"])
def test_a_draft_on_the_target_s_cache(sessions: Callable[..., DecoderSession], name: str, rule: None) -> None:
    """A draft session that borrows the cache never feeds what the target has read, and never spoils it.

    The hostile one even writes keys and values of another model into it.
    """
    rng = np.random.default_rng(7)
    target = sessions("target", row_rule=rule)
    draft = sessions(name, lender=target)
    fed: list[int] = []
    feed = draft._feed
    draft._feed = lambda tokens, rows: fed.append(len(tokens)) or feed(tokens, rows)
    drafted = accepted = 0
    for _ in range(40):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 60))
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 90)), ignore_eos=bool(rng.random() < 0.4))
        steps, stats = run(decoder(target, ModelDrafter(draft, VOCAB), int(rng.integers(1, 9))), prompt, params)
        assert (tokens_of(steps), steps[-1].finish) == plain(prompt, params, target.context_length)
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    assert set(fed) == {1}
    rate = accepted / drafted
    assert {"agreeing": rate > 0.8, "half right": 0.1 < rate < 0.8, "hostile": rate < 0.05}[name], rate


def test_sampled_text_is_distributed_as_the_target_whatever_the_draft() -> None:
    """Pairs of sampled tokens through the whole loop follow p, by chi-square, for three drafters and none."""
    vocab = 4
    rng = np.random.default_rng(3)
    p_logits, q_logits = rng.standard_normal((2, vocab, vocab)).astype(np.float32) * 1.5
    params = SamplingParams(temperature=0.8, top_k=3, max_new_tokens=4, ignore_eos=True)
    p = np.exp(p_logits / np.float32(0.8)).astype(np.float64)
    p[p_logits < np.sort(p_logits, axis=1)[:, [1]]] = 0
    p /= p.sum(axis=1, keepdims=True)
    expected = np.einsum("a,ab,bc->abc", p[0], p, p).ravel()
    target = TableScorer(lambda context: p_logits[context[-1]], vocab)
    draft_model = ModelDrafter(TableScorer(lambda context: q_logits[context[-1]], vocab), vocab)
    for drafter in (None, draft_model, NgramDrafter(2), ScriptedDrafter([[1, 2]] * 10**6)):
        loop = decoder(target, drafter, 2)
        counts = np.zeros((vocab, vocab, vocab))
        for seed in range(4000):
            steps, _ = run(loop, np.array([1, 2, 0]), replace(params, seed=seed))
            tokens = tokens_of(steps)
            counts[tokens[0], tokens[1], tokens[2]] += 1
        observed = counts.ravel()
        assert observed[expected == 0].sum() == 0
        possible = expected * 4000 >= 5
        f_exp = np.append(expected[possible], expected[~possible].sum()) * 4000
        f_obs = np.append(observed[possible], observed[~possible].sum())
        keep = f_exp > 0
        assert stats.chisquare(f_obs[keep], f_exp[keep]).pvalue > 1e-4, drafter


def test_the_same_seed_gives_the_same_text(sessions: Callable[..., DecoderSession]) -> None:
    """Sampling is a function of the seed, warm caches or cold."""
    loop = decoder(sessions("target"), ModelDrafter(sessions("half right"), VOCAB), 4)
    prompt = np.arange(3, 20)
    params = SamplingParams(temperature=60, seed=1, max_new_tokens=30)
    first = tokens_of(run(loop, prompt, params)[0])
    run(loop, prompt[:5], SamplingParams(temperature=60, seed=2, max_new_tokens=30))
    assert tokens_of(run(loop, prompt, params)[0]) == first
    assert tokens_of(run(loop, prompt, SamplingParams(temperature=60, seed=2, max_new_tokens=30))[0]) != first


def test_closing_midway_leaves_the_decoder_usable(sessions: Callable[..., DecoderSession]) -> None:
    """Dropped after any number of rounds, the next answer is as if nothing had been."""
    target, draft = sessions("target"), sessions("half right")
    loop = decoder(target, ModelDrafter(draft, VOCAB), 3)
    prompt, params = np.arange(40, 60), SamplingParams(max_new_tokens=40)
    expected = plain(prompt, params, 120)[0]
    for rounds in range(6):
        steps = loop.generate(np.arange(9 + rounds, 30), params, GenerationStats())
        for _ in range(rounds):
            next(steps)
        steps.close()
        assert tokens_of(run(loop, prompt, params)[0]) == expected


@pytest.mark.parametrize("after", [0, 1, 3, 8])
def test_cancelling_stops_before_the_next_call(after: int) -> None:
    """During the prompt or between rounds; the last step says so and is empty."""
    target = TableScorer(lambda context: np.eye(5)[len(context) % 5], 5)
    loop = decoder(target, None, 0)
    steps = list(
        loop.generate(
            np.zeros(18, np.int64),
            SamplingParams(max_new_tokens=50),
            GenerationStats(),
            cancelled=lambda: len(target.calls) >= after,
        )
    )
    assert steps[-1] == Step((), 0, 0, "cancelled")
    assert len(target.calls) == after


def test_the_first_token_waits_for_no_draft() -> None:
    """The draft model reads the prompt only after the first token was decided."""
    draft = TableScorer(lambda context: np.zeros(4), 4)
    target = TableScorer(lambda context: np.zeros(4), 4)
    steps = decoder(target, ModelDrafter(draft, 4), 4).generate(
        np.ones(30, np.int64), SamplingParams(max_new_tokens=9, ignore_eos=True), GenerationStats()
    )
    assert next(steps).drafted == 0
    assert draft.calls == []
    assert next(steps).drafted == 4
    assert draft.calls[0] == (31, 1)


def test_a_second_turn_reads_only_what_is_new() -> None:
    """The history that the cache holds is not fed again, and the statistics say so."""
    target = TableScorer(lambda context: np.eye(5)[3], 5)
    loop = decoder(target, None, 0)
    prompt = np.ones(10, np.int64)
    run(loop, prompt, SamplingParams(max_new_tokens=3))
    target.calls.clear()
    longer = np.concatenate([prompt, [3, 3, 3, 1, 1]])
    _, counted = run(loop, longer, SamplingParams(max_new_tokens=1))
    assert counted.cached_tokens == 12
    assert target.calls == [(3, 1)]


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """Before anything is fed."""
    target = TableScorer(lambda context: np.zeros(4), 4, context_length=8)
    with pytest.raises(ContextOverflowError, match=r"the prompt has 8 tokens and the model's context 8"):
        run(decoder(target, None, 0), np.zeros(8, np.int64), SamplingParams())
    assert target.calls == []


@pytest.mark.parametrize("near_tie", [0.0, 1.0])
def test_near_ties_are_decided_alone(near_tie: float) -> None:
    """A model whose logits shift by less than half a unit when rows share a call: the text is the plain one.

    Without it the same runs part, so that the test sees the difference.
    """
    rng = np.random.default_rng(0)
    table = rng.permuted(np.tile(np.arange(40) * 0.3, (997, 1)), axis=1)

    class Wide(TableScorer):
        def forward(self, tokens: Tokens, rows: int) -> np.ndarray:
            exact = super().forward(tokens, rows)
            shift = np.sin(exact * 7 + len(self._tokens)) * 0.45
            return exact + (shift.astype(np.float32) if len(tokens) > 1 else 0)

    def logits(context: Tokens) -> np.ndarray:
        return table[int((context * (np.arange(len(context)) + 3)).sum()) % 997]

    class Oracle(Drafter):
        def propose(
            self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
        ) -> Draft:
            tokens = list(context)
            for _ in range(limit):
                tokens.append(int(logits(np.array(tokens)).argmax()))
            return Draft(np.array(tokens[len(context) :]))

    params, equal = SamplingParams(max_new_tokens=40, ignore_eos=True), []
    for seed in range(12):
        prompt = np.random.default_rng(seed).integers(0, 40, 1)
        expected = tokens_of(run(decoder(TableScorer(logits, 40), None, 0), prompt, params)[0])
        loop = SpeculativeDecoder(
            Wide(logits, 40), Oracle(), num_draft_tokens=3, eos_token_ids=(), prefill_chunk=4, near_tie=near_tie
        )
        steps, _ = run(loop, prompt, params)
        equal.append(tokens_of(steps) == expected)
    assert all(equal) == (near_tie > 0), equal


def test_drafts_are_checked_together_with_what_was_accepted_last() -> None:
    """A round is one call: the last emitted token and the draft, with a row for each decision."""
    target = TableScorer(lambda context: np.eye(6)[(context[-1] + 1) % 6], 6)
    loop = decoder(target, ScriptedDrafter([[1, 2, 3], [0, 5], []]), 3)
    steps, counted = run(loop, np.array([5]), SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [(s.tokens, s.drafted, s.accepted) for s in steps] == [
        ((0,), 0, 0),
        ((1, 2, 3, 4), 3, 3),
        ((5,), 2, 0),
        ((0,), 0, 0),
        ((1,), 0, 0),
    ]
    assert target.calls == [(1, 1), (4, 4), (3, 3), (1, 1), (1, 1)]
    assert (counted.acceptance, counted.tokens_per_pass, counted.rounds_drafted) == (3 / 5, 8 / 5, 2)
