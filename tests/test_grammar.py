"""Grammars: masks against enumeration, through the whole loop, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from scipy import special, stats

import edgespec
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import ConfigError, MissingExtraError
from edgespec.grammar import GrammarCompiler, GrammarConstraint
from edgespec.params import Grammar, SamplingParams, SpecParams
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.testing import ScriptedDrafter, TableScorer
from tests.tiny import EOS, NUM_TOKENS, SPECIALS, VOCAB, byte_alphabet, tiny_tokenizer

llguidance = pytest.importorskip("llguidance")

IDS = {chr(byte): len(SPECIALS) + i for i, byte in enumerate(byte_alphabet()) if byte < 128}
# A regular expression of a finite language, and the language.
PATTERN = "a(b|c)?[xy]{1,2}|b|ab"
LANGUAGE = sorted(
    {"b", "ab"} | {"a" + m + x + y for m, x, y in itertools.product(["", "b", "c"], "xy", ["", "x", "y"])}
)


def ids(text: str) -> np.ndarray:
    return np.array([IDS[c] for c in text], np.int64)


def expected_next(text: str) -> set[int]:
    """What may follow, from the language: characters of longer strings that begin so, and the end of a string."""
    following = {IDS[s[len(text)]] for s in LANGUAGE if s.startswith(text) and len(s) > len(text)}
    return following | ({EOS} if text in LANGUAGE else set())


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    return GrammarCompiler(path, [EOS])


@pytest.fixture
def constraint(compiler: GrammarCompiler) -> GrammarConstraint:
    return compiler.compile(Grammar.regex(PATTERN))


def masks(constraint: GrammarConstraint, answer: str, drafted: str = "", columns: int = VOCAB) -> list[set[int]]:
    """The tokens that each row leaves possible; an arbitrary prompt in front."""
    prompt, draft = ids("q{"), ids(drafted)
    shaper = Shaper(SamplingParams(), prompt, [EOS], VOCAB, constraint)
    rows = shaper.adjust(np.zeros((len(draft) + 1, columns), np.float32), np.concatenate([prompt, ids(answer)]), draft)
    return [set(np.flatnonzero(row == 0).tolist()) for row in rows]


def test_masks_equal_the_language_in_any_order_of_asking(constraint: GrammarConstraint) -> None:
    """Every beginning of every string, asked for at random, forwards and backwards: never the order is trusted."""
    beginnings = sorted({s[:i] for s in LANGUAGE for i in range(len(s) + 1)})
    rng = np.random.default_rng(0)
    for i in rng.integers(0, len(beginnings), 400):
        assert masks(constraint, beginnings[i]) == [expected_next(beginnings[i])], beginnings[i]


def test_each_row_follows_the_drafted_prefix(constraint: GrammarConstraint) -> None:
    """Row i is masked by answer and the first i drafted tokens, whether drafts were asked about before or not."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        text = LANGUAGE[rng.integers(len(LANGUAGE))]
        cut, end = sorted(rng.integers(0, len(text) + 1, 2))
        answer, drafted = text[:cut], text[cut:end]
        if rng.random() < 0.5:
            assert constraint.num_possible(ids(answer), ids(drafted)) == len(drafted)
        assert masks(constraint, answer, drafted) == [expected_next(text[:i]) for i in range(cut, end + 1)]


def test_rows_behind_the_impossible_are_left_alone(constraint: GrammarConstraint) -> None:
    """A drafted token that may not come, or an end token, has no continuation to mask."""
    everything = set(range(VOCAB))
    assert masks(constraint, "a", "bzx") == [expected_next("a"), expected_next("ab"), everything, everything]
    shaper = Shaper(SamplingParams(), ids(""), [EOS], VOCAB, constraint)
    rows = shaper.adjust(np.zeros((3, VOCAB), np.float32), ids("a"), np.array([IDS["b"], EOS]))
    assert [set(np.flatnonzero(row == 0).tolist()) for row in rows] == [
        expected_next("a"),
        expected_next("ab"),
        everything,
    ]


