"""Exact mode, tried hard: bit-identical greedy answers whatever drafts, however the work is cut up.

    python benchmarks/exactness.py BUNDLE --prompts FOLDER

Every prompt is answered plainly, then by one of several engines that differ in drafter, depth policy, prefill chunk
and thread count, after an answer that is cancelled midway. Compared are the tokens and, to the last bit, the
log-probability of each, which depends on the whole row of logits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import FAMILIES, read_prompts, write_jsonl

import edgespec
from edgespec import Engine, RuntimeParams, SamplingParams, SpecParams

VARIANTS: dict[str, tuple[SpecParams, dict[str, Any]]] = {
    "chain, adaptive": (SpecParams(), {"threads": 2}),
    "lookup, 7 tokens, 1 thread, chunks of 64": (
        SpecParams(drafter="ngram", num_draft_tokens=7),
        {"threads": 1, "prefill_chunk": 64},
    ),
    "model, 4 tokens, chunks of 130": (
        SpecParams(drafter="model", num_draft_tokens=4),
        {"threads": 2, "prefill_chunk": 130},
    ),
}


def answer(engine: Engine, prompt: str, params: SamplingParams, pieces: int | None = None) -> list[tuple[int, float]]:
    """Token ids with their log-probabilities; cancelled after so many pieces, if any."""
    stream = engine.chat([{"role": "user", "content": prompt}], params)
    for count, _ in enumerate(stream, 1):
        if count == pieces:
            stream.cancel()
    return [(entry.token, entry.logprob) for entry in stream.logprobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    params = SamplingParams(max_new_tokens=options.max_new_tokens, logprobs=0)
    plain = edgespec.load(options.bundle, spec=SpecParams(drafter="none"), runtime=RuntimeParams(exact=True, threads=2))
    engines = {
        name: edgespec.load(options.bundle, spec=spec, runtime=RuntimeParams(exact=True, **runtime))
        for name, (spec, runtime) in VARIANTS.items()
    }
    rows, started = [], time.time()
    for i, (family, prompt) in enumerate(read_prompts(options.prompts, options.per_family, options.families)):
        name = list(engines)[i % len(engines)]
        expected = answer(plain, prompt, params)
        answer(engines[name], prompt, params, pieces=i % 7 + 1)
        got = answer(engines[name], prompt, params)
        same_tokens = [t for t, _ in got] == [t for t, _ in expected]
        row = {"family": family, "variant": name, "tokens": len(expected)}
        gap = max((abs(a[1] - b[1]) for a, b in zip(got, expected, strict=False)), default=0.0)
        result = {"equal_tokens": same_tokens, "equal_to_the_last_bit": got == expected, "largest_gap": gap}
        rows.append(row | result)
        print(len(rows), rows[-1], f"{time.time() - started:.0f} s", flush=True)
    different = [r for r in rows if not r["equal_to_the_last_bit"]]
    print(f"{options.bundle} rule {plain.row_rule}: {len(different)} of {len(rows)} differ")
    if options.output:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
