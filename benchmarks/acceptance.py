"""How much of what a drafter proposes is accepted: by family, depth and temperature.

    python benchmarks/acceptance.py BUNDLE --prompts FOLDER [--per-family 8] [--texts WORK/data] [--output FILE.jsonl]

Four tokens are drafted in every round. Depth d is the share of rounds that had it accepted of those that got there; a
lookup that proposes nothing at all has its first one rejected. With `--texts`, the texts of a distillation, a table of
bigrams drafts as well.
Speed is not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import FAMILIES, read_prompts, write_jsonl

import edgespec
from edgespec import Engine, SamplingParams, SpecParams
from edgespec.bench.recorder import Recorder
from edgespec.contracts import Drafter
from edgespec.verify import Draft

DEPTH = 4


class Bigrams(Drafter):
    """The most frequent successor of each token in some texts."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.after = np.full(vocab_size, -1)
        rows = [np.load(file)["tokens"] for file in sorted(folder.glob("written-*.npz"))[1:]]
        pairs = np.concatenate([np.stack([r[:, :-1].ravel(), r[:, 1:].ravel()], 1) for r in rows])
        found, counts = np.unique(pairs, axis=0, return_counts=True)
        for first, second in found[np.argsort(counts, kind="stable")]:
            self.after[first] = second

    def propose(self, context: Any, limit: int, *_: Any) -> Draft:
        token = self.after[context[-1]]
        return Draft(np.array([token] if token >= 0 else [], np.int64), None)


def by_depth(rounds: Sequence[Any]) -> list[float]:
    """Acceptance at each depth, given that all before were accepted."""
    found = []
    for depth in range(1, DEPTH + 1):
        tried = [r for r in rounds if r.accepted >= depth - 1 and (r.drafted >= depth or not r.drafted)]
        found.append(round(sum(r.accepted >= depth for r in tried) / len(tried), 3) if tried else 0.0)
    return found


def watch(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[Any]:
    """Every round of the answers in which there was a choice: all but the first of each."""
    rounds: list[Any] = []
    for prompt in prompts:
        policy = engine.policy
        recorder = Recorder(policy)
        engine.policy = recorder
        engine.chat([{"role": "user", "content": prompt}], params).text()
        engine.policy = policy
        rounds += recorder.rounds
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    engines = {
        name: edgespec.load(options.bundle, spec=SpecParams(drafter=name, num_draft_tokens=DEPTH))
        for name in ("model", "ngram")
    }
    if options.texts is not None:
        table = Bigrams(options.texts, engines["model"].tokenizer.vocab_size)
        spec = SpecParams(drafter="bigram", num_draft_tokens=1)
        engines["bigram"] = edgespec.load(options.bundle, spec=spec, drafters={"bigram": table})
    rows = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=0)
        for family in options.families:
            prompts = [text for _, text in read_prompts(options.prompts, options.per_family, [family])]
            for name, engine in engines.items():
                rounds = watch(engine, prompts, params)
                row = {"drafter": name, "temperature": temperature, "family": family, "rounds": len(rounds)}
                rows.append(row | {"acceptance": by_depth(rounds)})
                print(rows[-1], flush=True)
    for temperature in (0.0, 1.0):
        for name in engines:
            found = [r["acceptance"][0] for r in rows if r["drafter"] == name and r["temperature"] == temperature]
            print(f"{name}, temperature {temperature}: {np.mean(found):.3f} at depth one, mean over families")
    if options.output is not None:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
