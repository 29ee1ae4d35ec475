"""What the benchmarks share: prompts, machine record, interleaving, result files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

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
    prompts = []
    for family in families:
        lines = (folder / f"{family}.jsonl").read_text(encoding="utf-8").splitlines()[:per_family]
        for item in map(json.loads, lines):
            prompts.append((family, item["prompt"] if "prompt" in item else item["turns"][0]))
    return prompts


def machine() -> dict[str, Any]:
    """Versions and hardware, to be stored with every result."""
    packages = ("edgespec", "onnxruntime", "onnxruntime-gpu", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


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
        for row in [{"machine": machine()}, *rows]:
            file.write(json.dumps(row) + "\n")
