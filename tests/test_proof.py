"""The parts of the losslessness test: remembered rows, exact laws, identity, comparisons, the report."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.noise import Noise
from edgespec.params import SamplingParams, Verifier
from edgespec.proof import Proof, Report, Setting, Subject, identity
from edgespec.proof.differences import first_difference, measure_widths
from edgespec.proof.fit import Fit
from edgespec.proof.identity import check_identity
from edgespec.proof.laws import PlainRows, Reference, draw_samples, fit_samples
from edgespec.proof.replay import ReplayScorer
from edgespec.proof.report import FitCheck, correct_fits
from edgespec.shaper import Shaper
from edgespec.testing import TableScorer
from edgespec.theory import acceptance, coupled_acceptance
from edgespec.verify import Draft

VOCAB = 5
RNG = np.random.default_rng(2)
P_LOGITS, CHANGE = RNG.standard_normal((2, VOCAB, VOCAB)).astype(np.float32)
Q_LOGITS = P_LOGITS + CHANGE
PROMPT = np.array([1, 2, 3, 1, 2])
T1 = SamplingParams(temperature=1)


class Table(TableScorer):
    """Rows that depend on the last two tokens; a table of numbers as the model."""

    def __init__(self, logits: np.ndarray = P_LOGITS) -> None:
        super().__init__(lambda text: logits[text[-1]] + np.roll(logits[text[-2:][0]], 1), VOCAB)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64))
    return weights / weights.sum()


def row_after(text: list[int], logits: np.ndarray = P_LOGITS) -> np.ndarray:
    return softmax(logits[text[-1]] + np.roll(logits[text[-2:][0]], 1))


# remembered rows


def test_remembered_rows_are_the_models() -> None:
    """Over a random walk of texts the rows are those of the model, and most calls never reach it."""
    rng, direct, replay = np.random.default_rng(0), Table(), ReplayScorer(Table(), recheck_every=50)
    for _ in range(400):
        text = np.concatenate([PROMPT, rng.integers(0, 2, rng.integers(1, 6))])
        rows = int(rng.integers(1, 3))
        ours, theirs = (s.forward(np.append(s.sync(text[:-1]), text[-1]), rows) for s in (replay, direct))
        assert np.array_equal(ours, theirs)
        ours[:] = 0  # a caller may overwrite what it got
    assert replay.num_calls < 120
    assert replay.num_rechecked > 5
    assert replay.num_changed == 0


def test_rows_that_change_are_noticed() -> None:
    """A model that does not give the same row twice for the same text, as after a bad rewind."""
    moods = iter(range(10**6))
    replay = ReplayScorer(TableScorer(lambda text: np.full(3, next(moods)), 3), recheck_every=2)
    for _ in range(10):
        replay.forward(replay.sync(PROMPT), 1)
    assert replay.num_rechecked == replay.num_changed == 4


# exact laws


def test_the_reference_is_the_definition() -> None:
    """Temperature and cut of the right row, whatever the model was used for before."""
    target = Table()
    shaper = Shaper(SamplingParams(temperature=0.5, top_k=2))
    rows = PlainRows(target, PROMPT)
    for prefix in ((), (4,), (4, 0), (4,)):
        target.forward(np.array([3, 3, 3]), 1)
        weights = row_after([*PROMPT, *prefix]) ** 2
        weights[weights < np.sort(weights)[-2]] = 0
        assert Reference(rows, shaper).p(prefix) == pytest.approx(weights / weights.sum(), abs=1e-6)


def samples_and_fits(
    verifier: Verifier, claimed: Verifier, params: SamplingParams = T1, eos: tuple[int, ...] = ()
) -> dict[str, Fit]:
    """What 1,500 rounds give under one rule, tested by the laws of another."""
    target, draft = Table(), Table(Q_LOGITS)
    drafter = ModelDrafter(draft, VOCAB, is_coupled=verifier == "coupled")
    loop = SpeculativeDecoder(
        target, drafter, num_draft_tokens=2, eos_token_ids=eos, prefill_chunk=8, verifier=verifier
    )
    samples = list(draw_samples(loop, PROMPT, params, range(1500)))
    reference = Reference(PlainRows(target, PROMPT), Shaper(params, PROMPT, eos))
    q = row_after(PROMPT.tolist(), Q_LOGITS).astype(np.float32)
    return fit_samples(samples, reference, q, verifier=claimed, seed=0)


@pytest.mark.parametrize("verifier", ["standard", "coupled"])
def test_both_rules_keep_their_laws(verifier: Verifier) -> None:
    """Every kind of token is tested and fits."""
    fits = samples_and_fits(verifier, verifier)
    assert all(fit.p_value is not None and fit.p_value > 1e-3 for fit in fits.values())
    assert fits["first token"].samples == fits["pairs"].samples == 1500
    assert fits["corrected token"].samples + fits["bonus token"].samples < 1500


def test_a_corrected_token_has_another_law_in_coupled_mode() -> None:
    """The residual of the standard rule does not fit what the coupled rule corrects to, and conversely."""
    assert samples_and_fits("coupled", "standard")["corrected token"].p_value < 1e-3
    assert samples_and_fits("standard", "coupled")["corrected token"].p_value < 1e-3


def test_answers_that_end() -> None:
    """An end token is a first token like any other, and nothing is expected behind it."""
    fits = samples_and_fits("standard", "standard", eos=(int(row_after(PROMPT.tolist()).argmax()),))
    assert all(fit.p_value is None or fit.p_value > 1e-3 for fit in fits.values())
    assert fits["pairs"].samples == 1500
    assert fits["pairs"].expected.sum() == pytest.approx(1500)


def test_out_of_time_a_test_becomes_smaller() -> None:
    """Without time for further rows only what needs none is tested."""
    target = Table()
    loop = SpeculativeDecoder(target, NgramDrafter(2), num_draft_tokens=2, eos_token_ids=(), prefill_chunk=8)
    samples = list(draw_samples(loop, PROMPT, T1, range(300)))
    q = np.eye(VOCAB, dtype=np.float32)[3]
    reference = Reference(PlainRows(target, PROMPT), Shaper(T1))
    fits = fit_samples(samples, reference, q, verifier="standard", seed=0, is_late=lambda: True)
    assert [kind for kind, fit in fits.items() if fit.df] == ["first token", "corrected token"]


# identity


def identity_of(drafter: ModelDrafter | NgramDrafter) -> identity.Identity:
    contexts = [(Shaper(T1), PROMPT), (Shaper(T1), PROMPT[:4])]
    found = check_identity(Table(), drafter, contexts, 1, 0)
    assert found is not None
    return found


def test_identity_and_acceptance() -> None:
    """Both routes together are p; the acceptances are those of the rows, for a model and for prompt lookup."""
    found = identity_of(ModelDrafter(Table(Q_LOGITS), VOCAB))
    pairs = [(row_after(t), row_after(t, Q_LOGITS)) for t in (PROMPT.tolist(), PROMPT[:4].tolist())]
    assert found.passed
    assert found.rows == 2
    assert found.acceptance == pytest.approx(np.mean([acceptance(p, q) for p, q in pairs]), abs=1e-5)
    assert found.coupled_acceptance == pytest.approx(np.mean([coupled_acceptance(p, q) for p, q in pairs]), abs=1e-5)
    lookup = check_identity(Table(), NgramDrafter(2), [(Shaper(T1), PROMPT)], 1, 0)
    assert lookup is not None
    assert lookup.passed
    assert lookup.acceptance == pytest.approx(row_after(PROMPT.tolist())[3], abs=1e-5)
    assert check_identity(Table(), NgramDrafter(2), [(Shaper(T1), np.array([1, 2, 3]))], 1, 0) is None


def test_identity_notices_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correcting from p itself is off by far more than 1e-6."""
    monkeypatch.setattr(identity, "residual", lambda p, draft, index: p)
    found = identity_of(ModelDrafter(Table(Q_LOGITS), VOCAB))
    assert found.max_error > 1e-3
    assert not found.passed


