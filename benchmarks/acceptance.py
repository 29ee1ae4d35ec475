"""How much of what a drafter proposes is accepted: by family, depth and temperature.

    python benchmarks/acceptance.py BUNDLE --prompts FOLDER [--per-family 4] [--texts WORK/data] [--output FILE.jsonl]

The target answers by itself. Then every drafter is asked at every place of the answer for the next four tokens of it.
Greedily a token is accepted where it is the answer's. At temperature 1 the answer's token x would have been accepted
with probability min(1, q(x) / p(x)) had it been drafted; over answers the mean of that is the acceptance, sum(min(p,
q)). Depth d is given that all before were accepted. In use rounds begin where a draft has ended, at harder places than
the average one, so that the first token of a round is accepted less often; `rounds` says how often with four tokens.
With `--texts`, the texts of a distillation, a table of bigrams drafts as well. Speed is not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from common import FAMILIES, read_prompts, write_jsonl
from numpy.typing import NDArray

import edgespec
from edgespec import Engine, RuntimeParams, SamplingParams, SpecParams
from edgespec.bench.recorder import Recorder
from edgespec.bench.run import encode
from edgespec.bundle import read_bundle
from edgespec.drafters.ngram import look_up
from edgespec.models import DraftSession, open_draft, open_target
from edgespec.session import DecoderSession

DEPTH = 4
# Text, its place, log p of the tokens that follow there -> probability that each is accepted, given the one before.
Rates: TypeAlias = Callable[[NDArray[np.int64], int, NDArray[np.float64]], list[float]]


def bigrams(folder: Path) -> dict[int, int]:
    """The most frequent successor of each token in the texts of a distillation, those for validation left out."""
    rows = [np.load(file)["tokens"] for file in sorted(folder.glob("written-*.npz"))[1:]]
    pairs = np.concatenate([np.stack([r[:, :-1].ravel(), r[:, 1:].ravel()], 1) for r in rows])
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    return {int(first): int(second) for first, second in found[np.argsort(counts, kind="stable")]}


def by_table(table: dict[int, int]) -> Rates:
    def rates(text: NDArray[np.int64], at: int, logp: NDArray[np.float64]) -> list[float]:
        return [float(table.get(int(text[at + k - 1]), -1) == text[at + k]) for k in range(len(logp))]

    return rates


def by_lookup(text: NDArray[np.int64], at: int, logp: NDArray[np.float64]) -> list[float]:
    found = look_up(text[:at], text[:at], len(logp), SpecParams().max_ngram).tokens
    return [float(k < len(found) and found[k] == text[at + k]) for k in range(len(logp))]


def by_model(draft: DraftSession, temperature: float) -> Rates:
    def rates(text: NDArray[np.int64], at: int, logp: NDArray[np.float64]) -> list[float]:
        pending, found = draft.sync(text[:at]), []
        ids = None if draft.head is None else draft.head.ids
        for k in range(len(logp)):
            row = draft.forward(pending, 1)[0].astype(np.float64)
            token = text[at + k]
            column = token if ids is None else int(np.searchsorted(ids, token))
            is_there = ids is None or (column < len(ids) and ids[column] == token)
            if temperature == 0:
                found.append(float(is_there and row.argmax() == column))
            else:
                logq = row[column] - row.max() - np.log(np.exp(row - row.max()).sum()) if is_there else -np.inf
                found.append(float(np.exp(min(logq - logp[k], 0))))
            pending = text[at + k : at + k + 1]
        return found

    return rates


def log_probabilities(target: DecoderSession, text: NDArray[np.int64], start: int) -> NDArray[np.float64]:
    """Of the tokens from `start` on, at temperature 1."""
    rows = target.forward(target.sync(text[:-1]), len(text) - start).astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    total = np.log(np.exp(rows).sum(-1))
    return np.asarray(rows[np.arange(len(rows)), text[start:]] - total)


def by_depth(rates: Sequence[list[float]]) -> list[float]:
    """Acceptance at each depth, given that all before were accepted."""
    survived = np.cumprod(np.array([line for line in rates if len(line) == DEPTH]), 1).mean(0)
    before = np.concatenate([[1.0], survived[:-1]])
    return [round(float(now / last), 3) if last > 0 else 0.0 for now, last in zip(survived, before, strict=True)]


def rounds_with(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> float:
    """How often the first of four tokens is accepted where rounds really begin."""
    found = []
    for prompt in prompts:
        policy = engine.policy
        engine.policy = recorder = Recorder(policy)
        engine.chat([{"role": "user", "content": prompt}], params).text()
        engine.policy = policy
        found += [r.accepted > 0 for r in recorder.rounds]
    return round(float(np.mean(found)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    bundle, runtime = read_bundle(options.bundle, verify_hashes=False), RuntimeParams(spinning="off")
    target, reader = open_target(bundle, runtime), open_target(bundle, runtime)
    draft = open_draft(bundle, runtime, target, reads=True)
    plain = edgespec.load(options.bundle, spec=SpecParams(drafter="none"), runtime=runtime)
    drafting = edgespec.load(options.bundle, spec=SpecParams(drafter="model", num_draft_tokens=DEPTH), runtime=runtime)
    table = {} if options.texts is None else bigrams(options.texts)
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=0)
        drafters: dict[str, Rates] = {"model": by_model(draft, temperature), "ngram": by_lookup}
        drafters |= {"bigram": by_table(table)} if table else {}
        for family in options.families:
            prompts = [text for _, text in read_prompts(options.prompts, options.per_family, [family])]
            rates: dict[str, list[list[float]]] = {name: [] for name in drafters}
            for prompt in prompts:
                stream = plain.chat([{"role": "user", "content": prompt}], params)
                stream.text()
                start = len(encode(plain, prompt))
                text = np.array([*encode(plain, prompt), *stream.token_ids])
                logp = log_probabilities(reader, text, start)
                for at in range(start + 1, len(text)):  # the first token is never drafted
                    for name, rate in drafters.items():
                        rates[name].append(rate(text, at, logp[at - start :][:DEPTH]))
            for name, lines in rates.items():
                row = {"drafter": name, "temperature": temperature, "family": family, "places": len(lines)}
                row |= {"acceptance": by_depth(lines)}
                row |= {"rounds": rounds_with(drafting, prompts, params)} if name == "model" else {}
                rows.append(row)
                print(row, flush=True)
    for temperature in (0.0, 1.0):
        for name in drafters:
            found = [r["acceptance"][0] for r in rows if r["drafter"] == name and r["temperature"] == temperature]
            print(f"{name}, temperature {temperature}: {np.mean(found):.3f} at depth one, mean over families")
    if options.output is not None:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