def test_drafts_are_counted_up_to_where_the_grammar_refuses(constraint: GrammarConstraint) -> None:
    """An end token counts only at a match, and nothing counts behind it."""

    def count(answer: str, *drafted: int) -> int:
        return constraint.num_possible(ids(answer), np.array(drafted, np.int64))

    a, b, x, z = (IDS[c] for c in "abxz")
    assert count("", a, b, x, x) == 4
    assert count("", a, z, b) == 1
    assert count("", z) == 0
    assert count("a", b, EOS, b) == 2
    assert count("a", EOS) == 0
    assert count("axx", EOS) == 1
    assert count("axx", x) == 0
    assert count("") == 0
    assert masks(constraint, "a") == [expected_next("a")]


def test_rows_of_other_widths(constraint: GrammarConstraint) -> None:
    """Padding columns behind the tokenizer's vocabulary are impossible; a draft with fewer columns is no trouble."""
    assert masks(constraint, "", columns=VOCAB + 70) == [expected_next("")]
    assert NUM_TOKENS < VOCAB
    narrow = IDS["b"]  # as many columns as leave this one out
    assert masks(constraint, "", columns=narrow) == [{t for t in expected_next("") if t < narrow}]


def test_old_masks_are_forgotten(compiler: GrammarCompiler) -> None:
    """A long answer keeps the masks of its last positions only."""
    constraint = compiler.compile(Grammar.regex("[ab]*"))
    for n in range(200):
        masks(constraint, "ab" * n)
    masks_of_each = [masks(constraint, "a" * n, "b") for n in range(300)]
    assert masks_of_each == [[{IDS["a"], IDS["b"], EOS}] * 2] * 300
    assert len(constraint._masks) <= 100


def rows_of(seed: int) -> Callable[[np.ndarray], np.ndarray]:
    table = np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)).astype(np.float32) * 2
    return lambda context: table[context[-1]]


def decoder(drafter: object) -> SpeculativeDecoder:
    target = TableScorer(rows_of(0), VOCAB)
    return SpeculativeDecoder(target, drafter, num_draft_tokens=3, eos_token_ids=(EOS,), prefill_chunk=4)


