"""Decoding speed of a bundle with each drafter over plain decoding, interleaved prompt by prompt.

    python benchmarks/pair_speed.py BUNDLE --prompts FOLDER --drafters none model ngram

The ratio of a prompt is between medians of its repetitions. Each row says whether the text was equal to the plain
one. `decode` excludes the time to the first token; `whole` includes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from common import FAMILIES, read_prompts, write_jsonl

import edgespec
from edgespec import Engine, RuntimeParams, SamplingParams, SpecParams


def measure(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Any]:
    # Another conversation first, so that the prompt is read anew each time.
    engine.generate("\n", SamplingParams(max_new_tokens=1)).text()
    stream = engine.chat([{"role": "user", "content": prompt}], params)
    stream.text()
    stats = stream.stats
    return {
        "tokens": stream.token_ids,
        "decode_s": stats.decode_s / max(stats.new_tokens - 1, 1),
        "whole_s": (stats.prefill_s + stats.decode_s) / stats.new_tokens,
        "first_s": stats.prefill_s,
        "acceptance": stats.acceptance,
        "tokens_per_pass": stats.tokens_per_pass,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--drafters", nargs="+", default=["none", "model"])
    parser.add_argument("--num-draft-tokens", type=int, help="a fixed number instead of what pays")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spinning", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runtime = RuntimeParams(threads=options.threads, spinning=options.spinning, exact=options.exact)
    params = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, seed=1, max_new_tokens=options.max_new_tokens
    )
    engines = {
        name: edgespec.load(
            options.bundle,
            spec=SpecParams(drafter=name, num_draft_tokens=options.num_draft_tokens),
            runtime=runtime,
        )
        for name in options.drafters
    }
    rows: list[dict[str, Any]] = []
    for family, prompt in read_prompts(options.prompts, options.per_family, options.families):
        trials: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for turn in range(options.repetitions):
            for name in sorted(engines, reverse=bool(turn % 2)):
                trials[name].append(measure(engines[name], prompt, params))
        rows += [summary(family, name, trials[name], trials[options.drafters[0]]) for name in engines]
        print(*rows[-len(engines) :], sep="\n", flush=True)
    report(rows, options.drafters)
    if options.output:
        write_jsonl(options.output, rows)


def summary(family: str, name: str, trials: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    def ratio(key: str) -> float:
        return round(median(t[key] for t in base) / median(t[key] for t in trials), 3)

    return {
        "family": family,
        "drafter": name,
        "tokens_per_s": round(1 / median(t["decode_s"] for t in trials), 1),
        "decode_ratio": ratio("decode_s"),
        "whole_ratio": ratio("whole_s"),
        "first_token_ratio": ratio("first_s"),
        "acceptance": trials[0]["acceptance"],
        "tokens_per_pass": trials[0]["tokens_per_pass"],
        "equal_to_first": trials[0]["tokens"] == base[0]["tokens"],
        "trials_ms_per_token": [round(t["decode_s"] * 1e3, 3) for t in trials],
    }


def report(rows: list[dict[str, Any]], drafters: list[str]) -> None:
    for name in drafters:
        mine = [r for r in rows if r["drafter"] == name]
        families = sorted({r["family"] for r in mine})
        by_family = {f: round(median(r["decode_ratio"] for r in mine if r["family"] == f), 2) for f in families}
        print(
            f"{name}: decode x{geometric_mean(r['decode_ratio'] for r in mine):.2f} "
            f"whole x{geometric_mean(r['whole_ratio'] for r in mine):.2f} "
            f"equal {sum(r['equal_to_first'] for r in mine)} of {len(mine)}; by family {by_family}"
        )


if __name__ == "__main__":
    main()