# comparisons


def test_first_difference() -> None:
    """Of tokens, or where one text is longer."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 0, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [5]) == 0


class Moody(TableScorer):
    """Token 2 gains in rows that are scored in company, as with kernels that choose tiles by the number of rows."""

    change = 0.0

    def forward(self, tokens: np.ndarray, rows: int) -> np.ndarray:
        found = super().forward(tokens, rows)
        if len(tokens) > 1:
            found[:, 2] += self.change
        return found


@pytest.mark.parametrize("change", [0, 0.125])
def test_width_sensitivity(change: float) -> None:
    """Total variation and arg maxes against the rows alone, for each width."""
    target = Moody(Table()._logits, VOCAB)
    target.change = change
    text = np.random.default_rng(1).integers(0, VOCAB, 25)
    alone = np.stack([row_after(text[: i + 1].tolist()) for i in range(25)])
    moved = alone * np.exp(change * (np.arange(VOCAB) == 2))
    moved /= moved.sum(axis=1, keepdims=True)
    for width in measure_widths(target, text, (5, 25)):
        assert width.mean_tv == pytest.approx(np.abs(alone - moved).sum(axis=1).mean() / 2, abs=1e-6)
        assert width.flips == (alone.argmax(axis=1) != moved.argmax(axis=1)).sum()
        assert width.max_change == pytest.approx(change)


def moody_report() -> Report:
    """0 and 1 take turns, half a logit before 2, which wins in company."""
    rows = np.array([[0, 1, 0.5], [1, 0, 0.5], [1, 0, 0]])
    target = Moody(lambda text: rows[text[-1]], 3)
    target.change = 0.6
    subject = Subject("moody", target, None, (np.array([0, 1, 0, 1]),), row_rule="none")
    return Proof(subject, [Setting("greedy", SamplingParams())], drafters=["ngram"], num_draft_tokens=3).run()


def test_near_ties_without_a_row_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A differing text is listed with its margin. Up to twice the change of rows in company it is rounding."""
    report = moody_report()
    (check,) = report.texts
    assert not check.is_exact
    assert check.tolerance == pytest.approx(1.2)
    (difference,) = check.differences
    assert (difference.plain, difference.speculative, difference.margin) == (1, 2, 0.5)
    assert report.passed
    monkeypatch.setattr("edgespec.proof.procedure.WIDTHS", (1,))  # which show no change that would explain it
    assert not moody_report().passed


