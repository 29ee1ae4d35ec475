"""What the benchmarks share: prompts, machine record, interleaving, result files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from edgespec import bench
from edgespec.bench.journal import Run
from edgespec.bench.machine import machine

FAMILIES = (
    "mt_bench",
    "qa",
    "math_reasoning",
    "gsm8k",
    "humaneval",
    "translation",
    "rag",
    "summarization",
    "summary_quotes",
    "code_edit",
)


def read_prompts(folder: Path, per_family: int, families: Iterable[str] = FAMILIES) -> list[tuple[str, str]]:
    """`(family, prompt)`, the first `per_family` of each family; of a conversation its first turn."""
    return [(p.family, p.text) for family in families for p in bench.read_prompts(folder, [family], per_family)]


def interleave(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, A B C A B C, after one warm-up round; the order turns by one each round."""
    names = list(runs)
    for name in names:
        runs[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return times


def paired_ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b of the same round: slow spells of the machine hit both."""
    return median(x / y for x, y in zip(a, b, strict=True))


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, the machine in the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in [{"machine": machine() | {"date": time.strftime("%Y-%m-%d")}}, *rows]:
            file.write(json.dumps(row) + "\n")


def document(run: Run) -> dict[str, Any]:
    """The figures of a file that `edgespec bench` wrote."""
    default = "chain" if any(trial.setting == "chain" for trial in run.trials) else "ngram"
    trials = [trial.as_dict() for trial in run.trials]
    return bench.summarise(run.trials, default) | {"trials": trials, "costs": run.costs}


def first_line(path: Path) -> dict[str, Any]:
    """What a file of results begins with: a trial with its `kind`, or the machine."""
    with path.open(encoding="utf-8") as file:
        line: dict[str, Any] = json.loads(file.readline())
    return line
