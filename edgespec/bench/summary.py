"""From trials to figures: per family and setting, and the comparisons that follow. Knows only records.

Speed is that of decoding: seconds per token after the first, whatever the time to the first token, which has a column
of its own. A ratio is taken between two trials of the same prompt and repetition, which were made one after the
other; a prompt's figure is the median over its repetitions, a family's the median over its prompts, and its spread
the quartiles of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median, quantiles
from typing import Any

from edgespec.bench.peers import PEERS
from edgespec.bench.settings import PLAIN
from edgespec.bench.trial import Trial


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One setting on one family.

    Attributes:
        setting, family: which.
        prompts: that gave a rate.
        tokens_per_s: of decoding, median.
        speedup: over plain decoding in sessions of its own.
        over_best_plain: over the plain configuration that was fastest in this family.
        acceptance, tokens_per_pass: over all trials; `None` where nothing was drafted.
        first_token_s: median, and its ratio to that of plain decoding.
        predicted_over_measured: tokens per second that the controller expected over those that came.
        equal, comparable: trials whose text was the plain one, of those where it has to be.
    """

    setting: str
    family: str
    prompts: int
    tokens_per_s: float
    speedup: Spread
    over_best_plain: Spread
    acceptance: float | None
    tokens_per_pass: float | None
    first_token_s: float
    first_token_ratio: float
    predicted_over_measured: float | None
    equal: int
    comparable: int


def is_plain(setting: str) -> bool:
    return setting.split(" ")[0] == PLAIN


def is_fixed(setting: str) -> bool:
    """Whether it is a fixed length of the search, as `ngram-4`."""
    return not is_peer(setting) and setting.rpartition("-")[2].isdigit()


def is_peer(setting: str) -> bool:
    return setting.split(" ")[0] in PEERS


def summarise(trials: Sequence[Trial], default: str) -> dict[str, Any]:
    """The figures of a run, ready for JSON.

    Args:
        trials: all of them.
        default: name of the setting that an engine uses by itself.
    """
    rows = table(trials)
    by_family = {row.family: round(row.speedup.median, 4) for row in rows if row.setting == default}
    over_best = {row.family: round(row.over_best_plain.median, 4) for row in rows if row.setting == default}
    return {
        "default": default,
        "speedup_by_family": by_family,
        "speedup_over_best_plain_by_family": over_best,
        "geometric_mean": round(geometric_mean(by_family.values()), 4) if by_family else None,
        "rows": [asdict(row) for row in rows],
        "accepted_lengths": _lengths(trials),
        "prediction": prediction(trials),
        "search": search(rows, default),
        "over_peers": over_peers(trials, default),
    }


def table(trials: Sequence[Trial]) -> list[Row]:
    """All rows, by family, settings in the order of the run."""
    rows = []
    for family in _unique(t.family for t in trials):
        mine = [t for t in trials if t.family == family]
        best = best_plain(mine)
        if best is None:  # no answer had two tokens: there is nothing to compare
            continue
        rows += [
            _row([t for t in mine if t.setting == setting], mine, best)
            for setting in _unique(t.setting for t in mine)
            if any(t.setting == setting and t.seconds_per_token for t in mine)
        ]
    return rows


def best_plain(trials: Sequence[Trial]) -> str | None:
    """The plain configuration of ours with the least median time per token."""
    times: dict[str, list[float]] = {}
    for trial in trials:
        if is_plain(trial.setting) and trial.seconds_per_token is not None:
            times.setdefault(trial.setting, []).append(trial.seconds_per_token)
    return min(times, key=lambda name: median(times[name])) if times else None


def ratios(trials: Iterable[Trial], base: Iterable[Trial], value: Callable[[Trial], float | None]) -> list[float]:
    """For each prompt the median over its repetitions of `base` over `trials`."""
    others = {(t.family, t.prompt_id, t.repetition): value(t) for t in base}
    found: dict[tuple[str, str], list[float]] = {}
    for trial in trials:
        mine, other = value(trial), others.get((trial.family, trial.prompt_id, trial.repetition))
        if mine and other:
            found.setdefault((trial.family, trial.prompt_id), []).append(other / mine)
    return [median(values) for values in found.values()]


