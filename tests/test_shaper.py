"""Penalties, bans and cuts through the whole loop: what is emitted must be what the definitions say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import ConfigError
from edgespec.params import RuntimeParams, SamplingParams
from edgespec.session import DecoderSession
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from tests.naive import naive_adjust, naive_shape
from tests.tiny import EOS, VOCAB, half_right, reference_logits, save_graph, tiny_model

MODEL = tiny_model(eos_bonus=272)
DRAFTS = {"agreeing": MODEL, "half right": half_right(MODEL), "hostile": tiny_model(9)}
SETTINGS = [
    SamplingParams(repetition_penalty=1.25),
    SamplingParams(frequency_penalty=2.0, presence_penalty=2.0),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(min_new_tokens=25),
    SamplingParams(banned_tokens=[EOS, *range(40, 90)], logit_bias={100: 200.0, 101: 200.0}),
    SamplingParams(repetition_penalty=0.5, no_repeat_ngram_size=3, min_new_tokens=12, logit_bias={EOS: 90.0}),
]


def emit(loop: SpeculativeDecoder, prompt: np.ndarray, params: SamplingParams) -> tuple[list[int], GenerationStats]:
    counted = GenerationStats()
    return [t for step in loop.generate(prompt, params, counted) for t in step.tokens], counted


def decoder(target: object, drafter: object, num_draft_tokens: int = 4) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens, eos_token_ids=(EOS,), prefill_chunk=4)


def plain_greedy(prompt: np.ndarray, params: SamplingParams) -> list[int]:
    text = prompt.tolist()
    while len(text) - len(prompt) < params.max_new_tokens:
        row = naive_adjust(reference_logits(MODEL, np.array(text)), text, len(prompt), params, (EOS,))
        text.append(int(row.astype(np.float32).argmax()))
        if text[-1] == EOS:
            break
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DecoderSession]:
    folder = tmp_path_factory.mktemp("graphs")
    for name, model in DRAFTS.items():
        save_graph(model, folder / f"{name}.onnx")
    runtime = RuntimeParams(initial_capacity=8, prefill_chunk=4)
    return lambda name: DecoderSession(folder / f"{name}.onnx", context_length=400, runtime=runtime)


@pytest.mark.parametrize("name", [*DRAFTS, "ngram"])
def test_speculative_greedy_equals_plain(sessions: Callable[[str], DecoderSession], name: str) -> None:
    """Token for token with any drafter: a drafted token is penalised in the rows behind it, in target and draft."""
    rng = np.random.default_rng(0)
    drafter = NgramDrafter(2) if name == "ngram" else ModelDrafter(sessions(name), VOCAB)
    loop, accepted, drafted, changed = decoder(sessions("agreeing"), drafter, 5), 0, 0, 0
    for params in SETTINGS:
        for _ in range(5):
            prompt = rng.integers(0, VOCAB, int(rng.integers(2, 20)))
            limited = replace(params, max_new_tokens=40)
            tokens, counted = emit(loop, prompt, limited)
            assert tokens == plain_greedy(prompt, limited)
            accepted, drafted = accepted + counted.accepted, drafted + counted.drafted
            changed += tokens != plain_greedy(prompt, SamplingParams(max_new_tokens=40))
    assert changed > 20
    rate = accepted / drafted
    assert {"agreeing": rate == 1, "half right": 0.1 < rate < 0.9, "hostile": rate < 0.1}.get(name, True), rate


def exact_triples(rows: np.ndarray, prompt: list[int], params: SamplingParams) -> np.ndarray:
    """Probability of each sequence of three tokens, shape (vocab,) * 3, from the definitions."""
    vocab = rows.shape[1]

    def p(text: list[int]) -> np.ndarray:
        row = naive_adjust(rows[text[-1]], text, len(prompt), params)
        with np.errstate(divide="ignore"):
            return naive_shape(row, params)

    joint = np.zeros((vocab,) * 3)
    first = p(prompt)
    for a in np.flatnonzero(first):
        second = p([*prompt, a])
        for b in np.flatnonzero(second):
            joint[a, b] = first[a] * second[b] * p([*prompt, a, b])
    return joint


def fits(counts: np.ndarray, expected: np.ndarray, trials: int) -> float:
    """p-value of a chi-square test, bins pooled to five expected; 0 where something impossible was seen."""
    if counts[expected == 0].sum():
        return 0.0
    large = expected * trials >= 5
    f_obs = np.append(counts[large], counts[~large].sum())
    f_exp = np.append(expected[large], expected[~large].sum()) * trials
    return float(stats.chisquare(f_obs[f_exp > 0], f_exp[f_exp > 0]).pvalue)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=40, min_p=0.05, repetition_penalty=1.1),
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={3: 1.0}),
        SamplingParams(temperature=1, typical_p=0.8, no_repeat_ngram_size=2, banned_tokens=[4]),
    ],
    ids=["repetition, top-k, min-p", "frequency, presence, bias, top-p", "typical, n-grams, ban"],
)
def test_sampled_text_is_distributed_as_the_definitions_say(params: SamplingParams) -> None:
    """Triples of tokens through the whole loop follow the target's distribution, whoever drafts and with none."""
    vocab, trials, prompt = 45, 1800, [1, 2, 0]
    rng = np.random.default_rng(3)
    # Few good tokens a row, and those mostly the same: tokens repeat, so that penalties matter.
    rows = (rng.standard_normal((2, vocab, vocab)) + 3.0 * (np.arange(vocab) < 5)).astype(np.float32)
    target = TableScorer(lambda context: rows[0, context[-1]], vocab)
    draft_model = ModelDrafter(TableScorer(lambda context: rows[1, context[-1]], vocab), vocab)
    params = replace(params, max_new_tokens=4, ignore_eos=True)
    expected = exact_triples(rows[0], prompt, params)
    ignored = exact_triples(rows[0], prompt, replace(params, **PENALTIES_OFF))
    assert np.abs(expected - ignored).sum() > 0.1  # the penalties can be seen
    for drafter in (None, draft_model, NgramDrafter(2), ScriptedDrafter([[1, 1]] * 10**6)):
        loop = decoder(target, drafter, 2)
        counts = np.zeros((vocab,) * 3)
        for seed in range(trials):
            tokens, _ = emit(loop, np.array(prompt), replace(params, seed=seed))
            counts[tuple(tokens[:3])] += 1
        assert fits(counts, expected, trials) > 1e-4, drafter


