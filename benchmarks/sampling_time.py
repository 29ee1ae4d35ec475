"""Time to shape the rows of one verification, on one core.

    python benchmarks/sampling_time.py [--output FILE]

Flat and peaked rows from a fixed seed, at several settings; copying the rows that each call overwrites is not
counted. No speeds are compared here, so there is no equality result.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from common import write_jsonl

from edgespec.params import SamplingParams
from edgespec.shaper import Shaper

NUM_ROWS = 5
SETTINGS = [
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 1, "typical_p": 0.95},
    {"temperature": 1},
    {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3},
]


def row_sets(vocab: int) -> dict[str, np.ndarray]:
    """`peaked` has the entropy of a language model's rows, about 3 nats; `flat` has nearly all of the vocabulary."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((NUM_ROWS, vocab)).astype(np.float32)
    ranks = rng.permuted(np.tile(np.arange(1, vocab + 1), (NUM_ROWS, 1)), axis=1)
    return {"peaked": (-1.6 * np.log(ranks) + 0.3 * normal).astype(np.float32), "flat": normal}


def measure(rows: np.ndarray, settings: dict[str, Any], repeats: int) -> list[float]:
    """Seconds of each call, without the copy."""
    rng = np.random.default_rng(1)
    context, drafted = rng.integers(0, rows.shape[1], 500), rng.integers(0, rows.shape[1], NUM_ROWS - 1)
    shaper = Shaper(SamplingParams(**settings), context[:300])
    change = shaper.adjust if shaper.is_greedy else shaper.shape
    buffer, seconds = rows.copy(), []
    for _ in range(repeats):
        np.copyto(buffer, rows)
        started = time.perf_counter()
        change(buffer, context, drafted)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for vocab in (49_152, 151_936):
        for name, rows in row_sets(vocab).items():
            for settings in SETTINGS:
                seconds = measure(rows, settings, options.repeats)
                row = {
                    "vocab": vocab,
                    "rows": NUM_ROWS,
                    "kind": name,
                    **settings,
                    "median_ms": round(median(seconds) * 1e3, 3),
                    "p90_ms": round(quantiles(seconds, n=10)[-1] * 1e3, 3),
                }
                results.append(row)
                print(row, flush=True)
    if options.output:
        write_jsonl(options.output, results)


if __name__ == "__main__":
    main()
