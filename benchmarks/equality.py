"""Is speculative greedy text equal to plain greedy text, token for token?

    python benchmarks/equality.py BUNDLE --prompts FOLDER --per-family 4 --drafter ngram [--exact]

Both run on the same target session. Where texts part, the margin between the two best logits of the plain path at
the first difference is printed: a near-tie flips by rounding, a wide margin would be an error.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import FAMILIES, read_prompts, write_jsonl

import edgespec
from edgespec import Engine, RuntimeParams, SamplingParams, SpecParams
from edgespec.bench.run import best_two, encode


def answer(engine: Engine, prompt: str, params: SamplingParams) -> tuple[list[int], Any]:
    stream = engine.chat([{"role": "user", "content": prompt}], params)
    stream.text()
    return stream.token_ids, stream.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--drafter", choices=["model", "ngram"], required=True)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runtime = RuntimeParams(exact=options.exact, threads=options.threads, spinning="off")
    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    spec = SpecParams(drafter=options.drafter, num_draft_tokens=options.num_draft_tokens)
    speculative = edgespec.load(options.bundle, spec=spec, runtime=runtime)
    plain = edgespec.load(options.bundle, spec=SpecParams(drafter="none"), runtime=runtime)
    rows, started = [], time.time()
    for family, prompt in read_prompts(options.prompts, options.per_family, options.families):
        expected, _ = answer(plain, prompt, params)
        tokens, stats = answer(speculative, prompt, params)
        row = {"family": family, "equal": tokens == expected, "tokens": len(expected)}
        row |= {"drafted": stats.drafted, "accepted": stats.accepted, "passes": stats.target_passes}
        if tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip([*tokens, -1], [*expected, -1], strict=False)) if a != b)
            margin, _ = best_two(plain, [*encode(plain, prompt), *expected[:at]], params)
            row |= {"first_difference": at, "margin": round(margin, 4)}
        rows.append(row)
        print(row, flush=True)
    different = [r for r in rows if not r["equal"]]
    print(
        f"{options.bundle} drafter={options.drafter} exact={options.exact} rule={speculative.row_rule}: "
        f"{len(different)} of {len(rows)} differ; margins {sorted(r['margin'] for r in different)}; "
        f"accepted {sum(r['accepted'] for r in rows)} of {sum(r['drafted'] for r in rows)}; "
        f"{time.time() - started:.0f} s"
    )
    if options.output:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
