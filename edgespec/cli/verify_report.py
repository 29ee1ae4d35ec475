"""The report of `edgespec verify` as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from edgespec.cli import tables, terminal
from edgespec.proof import Report
from edgespec.proof.laws import KINDS, Kind
from edgespec.proof.report import EVERYTHING, LEVEL, POWER, FitCheck, TextCheck

_SHORT: dict[Kind, str] = {
    "first token": "first",
    "corrected token": "corrected",
    "after a rejection": "next",
    "bonus token": "bonus",
    "pairs": "pairs",
}


def write_report(report: Report) -> None:
    """All tables, and the verdict last."""
    rule = "no rule: rows depend on the call" if report.row_rule == "none" else f"rows per call: {report.row_rule}"
    terminal.write(
        f"{report.bundle}: {report.verifier} rule, {report.num_draft_tokens} draft tokens a round, {rule}\n\n"
    )
    _write_widths(report)
    _write_identities(report)
    _write_texts(report)
    _write_fits(report)
    terminal.write("\n".join(_verdict(report)) + "\n")


def _write_widths(report: Report) -> None:
    rows = [
        [str(w.width), str(w.rows), f"{w.mean_tv:.4f}", f"{w.max_tv:.4f}", str(w.flips), f"{w.max_change:.3f}"]
        for w in report.widths
    ]
    headers = ("rows a call", "rows", "mean TV", "largest TV", "other arg max", "largest change of lead")
    _write("Rows of logits in company, against the same rows alone (a measurement, not a test)", headers, rows)


def _write_identities(report: Report) -> None:
    rows = [
        [
            check.setting,
            check.drafter,
            str(check.result.rows),
            f"{check.result.max_error:.1e}",
            f"{check.result.acceptance:.3f}",
            f"{check.result.coupled_acceptance:.3f}",
            _result(check.passed),
        ]
        for check in report.identities
    ]
    headers = ("setting", "drafter", "rows", "largest error", "acceptance", "if coupled", "")
    _write("Accepted and corrected together against the target's distribution, calculated", headers, rows)


def _write_texts(report: Report) -> None:
    rows = [
        [
            check.setting,
            check.drafter,
            "exact" if check.is_exact else "fast",
            str(check.texts),
            str(check.tokens),
            str(len(check.differences)),
            _largest_margin(check),
            _result(check.passed),
        ]
        for check in report.texts
    ]
    headers = ("setting", "drafter", "mode", "texts", "tokens", "differing texts", "largest margin", "")
    _write("Texts with drafts against texts without", headers, rows)
    for check in report.texts:
        for d in check.differences:
            margin = "" if d.margin is None else f", margin {d.margin:.4f} (up to {check.tolerance:.4f} is rounding)"
            mode = "exact" if check.is_exact else "fast"
            where = f"{check.setting}, {check.drafter}, {mode}: text {d.prompt + 1}, token {d.position + 1}"
            terminal.write(f"  {where}: {d.speculative} instead of {d.plain}{margin}\n")
    terminal.write("\n")


def _largest_margin(check: TextCheck) -> str:
    margins = [d.margin for d in check.differences if d.margin is not None]
    return f"{max(margins):.4f}" if margins else "-"


def _write_fits(report: Report) -> None:
    cases = dict.fromkeys((check.setting, check.drafter) for check in report.fits)
    rows = []
    for case in cases:
        checks = {check.kind: check for check in report.fits if (check.setting, check.drafter) == case}
        power = checks["first token"].detectable_tv
        samples = str(checks["first token"].fit.samples or "-")
        cells = [_p_value(checks[kind]) for kind in _SHORT]
        passed = all(check.passed for check in checks.values()) and case not in report.untested
        rows.append([*case, samples, *cells, "-" if power is None else f"{power:.3f}", _result(passed)])
    headers = ("setting", "drafter", "samples", *_SHORT.values(), "finds TV", "")
    _write("What the loop emits against the exact distributions: p-values, not yet corrected", headers, rows)
    if rows:
        terminal.write(
            "  first token; corrected, in place of a rejected one; the next after that; the bonus behind a draft that\n"
            "  was accepted whole; pairs of first tokens. -: too few samples, or nothing was left to chance\n\n"
        )


def _p_value(check: FitCheck) -> str:
    p = check.fit.p_value
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _result(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _write(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        tables.write_table(headers, rows, title)
        terminal.write("\n")


def _verdict(report: Report) -> Iterator[str]:
    one, everything = report.detectable_tv(), report.detectable_tv(EVERYTHING)
    if one is not None:
        yield (
            f"Power: a distortion of the first token's distribution of TV >= {one:.3f} in any one row of the table"
            + (f", or of TV >= {everything:.3f} in all of them," if everything is not None else "")
            + f" would have been found with {POWER:.0%}."
        )
    if report.rows_rechecked:
        yield (
            f"Cache: {report.rows_rechecked} rows were scored again after rewinding, {report.rows_changed} came out "
            "different."
        )
    tested = [check.corrected_p for check in report.fits if check.corrected_p is not None]
    if tested:
        yield f"Smallest of {len(tested)} p-values, corrected for their number (Holm): {min(tested):.2g}."
    for setting, drafter in report.untested:
        yield f"Not tested, too few samples: {setting}, {drafter}. Give it more --budget."
    if report.passed:
        yield f"PASSED in {report.seconds:.0f} s. A pair that is right fails one run in {1 / LEVEL:.0f}."
    else:
        yield f"FAILED in {report.seconds:.0f} s: " + "; ".join(_failures(report)) + "."


def _failures(report: Report) -> Iterator[str]:
    if not report.rows_are_stable:
        yield "rows of logits change when the cache is rewound"
    for identity in report.identities:
        if not identity.passed:
            yield f"identity ({identity.setting}, {identity.drafter})"
    for text in report.texts:
        if not text.passed:
            yield f"texts ({text.setting}, {text.drafter}, {'exact' if text.is_exact else 'fast'} mode)"
    for fit in report.fits:
        if not fit.passed:
            yield f"{fit.kind} ({fit.setting}, {fit.drafter}, corrected p {fit.corrected_p:.1g})"
    if report.untested:
        yield "there was no time to test everything: give it more (--budget)"


def draw(report: Report, path: Path) -> None:
    """p-values against what chance would give, and observed against expected counts.

    Raises:
        ConfigError: the file's name does not end like a picture's.
    """
    single = [check for check in report.fits if check.setting != EVERYTHING]
    p_values = sorted(p for check in single if (p := check.fit.p_value) is not None)
    with tables.figure(path, 9, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        if p_values:
            uniform = (np.arange(len(p_values)) + 0.5) / len(p_values)
            left.loglog(uniform, np.maximum(p_values, 1e-20), "o", markersize=4)
            left.loglog(uniform, uniform, color="grey", linewidth=0.8)
            left.axhline(LEVEL / len(p_values), color="tab:red", linewidth=0.8)
        left.set(title="p-values of the tests", xlabel="expected by chance", ylabel="found (red: fails)")
        for kind in KINDS:
            fits = [check.fit for check in single if check.kind == kind]
            expected = np.concatenate([np.empty(0), *(fit.expected for fit in fits)])
            observed = np.concatenate([np.empty(0), *(fit.observed for fit in fits)])
            right.plot(expected, (observed - expected) / np.sqrt(expected), ".", markersize=4, label=kind)
        right.axhspan(-3, 3, color="grey", alpha=0.15)
        right.set(xscale="log", title="counts", xlabel="expected", ylabel="(observed - expected) / sqrt(expected)")
        right.legend(fontsize="x-small")