@pytest.mark.parametrize("drafter", [None, "model", "ngram", "scripted"])
def test_sampled_text_is_distributed_as_the_masked_target(compiler: GrammarCompiler, drafter: str | None) -> None:
    """Whole answers follow the product of masked and renormalised rows, by chi-square over the finite language."""
    logits, prompt, trials = rows_of(0), ids("{ax"), 2500
    expected = dict.fromkeys(LANGUAGE, 1.0)
    for text in LANGUAGE:
        for i in range(len(text) + 1):
            allowed = sorted(expected_next(text[:i]))
            probs = special.softmax(logits(np.concatenate([prompt, ids(text[:i])]))[allowed].astype(np.float64))
            expected[text] *= probs[allowed.index(IDS[text[i]] if i < len(text) else EOS)]
    made = {
        "model": ModelDrafter(TableScorer(rows_of(1), VOCAB), VOCAB),
        "ngram": NgramDrafter(3),
        "scripted": ScriptedDrafter(itertools.cycle([[], [IDS["b"], IDS["x"], EOS], [EOS]])),
    }
    loop = decoder(made.get(drafter or ""))
    grammar = Grammar.regex(PATTERN)
    counts = dict.fromkeys(LANGUAGE, 0)
    constraint = compiler.compile(grammar)
    for seed in range(trials):
        params = SamplingParams(temperature=1, seed=seed, grammar=grammar, max_new_tokens=9)
        steps = list(loop.generate(prompt, params, GenerationStats(), constraint=constraint))
        tokens = [t for step in steps for t in step.tokens]
        assert steps[-1].finish == "eos"
        assert tokens[-1] == EOS
        counts["".join(c for t in tokens[:-1] for c, i in IDS.items() if i == t)] += 1
    f_exp = np.array([expected[s] for s in LANGUAGE]) * trials
    f_obs = np.array([counts[s] for s in LANGUAGE])
    assert f_exp.sum() == pytest.approx(trials)
    large = f_exp >= 5
    f_exp, f_obs = np.append(f_exp[large], f_exp[~large].sum()), np.append(f_obs[large], f_obs[~large].sum())
    assert stats.chisquare(f_obs[f_exp > 0], f_exp[f_exp > 0]).pvalue > 1e-4


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_answers_validate(tiny_pair: Path, drafter: str) -> None:
    """Sampled or greedy, whoever drafts: JSON that the schema accepts, and the greedy text of the plain path."""
    with edgespec.load(tiny_pair, spec=SpecParams(drafter=drafter)) as engine:
        params = SamplingParams(temperature=40, grammar=Grammar.json_schema(SCHEMA), max_new_tokens=120)
        greedy = replace(params, temperature=0)
        for seed in range(12):
            stream = engine.chat([{"role": "user", "content": f"{seed}?"}], replace(params, seed=seed))
            jsonschema.validate(json.loads(stream.text()), SCHEMA)
            assert stream.finish_reason == "eos"
        texts = [engine.generate(f"A{i}", greedy).text() for i in range(5)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    with edgespec.load(tiny_pair, spec=SpecParams(drafter="none")) as engine:
        assert texts == [engine.generate(f"A{i}", greedy).text() for i in range(5)]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[a-c]{3,5}-[0-9]{2}"), "[a-c]{3,5}-[0-9]{2}"),
        (Grammar.lark('start: "x" (pair)* "."\npair: /[a-f]/ "=" /[0-9]/\n'), r"x([a-f]=[0-9])*\."),
    ],
    ids=["regex", "lark"],
)
def test_regular_expressions_and_lark_grammars(tiny_pair: Path, grammar: Grammar, pattern: str) -> None:
    """The whole text is a match; one that is cut by the limit says so."""
    with edgespec.load(tiny_pair) as engine:
        for seed in range(10):
            stream = engine.generate("A", SamplingParams(temperature=30, seed=seed, grammar=grammar, max_new_tokens=60))
            text = stream.text()
            assert stream.finish_reason == "length" or re.fullmatch(pattern, text), text
        stream = engine.generate("A", SamplingParams(grammar=grammar, max_new_tokens=2))
        assert len(stream.text()) == 2
        assert stream.finish_reason == "length"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{"), "the JSON schema is not valid JSON"),
        (lambda: Grammar.json_schema("[1]"), "the JSON schema is not a JSON object"),
        (lambda: Grammar.json_schema({"type": {1, 2}}), "the JSON schema is not valid JSON"),
        (lambda: Grammar.json_schema({"type": "strin"}), "the JSON schema cannot be used: Invalid type: strin"),
        (lambda: Grammar.json_schema({"not": {"type": "null"}}), "the JSON schema cannot be used"),
        (lambda: Grammar.regex("(a"), "the regular expression cannot be used: unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "the regular expression cannot be used: look-around"),
        (lambda: Grammar.regex(""), "the regex is ''; it must be text that is not empty"),
        (lambda: Grammar.lark("start: foo"), 'the Lark grammar cannot be used: at 1(8): unknown name: "foo"'),
        (lambda: Grammar("bnf", "x"), "the kind of grammar is 'bnf'"),
        (lambda: SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True), "ignore_eos is True; it must be False"),
    ],
)
def test_grammars_that_cannot_be_used(tiny_bundle: Path, make: Callable[[], object], message: str) -> None:
    """One line, at the latest when the answer is asked for, and the engine stays usable."""
    with edgespec.load(tiny_bundle) as engine:
        with pytest.raises(ConfigError) as caught:
            engine.generate("A", SamplingParams(grammar=make()))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert engine.generate("A", SamplingParams(max_new_tokens=1)).text() is not None


def test_without_the_extra(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; engines without grammars do not need it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with edgespec.load(tiny_bundle) as engine:
        assert engine.generate("A", SamplingParams(max_new_tokens=3)).text()
        with pytest.raises(MissingExtraError, match=r"pip install 'edgespec\[structured\]'"):
            engine.generate("A", SamplingParams(grammar=Grammar.regex("a")))


def test_a_minimum_that_the_grammar_cannot_reach(tiny_bundle: Path) -> None:
    """Where the end token is all that the grammar leaves and the minimum forbids it, that is said."""
    with edgespec.load(tiny_bundle) as engine:
        stream = engine.generate("A", SamplingParams(grammar=Grammar.regex("ab"), min_new_tokens=5))
        with pytest.raises(ConfigError, match=r"no token is left to choose behind the 3 tokens so far"):
            stream.text()
