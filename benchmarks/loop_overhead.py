"""Time per round that the loop spends outside ONNX Runtime.

    python benchmarks/loop_overhead.py BUNDLE

The calls of both sessions are timed and subtracted from the time of a round. Rounds with fewer than
`--num-draft-tokens` drafted tokens are left out. No speeds are compared here, so there is no equality result.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from common import write_jsonl

import edgespec
from edgespec import Engine, GenerationStats, RequestParams, RuntimeParams, SamplingParams, SpecParams

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


class Stopwatch:
    """Sums the seconds inside `run_with_iobinding` of every session."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        for session in engine._sessions:
            session.session = _Timed(session.session, self)


class _Timed:
    def __init__(self, session: Any, watch: Stopwatch) -> None:
        self._session, self._watch = session, watch

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        started = time.perf_counter()
        self._session.run_with_iobinding(binding, options)
        self._watch.seconds += time.perf_counter() - started


def rounds(engine: Engine, params: SamplingParams, num_draft_tokens: int) -> list[float]:
    """Seconds outside the sessions of every full round."""
    watch = Stopwatch(engine)
    prompt = engine.prompts.from_messages([{"role": "user", "content": PROMPT}], params, RequestParams()).tokens
    outside = []
    steps = engine._decoder.generate(prompt, params, GenerationStats())
    while True:
        watch.seconds, started = 0.0, time.perf_counter()
        step = next(steps, None)
        if step is None:
            return outside
        if step.drafted == num_draft_tokens:
            outside.append(time.perf_counter() - started - watch.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "model"])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for drafter in options.drafters:
        for temperature, top_p in ((0.0, 1.0), (0.8, 0.95)):
            spec = SpecParams(drafter=drafter, num_draft_tokens=options.num_draft_tokens)
            runtime = RuntimeParams(threads=options.threads, spinning="off")
            engine = edgespec.load(options.bundle, spec=spec, runtime=runtime)
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=3, max_new_tokens=256, ignore_eos=True)
            seconds = rounds(engine, params, options.num_draft_tokens)
            row = {
                "drafter": drafter,
                "temperature": temperature,
                "top_p": top_p,
                "rows": options.num_draft_tokens + 1,
                "vocab": engine.bundle.manifest.target.vocab_size,
                "draft_columns": engine._sessions[1].vocab_size if drafter == "model" else None,
                "rounds": len(seconds),
                "median_ms": round(median(seconds) * 1e3, 3),
                "p90_ms": round(quantiles(seconds, n=10)[-1] * 1e3, 3),
            }
            results.append(row)
            print(row, flush=True)
    if options.output:
        write_jsonl(options.output, results)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