PENALTIES_OFF = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "no_repeat_ngram_size": 0,
    "banned_tokens": (),
}


def test_the_hook_works_on_target_and_draft() -> None:
    """A hook that allows only the next token makes every draft of any model right."""

    def only_next(context: np.ndarray, row: np.ndarray) -> np.ndarray:
        return np.where(np.arange(6) == (context[-1] + 1) % 6, row, -np.inf)

    flat = TableScorer(lambda context: np.zeros(6), 6)
    for temperature in (0, 1):
        loop = decoder(flat, ModelDrafter(TableScorer(lambda context: np.arange(6), 6), 6), 3)
        params = SamplingParams(
            temperature=temperature, logits_processor=only_next, max_new_tokens=9, ignore_eos=True, seed=1
        )
        tokens, counted = emit(loop, np.array([4]), params)
        assert tokens == [5, 0, 1, 2, 3, 4, 5, 0, 1]
        assert counted.accepted == counted.drafted > 0


def test_greedy_never_computes_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties or without, no exponential is taken on the greedy path."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("exp was called")

    monkeypatch.setattr(np, "exp", refuse)
    target = TableScorer(lambda context: np.arange(6), 6)
    params = SamplingParams(repetition_penalty=2.0, min_new_tokens=3, max_new_tokens=4)
    assert emit(decoder(target, ModelDrafter(target, 6), 2), np.array([0]), params)[0] == [5, 4, 3, 5]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafter", [None, "model", "scripted"])
def test_nothing_left_to_choose_is_an_error(temperature: float, drafter: str | None) -> None:
    """When the bans leave no token, the answer ends with one line, at the same place whoever drafts."""

    def three_only(context: np.ndarray, row: np.ndarray) -> np.ndarray:
        return row if len(context) < 4 else np.full_like(row, -np.inf)

    table = TableScorer(lambda context: np.zeros(5), 5)
    made = {"model": ModelDrafter(TableScorer(lambda context: np.zeros(5), 5), 5)}
    loop = decoder(table, made.get(drafter or "", drafter and ScriptedDrafter([[], [0, 0, 0]] * 9)), 3)
    params = SamplingParams(temperature=temperature, logits_processor=three_only, ignore_eos=True)
    steps = loop.generate(np.array([0, 1]), params, GenerationStats())
    emitted: list[int] = []
    with pytest.raises(ConfigError, match=r"no token is left to choose behind the \d tokens so far"):
        for step in steps:
            emitted += step.tokens
    assert len(emitted) == 2
