"""What changes logits before temperature: against transformers, and against plain definitions where it has none."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import ConfigError
from edgespec.params import SamplingParams
from edgespec.shaper import Shaper
from tests.naive import naive_adjust

VOCAB = 40
EOS = (3, 7)
# Each on its own, and all together.
SINGLE = [
    SamplingParams(logit_bias={0: 2.5, 39: -1.0, 5: -100.0}),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(no_repeat_ngram_size=2),
    SamplingParams(no_repeat_ngram_size=4),
    SamplingParams(banned_tokens=[1, 3, 20]),
    SamplingParams(min_new_tokens=5),
]
TOGETHER = SamplingParams(
    logit_bias={2: 3.0, 8: -2.0},
    repetition_penalty=1.2,
    no_repeat_ngram_size=3,
    min_new_tokens=4,
    banned_tokens=[9],
)
COUNTED = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(presence_penalty=-1.5),
    SamplingParams(frequency_penalty=-0.25, presence_penalty=1.0, repetition_penalty=1.1, logit_bias={4: 2.0}),
]


def short(params: SamplingParams) -> str:
    default = SamplingParams()
    names = [n for n in SamplingParams.__dataclass_fields__ if getattr(params, n) != getattr(default, n)]
    return ",".join(f"{n}={getattr(params, n)}" for n in names)


def cases(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Logits with ties and infinities, a context of few distinct tokens, a draft, and the length of the prompt."""
    rng = np.random.default_rng(seed)
    num_drafted = int(rng.integers(0, 6))
    logits = (rng.integers(-20, 20, (num_drafted + 1, VOCAB)) / 4).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    tokens = rng.integers(0, 8 if seed % 2 else VOCAB, int(rng.integers(1, 30)) + num_drafted)
    context = tokens[: len(tokens) - num_drafted]
    return logits, context, tokens[len(context) :], int(rng.integers(1, len(context) + 1))


def adjusted(params: SamplingParams, seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], int]:
    """Ours, the rows it was made of, the text before each row, and the length of the prompt."""
    logits, context, drafted, num_prompt = cases(seed)
    shaper = Shaper(params, context[:num_prompt], EOS, VOCAB)
    texts = [np.concatenate([context, drafted[:i]]) for i in range(len(logits))]
    return shaper.adjust(logits.copy(), context, drafted), logits, texts, num_prompt


