"""Drafters that are wrong: what the controller lets them cost, and how it parks one and takes it back.

    python benchmarks/hostile.py BUNDLE --prompts FOLDER [--exact] --output benchmarks/results/hostile.jsonl

The drafters know the plain greedy answer. `wrong` proposes another token at each place, `middle wrong` does so in the
middle third of the answer and is right before and after. Each comes as a lookup, which costs nothing, and as a model,
whose every token takes `--step` of the time of a plain token. Plain decoding runs twice: what it differs from itself
is noise. All take turns on each prompt; the controller starts each repetition without knowledge.

Without `--exact` a text parts from the plain one at some near-tie, whose margin is recorded; what the drafters know is
then of no use any more. In exact mode a call of two rows costs what one of a single row does, so that a lookup's first
token is never parked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from common import FAMILIES, read_prompts, write_jsonl

import edgespec
from edgespec import Engine, RuntimeParams, SamplingParams, SpecParams
from edgespec.bench.recorder import Recorder, Round
from edgespec.bench.run import best_two, encode
from edgespec.bench.trial import first_difference
from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import Draft

PATTERNS: dict[str, Callable[[float], bool]] = {
    "wrong": lambda share: True,
    "middle wrong": lambda share: 1 / 3 <= share < 2 / 3,
}


class Oracle(Drafter):
    """Knows the answer, and proposes it or something else.

    Args:
        is_wrong: by the share of the answer that lies before a token.
        is_lookup: proposes all at once; otherwise token by token, each after `step_s` seconds of work.
    """

    def __init__(self, is_wrong: Callable[[float], bool], *, is_lookup: bool) -> None:
        self.is_wrong, self.is_lookup = is_wrong, is_lookup
        self.step_s = 0.0
        self.tell(0, [])

    def tell(self, prompt_length: int, answer: list[int]) -> None:
        """What will be asked next, and the answer to it."""
        self.prompt_length = prompt_length
        wrong = [self.is_wrong(i / len(answer)) for i in range(len(answer))]
        self.proposal = np.array(answer, np.int64) + np.array(wrong, np.int64)  # the next id is another token

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        at = len(context) - self.prompt_length
        tokens = self.proposal[at : at + limit]
        count = len(tokens)
        if not self.is_lookup:
            for count in range(1, len(tokens) + 1):
                started = perf_counter()
                while perf_counter() - started < self.step_s:
                    pass
                if goes_on is not None and not goes_on([0.0] * count):
                    break
        return Draft(tokens[:count])


def thirds(rounds: list[Round], num_tokens: int) -> list[dict[str, Any]]:
    """Rounds, drafted and accepted tokens and tokens per second in each third of an answer."""
    parts: list[list[Round]] = [[], [], []]
    at = 1  # the first token comes with the prompt
    for one in rounds:
        parts[min(3 * at // num_tokens, 2)].append(one)
        at += one.accepted + 1
    return [
        {
            "rounds": len(part),
            "drafted": sum(r.drafted for r in part),
            "accepted": sum(r.accepted for r in part),
            "tokens_per_s": sum(r.accepted + 1 for r in part) / sum(r.seconds for r in part) if part else None,
        }
        for part in parts
    ]


def parking(rounds: list[Round], num_tokens: int) -> dict[str, int | None]:
    """Tokens from the start of the middle third to the first round without a draft, and from its end to the first with
    an accepted one; `None` where there is none."""
    found: dict[str, int | None] = {"parked_after": None, "back_after": None}
    start, end, at = num_tokens / 3, 2 * num_tokens / 3, 1
    for one in rounds:
        if start <= at < end and not one.drafted and found["parked_after"] is None:
            found["parked_after"] = round(at - start)
        if at >= end and one.accepted and found["back_after"] is None:
            found["back_after"] = round(at - end)
        at += one.accepted + 1
    return found


def answer(engine: Engine, prompt: str, params: SamplingParams) -> Any:
    with engine.chat([{"role": "user", "content": prompt}], params) as stream:
        stream.text()
    return stream


def trial(plain: Engine, engine: Engine, prompt: str, expected: Any, params: SamplingParams) -> dict[str, Any]:
    """One answer against the plain one."""
    recorder = engine.policy
    assert isinstance(recorder, Recorder)
    recorder.take()
    stream = answer(engine, prompt, params)
    rounds, num_tokens = recorder.take(), len(stream.token_ids)
    row = {
        "tokens": num_tokens,
        "tokens_per_s": stream.stats.tokens_per_s,
        "ratio": stream.stats.tokens_per_s / expected.stats.tokens_per_s,
        "drafted": stream.stats.drafted,
        "accepted": stream.stats.accepted,
        "passes": stream.stats.target_passes,
        "passes_with_draft": stream.stats.rounds_drafted,
        "equal": stream.token_ids == expected.token_ids,
        "thirds": thirds(rounds, num_tokens),
    }
    if not row["equal"]:
        at = first_difference(stream.token_ids, expected.token_ids)
        margin, _ = best_two(plain, [*encode(plain, prompt), *expected.token_ids[:at]], params)
        row |= {"first_difference": at, "margin": round(margin, 4)}
    return row | parking(rounds, num_tokens)


def repetition(options: argparse.Namespace, number: int, prompts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """All prompts once, by controllers that begin with nothing."""
    oracles = {
        f"{pattern}, {kind}": Oracle(is_wrong, is_lookup=kind == "lookup")
        for pattern, is_wrong in PATTERNS.items()
        for kind in ("lookup", "model")
    }
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    runtime = RuntimeParams(exact=options.exact, threads=options.threads, spinning="off")
    plain = edgespec.load(options.bundle, spec=SpecParams(drafter="none"), runtime=runtime, drafters=oracles)
    engines = {name: plain.fork(SpecParams(drafter=name)) for name in oracles} | {"plain again": plain.fork()}
    for engine in engines.values():
        engine.policy = Recorder(engine.policy)
        answer(engine, "Count to twenty.", SamplingParams(max_new_tokens=16))
    rows = []
    for i, (family, prompt) in enumerate(prompts):
        answer(plain, prompt, SamplingParams(max_new_tokens=1))
        expected = answer(plain, prompt, params)
        for oracle in oracles.values():
            oracle.tell(expected.stats.prompt_tokens, expected.token_ids)
            oracle.step_s = options.step / expected.stats.tokens_per_s
        names = list(engines)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            # The plain answer is made anew for each, so that a slow spell of the machine hits both.
            expected = answer(plain, prompt, params)
            row = {"drafter": name, "family": family, "repetition": number, "exact": options.exact}
            rows.append(row | trial(plain, engines[name], prompt, expected, params))
            print({k: v for k, v in rows[-1].items() if k != "thirds"}, flush=True)
    for engine in (*engines.values(), plain):
        engine.close()
    return rows


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    """One line on a drafter."""
    ratios = sorted(row["ratio"] for row in rows)
    text = f"{name}: {median(ratios):.3f}x plain ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
    text += f"{sum(r['drafted'] for r in rows)} tokens drafted for {sum(r['tokens'] for r in rows)}, "
    if name.startswith("middle"):
        for key in ("parked_after", "back_after"):
            seen = [row[key] for row in rows if row[key] is not None]
            text += f"{key} {median(seen) if seen else '-'} ({len(seen)} of {len(rows)}), "
    return f"{text}{sum(r['equal'] for r in rows)} of {len(rows)} equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--per-family", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--step", type=float, default=0.25, help="time of a drafted token, of that of a plain one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts = read_prompts(options.prompts, options.per_family, options.families)
    rows = [row for number in range(options.repetitions) for row in repetition(options, number, prompts)]
    for name in dict.fromkeys(row["drafter"] for row in rows):
        print(summary(name, [row for row in rows if row["drafter"] == name]))
    if options.output:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
