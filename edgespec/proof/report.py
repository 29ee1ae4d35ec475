"""What the losslessness test found, ready for a table or for JSON. Knows nothing of how it is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec.params import RowInvariance, Verifier
from edgespec.proof import chi2
from edgespec.proof.differences import Difference, Width
from edgespec.proof.fit import Fit, holm
from edgespec.proof.identity import Identity
from edgespec.proof.laws import KINDS, Kind

LEVEL = 0.001  # a pair that is right fails one run in so many, all tests together
POWER = 0.99
EVERYTHING = "all"  # instead of a setting or a drafter: all of them together


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """Accept route + reject route against p, for one setting and drafter."""

    setting: str
    drafter: str
    result: Identity

    @property
    def passed(self) -> bool:
        return self.result.passed


@dataclass(frozen=True, slots=True)
class FitCheck:
    """One goodness-of-fit test: a kind of token for one setting and drafter, over several prompts.

    Attributes:
        corrected_p: p-value after Holm's correction over all tests of the run; `None` where too few samples were of
            this kind.
        detectable_tv: a total variation that the test finds with probability `POWER`, Bonferroni's correction
            included; `None` likewise.
    """

    setting: str
    drafter: str
    kind: Kind
    fit: Fit
    corrected_p: float | None
    detectable_tv: float | None

    @property
    def passed(self) -> bool:
        return self.corrected_p is None or self.corrected_p >= LEVEL


@dataclass(frozen=True, slots=True)
class TextCheck:
    """Texts with a drafter against plain ones, token by token.

    Attributes:
        setting: greedy, or a sampled one in coupled mode, where texts are comparable too.
        drafter: whose drafts were checked.
        is_exact: the row rule was in force.
        texts, tokens: compared.
        differences: the first of each text that differs.
        tolerance: without the rule, near-ties may flip: margins up to this are put down to rounding.
    """

    setting: str
    drafter: str
    is_exact: bool
    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def passed(self) -> bool:
        return all(d.margin is not None and d.margin <= self.tolerance for d in self.differences)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found.

    Attributes:
        bundle: its name.
        verifier: the rule that was tested.
        num_draft_tokens: drafted a round.
        seed: of the samples.
        row_rule: in force during the statistical tests, as measured on this machine.
        seconds: taken.
        identities, fits, texts, widths: the checks (a), (b), (c) and the measurement (d).
        rows_rechecked, rows_changed: rows that were scored twice, and those of them that changed.
        samples_per_s: rounds of the loop that a second bought.
    """

    bundle: str
    verifier: Verifier
    num_draft_tokens: int
    seed: int
    row_rule: RowInvariance
    seconds: float
    identities: tuple[IdentityCheck, ...] = ()
    fits: tuple[FitCheck, ...] = ()
    texts: tuple[TextCheck, ...] = ()
    widths: tuple[Width, ...] = ()
    rows_rechecked: int = 0
    rows_changed: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def rows_are_stable(self) -> bool:
        """Rows that were scored twice are the same, where the row rule says that they must be."""
        return self.rows_changed == 0 or self.row_rule == "none"

    @property
    def passed(self) -> bool:
        checks: list[IdentityCheck | FitCheck | TextCheck] = [*self.identities, *self.fits, *self.texts]
        return self.rows_are_stable and all(check.passed for check in checks) and not self.untested

    @property
    def untested(self) -> tuple[tuple[str, str], ...]:
        """Settings and drafters of which no test had enough samples."""
        cases = dict.fromkeys((f.setting, f.drafter) for f in self.fits)
        tested = {(f.setting, f.drafter) for f in self.fits if f.corrected_p is not None}
        return tuple(case for case in cases if case not in tested)

    def detectable_tv(self, setting: str | None = None) -> float | None:
        """The distortion of first tokens that would have been found with probability `POWER`.

        Args:
            setting: `EVERYTHING` for one that all settings and drafters have, `None` for one in any single one.
        """
        found = [
            f.detectable_tv
            for f in self.fits
            if f.kind == "first token"
            and f.detectable_tv is not None
            and (f.setting == EVERYTHING) == (setting == EVERYTHING)
        ]
        return max(found, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bundle": self.bundle,
            "passed": self.passed,
            "verifier": self.verifier,
            "num_draft_tokens": self.num_draft_tokens,
            "seed": self.seed,
            "row_rule": self.row_rule,
            "seconds": round(self.seconds, 2),
            "level": LEVEL,
            "power": POWER,
            "detectable_tv": {"one": self.detectable_tv(), "all": self.detectable_tv(EVERYTHING)},
            "identity": [_named(c.setting, c.drafter, c.passed) | asdict(c.result) for c in self.identities],
            "fits": [_fit(check) for check in self.fits],
            "texts": [asdict(check) | {"passed": check.passed} for check in self.texts],
            "widths": [asdict(width) for width in self.widths],
            "rows_rechecked": self.rows_rechecked,
            "rows_changed": self.rows_changed,
            "notes": list(self.notes),
        }


def _named(setting: str, drafter: str, passed: bool) -> dict[str, Any]:
    return {"setting": setting, "drafter": drafter, "passed": passed}


def _fit(check: FitCheck) -> dict[str, Any]:
    fit = check.fit
    return _named(check.setting, check.drafter, check.passed) | {
        "kind": check.kind,
        "samples": fit.samples,
        "df": fit.df,
        "statistic": fit.statistic,
        "p_value": fit.p_value,
        "corrected_p": check.corrected_p,
        "distance": fit.distance,
        "detectable_tv": check.detectable_tv,
    }


def correct_fits(found: Mapping[tuple[str, str, Kind], Fit]) -> list[FitCheck]:
    """Correct for the number of tests, those of all settings and drafters together included.

    Args:
        found: by setting, drafter and kind.
    """
    fits = dict(found)
    for kind in KINDS:
        parts = [fit for (_, _, of_kind), fit in found.items() if of_kind == kind]
        if len(parts) > 1:
            fits[EVERYTHING, EVERYTHING, kind] = sum(parts, Fit())
    p_values = {key: p for key, fit in fits.items() if (p := fit.p_value) is not None}
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        FitCheck(*key, fit, corrected.get(key), _detectable(fit, len(p_values)) if key in corrected else None)
        for key, fit in fits.items()
    ]


def _detectable(fit: Fit, num_tests: int) -> float:
    return chi2.detectable_tv(fit.samples, fit.df, LEVEL / num_tests, POWER)