def by_transformers(row: np.ndarray, text: np.ndarray, num_prompt: int, params: SamplingParams) -> np.ndarray:
    """One row through the list of processors that `generate` makes for these settings."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GenerationConfig(
        do_sample=False,
        sequence_bias=[[[t], b] for t, b in params.logit_bias.items() if t] or None,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens,
        suppress_tokens=list(params.banned_tokens) or None,
    )
    config._eos_token_tensor = torch.tensor(EOS)
    processors = transformers.GenerationMixin()._get_logits_processor(config, input_ids_seq_length=num_prompt)
    return processors(torch.tensor(text)[None], torch.tensor(row, dtype=torch.float64)[None])[0].numpy()


@pytest.mark.parametrize("params", [*SINGLE, TOGETHER], ids=short)
def test_processors_equal_those_of_transformers(params: SamplingParams) -> None:
    """Every row, as if its text had been committed; alone and together, so in the same order."""
    for seed in range(40):
        ours, rows, texts, num_prompt = adjusted(params, seed)
        for i, text in enumerate(texts):
            row = rows[i].copy()
            row[0] += params.logit_bias.get(0, 0)  # transformers takes no list with token 0
            assert np.allclose(ours[i], by_transformers(row, text, num_prompt, params), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("params", [*SINGLE, TOGETHER, *COUNTED], ids=short)
def test_processors_equal_the_definition(params: SamplingParams) -> None:
    """Counted one token at a time in double precision; presence and frequency look at the answer alone."""
    for seed in range(100, 160):
        ours, rows, texts, num_prompt = adjusted(params, seed)
        expected = [naive_adjust(rows[i], text, num_prompt, params, EOS) for i, text in enumerate(texts)]
        assert np.allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("params", [*SINGLE, TOGETHER, *COUNTED], ids=short)
def test_a_draft_with_fewer_columns(params: SamplingParams) -> None:
    """Ids that a draft model has no column for are left out, the rest is as in the wide rows."""
    for seed in range(60):
        logits, context, drafted, num_prompt = cases(seed)
        shaper = Shaper(params, context[:num_prompt], EOS, VOCAB)
        wide = shaper.adjust(logits.copy(), context, drafted)
        assert np.array_equal(shaper.adjust(logits[:, :6].copy(), context, drafted), wide[:, :6])


def test_nothing_asked_for_changes_nothing() -> None:
    """The rows come back as they are, and the same array."""
    logits = np.ones((2, 5), np.float32)
    assert Shaper(SamplingParams(), np.array([1]), EOS, 5).adjust(logits, np.array([1]), np.array([2])) is logits
    assert (logits == 1).all()


def test_bias_and_bans_by_hand() -> None:
    """A bias comes before the penalty, which then works on the biased logit; a ban beats any bias."""
    params = SamplingParams(logit_bias={0: 3.0, 1: 9.0, 2: -1.0}, repetition_penalty=2.0, banned_tokens=[1])
    text = np.array([0, 2])
    row = Shaper(params, text).adjust(np.array([[1, 1, 0, 1]], np.float32), text, text[:0])
    assert row.tolist() == [[2.0, -np.inf, -2.0, 1.0]]


def test_the_hook_sees_the_drafted_prefix_and_comes_last() -> None:
    """It is called for each row with the text before that row, after all other processors."""
    seen: list[tuple[list[int], list[float]]] = []

    def hook(context: np.ndarray, row: np.ndarray) -> np.ndarray:
        seen.append((context.tolist(), row.tolist()))
        assert not context.flags.writeable
        return row * 2

    shaper = Shaper(SamplingParams(logits_processor=hook, banned_tokens=[1]), np.array([0]), (), 3)
    rows = shaper.adjust(np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([0, 2]), np.array([1]))
    assert seen == [([0, 2], [1, -np.inf, 3]), ([0, 2, 1], [4, -np.inf, 6])]
    assert rows.tolist() == [[2, -np.inf, 6], [8, -np.inf, 12]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned shape () of object"),
        (np.zeros(3), "returned shape (3,) of float64; it must return the row of logits, shape (4,)"),
        (np.array([0, np.nan, 0, 0]), "returned NaN or +inf"),
        (np.array([0, np.inf, 0, 0]), "returned NaN or +inf"),
    ],
    ids=str,
)
def test_what_a_hook_must_not_return(result: object, message: str) -> None:
    """It is told in one line."""
    shaper = Shaper(SamplingParams(logits_processor=lambda context, row: result))
    with pytest.raises(ConfigError) as caught:
        shaper.adjust(np.zeros((1, 4), np.float32), np.array([1]), np.empty(0, np.int64))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["banned_tokens", "logit_bias"])
def test_token_ids_outside_the_vocabulary(name: str) -> None:
    """Refused when the answer begins."""
    params = SamplingParams(**{name: {40: 1.0} if name == "logit_bias" else [40]})
    with pytest.raises(ConfigError, match=rf"{name} has the token id 40, outside the vocabulary of 40"):
        Shaper(params, np.array([0]), EOS, VOCAB)


WRONG = {
    "repetition_penalty": [0, -1, float("nan"), "1", True, 101],
    "frequency_penalty": [2.1, -3, None],
    "presence_penalty": [2.1, float("inf")],
    "logit_bias": [[1, 2], {-1: 0.0}, {1: float("inf")}, {"1": 1.0}, {1: None}],
    "banned_tokens": ["12", [-1], [1.5], 3],
    "no_repeat_ngram_size": [-1, 1.5],
    "min_new_tokens": [-1, 2.0],
    "typical_p": [0, 1.1],
    "logits_processor": ["f"],
    "grammar": ["{}"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values], ids=str)
def test_every_value_is_checked(name: str, value: object) -> None:
    """One line that names the field and the value."""
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cost_is_that_of_the_text() -> None:
    """Only cells of tokens in the text are written: an array that refuses all others is enough."""

    class Guarded(np.ndarray):
        def __setitem__(self, key: object, value: object) -> None:
            columns = np.asarray(key[1])
            assert columns.size <= 40
            super().__setitem__(key, value)

    params = SamplingParams(
        repetition_penalty=1.1, frequency_penalty=0.5, no_repeat_ngram_size=2, banned_tokens=[1], logit_bias={3: 1.0}
    )
    logits = np.zeros((3, 100_000), np.float32).view(Guarded)
    Shaper(params, np.arange(10)).adjust(logits, np.arange(20), np.array([5, 99_999]))
    assert np.count_nonzero(logits) < 60