def search(rows: Sequence[Row], default: str) -> dict[str, Any]:
    """For each family the best fixed drafter and length in hindsight, and the controller beside it.

    The best of many noisy figures is too good by about their noise, which the controller is not spared.
    """
    found = {}
    for family in _unique(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        fixed = [row for row in mine if is_fixed(row.setting) or row.setting == PLAIN]
        controller = next((row for row in mine if row.setting == default), None)
        if len(fixed) > 1 and controller is not None:
            best = max(fixed, key=lambda row: row.speedup.median)
            found[family] = {
                "best_fixed": best.setting,
                "best_fixed_speedup": best.speedup.median,
                "controller_speedup": controller.speedup.median,
                "controller_over_best_fixed": controller.speedup.median / best.speedup.median,
            }
    return found


def prediction(trials: Sequence[Trial]) -> dict[str, Any]:
    """How well the controller knew what would come: per setting the sum of both, and the spread by trial."""
    found = {}
    for setting in _unique(t.setting for t in trials):
        pairs = _pairs([t for t in trials if t.setting == setting])
        if pairs:
            errors = [predicted / measured for predicted, measured in pairs]
            found[setting] = {"trials": len(pairs)} | asdict(spread(errors))
    return found


def over_peers(trials: Sequence[Trial], default: str) -> dict[str, Any]:
    """Peer's setting -> family -> tokens per second of the default drafter over the peer's."""
    mine = [t for t in trials if t.setting == default]
    found: dict[str, dict[str, float]] = {}
    for setting in _unique(t.setting for t in trials if is_peer(t.setting)):
        for family in _unique(t.family for t in mine):
            ours, theirs = ([t for t in side if t.family == family] for side in (mine, trials))
            values = ratios(ours, [t for t in theirs if t.setting == setting], _time)
            if values:
                found.setdefault(setting, {})[family] = median(values)
    return found


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def _row(mine: Sequence[Trial], family: Sequence[Trial], best: str) -> Row:
    plain, fastest = ([t for t in family if t.setting == name] for name in (PLAIN, best))
    speeds = ratios(mine, plain, _time)
    drafted = sum(t.drafted or 0 for t in mine)
    passes = sum(t.target_passes or 0 for t in mine)
    pairs = _pairs(mine)
    comparable = [t for t in mine if t.equal != "not comparable"]
    return Row(
        mine[0].setting,
        mine[0].family,
        len(speeds),
        median(1 / s for s in map(_time, mine) if s),
        spread(speeds),
        spread(ratios(mine, fastest, _time)),
        sum(t.accepted or 0 for t in mine) / drafted if drafted else None,
        sum(t.new_tokens for t in mine) / passes if passes else None,
        median(t.first_token_s for t in mine),
        1 / median(ratios(mine, plain, lambda t: t.first_token_s)),
        median(p / m for p, m in pairs) if pairs else None,
        sum(t.equal is True for t in comparable),
        len(comparable),
    )


def _pairs(trials: Sequence[Trial]) -> list[tuple[float, float]]:
    """Predicted and measured tokens per second, where there are both."""
    both = [(t.predicted_tokens_per_s, t.tokens_per_s) for t in trials]
    return [(p, m) for p, m in both if p is not None and m is not None]


def _lengths(trials: Sequence[Trial]) -> Mapping[str, list[int]]:
    """Setting -> rounds with 0, 1, 2, ... accepted tokens, of those that drafted."""
    found: dict[str, list[int]] = {}
    for trial in trials:
        line = found.setdefault(trial.setting, [])
        line += [0] * (len(trial.accepted_lengths) - len(line))
        for length, count in enumerate(trial.accepted_lengths):
            line[length] += count
    return {setting: line for setting, line in found.items() if line}


def _time(trial: Trial) -> float | None:
    return trial.seconds_per_token


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
