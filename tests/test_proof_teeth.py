"""The losslessness test finds what it says it finds: right code passes, twelve wrong ways are caught."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.params import SamplingParams
from edgespec.proof import Proof, Report, Setting, Subject
from edgespec.testing import TableScorer
from tests.proof_faults import FAULTS, Fault

VOCAB = 6
SEEDS = range(3)
PARAMS = SamplingParams(temperature=0.9, presence_penalty=2)
# The settings and the samples that a fault needs to show, where they are not the usual ones.
CUT = SamplingParams(temperature=0.5, top_k=4, min_p=0.02)
RNG = np.random.default_rng(5)
P_LOGITS = RNG.normal(0, 1, (VOCAB, VOCAB)) + 2 * np.eye(VOCAB)
Q_LOGITS = P_LOGITS + RNG.normal(0, 1.2, (VOCAB, VOCAB))
INNER_LOGITS = Q_LOGITS + RNG.normal(0, 1.2, (VOCAB, VOCAB))


def model(logits: np.ndarray) -> TableScorer:
    """Rows that depend on the last token, and on the one before it and the length, so that a stale cache shows."""
    return TableScorer(lambda text: logits[text[-1]] + np.roll(logits[text[-2:][0]], len(text)) / 2, VOCAB)


def prove(seed: int, params: SamplingParams = PARAMS, max_samples: int = 400) -> Report:
    prompts = (np.array([1, 2, 3, 1, 2]), np.array([4, 0, 4]))
    subject = Subject("table", model(P_LOGITS), model(Q_LOGITS), prompts, inner=model(INNER_LOGITS))
    return Proof(
        subject,
        [Setting("sampled", params)],
        drafters=["model"],
        num_draft_tokens=3,
        budget=1000,
        seed=seed,
        max_samples=max_samples,
    ).run()


@pytest.mark.parametrize("seed", range(6))
def test_right_code_passes(seed: int) -> None:
    """The same procedure, and twice the seeds that catch every fault: all parts pass, and the power is stated."""
    report = prove(seed)
    assert report.passed
    assert len(report.identities) == 1
    assert len(report.fits) == 5
    assert report.rows_rechecked > 10
    assert report.rows_changed == 0
    assert 0.05 < report.detectable_tv() < 0.2


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_wrong_code_is_caught(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every seed, by the statistics alone; and the distortion is as large as is promised to be found."""
    fault(monkeypatch)
    name = request.node.callspec.id
    params = CUT if "unfiltered" in name else PARAMS
    reports = [prove(seed, params, max_samples=1500 if "one random number" in name else 400) for seed in SEEDS]
    assert all(any(not fit.passed for fit in report.fits) for report in reports)
    assert not any(report.passed for report in reports)
    # Smaller than what is promised to be found, and found all the same.
    assert has_promised_size(reports) or name == "the numbers of the round inside it"


def has_promised_size(reports: Sequence[Report]) -> bool:
    """Whether some test is farther off, on average, than the total variation found in 99 of 100 runs.

    The statistic of a wrong law is on average its degrees of freedom plus 4 n tv^2 or more.
    """
    for checks in zip(*(report.fits for report in reports), strict=True):
        fits = [check.fit for check in checks]
        if all(fit.df for fit in fits):
            excess = np.mean([fit.statistic - fit.df for fit in fits])
            promised = np.mean([4 * check.fit.samples * check.detectable_tv**2 for check in checks])
            if excess >= promised:
                return True
    return False