# the whole, and its report


def proof(verifier: Verifier, samples: int = 400) -> Proof:
    subject = Subject("table", Table(), Table(Q_LOGITS), (PROMPT, PROMPT[1:]))
    settings = [Setting("greedy", SamplingParams()), Setting("T 1", T1)]
    return Proof(subject, settings, drafters=["ngram", "model"], verifier=verifier, budget=1000, max_samples=samples)


def test_coupled_mode_passes_and_is_compared_text_by_text() -> None:
    """Sampled texts too are the same with any drafter."""
    report = proof("coupled").run()
    assert report.passed
    sampled = [check for check in report.texts if check.setting == "T 1"]
    assert [(check.drafter, check.texts, check.differences) for check in sampled] == [
        ("ngram", 2, ()),
        ("model", 2, ()),
    ]


def test_noise_that_follows_rounds_is_not_coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyed by anything but the position, texts part, although their distribution may be right."""
    right = Noise.choose
    starts: Iterator[int] = iter(range(10**9))
    monkeypatch.setattr(Noise, "choose", lambda self, weights, position: right(self, weights, next(starts)))
    report = proof("coupled", 100).run()
    assert not report.passed
    assert all(check.differences for check in report.texts if check.setting == "T 1")


def test_the_report_as_json() -> None:
    """Everything, in plain types."""
    report = proof("standard", 60).run()
    document = json.loads(json.dumps(report.as_dict()))
    assert document["passed"] is True
    assert len(document["identity"]) == 2
    assert len(document["fits"]) == 5 * 3
    assert {fit["kind"] for fit in document["fits"]} >= {"first token", "pairs"}
    assert len(document["widths"]) == 8
    assert len(document["texts"]) == 4
    assert document["detectable_tv"]["all"] < document["detectable_tv"]["one"]


def test_what_could_not_be_tested_is_not_passed() -> None:
    """Too few samples for any test of a setting: the report names it and does not pass."""
    report = proof("standard", 3).run()
    assert report.untested == (("T 1", "ngram"), ("T 1", "model"), ("all", "all"))
    assert not report.passed


def test_p_values_are_corrected_over_all_tests() -> None:
    """Holm over every test that was possible, those of everything together included."""
    good, none = Fit(100, 1.0, 3), Fit()
    bad = Fit(100, 40.0, 3)
    checks = correct_fits(
        {
            ("a", "x", "pairs"): bad,
            ("a", "y", "pairs"): good,
            ("a", "x", "bonus token"): none,
            ("a", "y", "bonus token"): none,
        }
    )
    by_key = {(c.setting, c.drafter, c.kind): c for c in checks}
    assert by_key["a", "x", "pairs"].corrected_p == pytest.approx(3 * bad.p_value)
    assert not by_key["a", "x", "pairs"].passed
    assert by_key["all", "all", "pairs"].fit.df == 6
    assert by_key["a", "x", "bonus token"] == FitCheck("a", "x", "bonus token", none, None, None)


def test_a_hostile_draft_is_corrected() -> None:
    """A draft that never agrees: every first token is a corrected one, and still follows p."""
    target = Table()
    worst = int(row_after(PROMPT.tolist()).argmin())

    class Hostile(NgramDrafter):
        def propose(self, context: np.ndarray, limit: int, *more: object) -> Draft:
            return Draft(np.full(limit, worst))

    loop = SpeculativeDecoder(target, Hostile(1), num_draft_tokens=2, eos_token_ids=(), prefill_chunk=8)
    samples = list(draw_samples(loop, PROMPT, T1, range(800)))
    q = np.eye(VOCAB, dtype=np.float32)[worst]
    fits = fit_samples(samples, Reference(PlainRows(target, PROMPT), Shaper(T1)), q, verifier="standard", seed=0)
    assert fits["corrected token"].samples > 700
    assert all(fit.p_value is None or fit.p_value > 1e-3 for fit in fits.values())
