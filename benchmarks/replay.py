"""The controller against every fixed drafter and length, on one text and one clock.

    python benchmarks/replay.py BUNDLE --prompts FOLDER [--limit 8] [--output FILE.jsonl]

Trials of `edgespec bench --search` differ in their texts, where near-ties are decided in another way, and in the load
of the machine. Here plain greedy answers are made once, and what the draft model proposes at each of their places is
recorded. Then the loop runs again with drafters and the controller as they are, but the target says what it said, the
draft model proposes what it proposed, and time is the sum of what calls cost by the profile of this machine. What is
left are the decisions. The controller learns from prompt to prompt, the families taking turns. Every run has to emit
the recorded text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import FAMILIES, write_jsonl
from numpy.typing import NDArray

import edgespec
from edgespec import GenerationStats, RuntimeParams, SamplingParams, SpecParams, bench, decoder
from edgespec.bench.recorder import Recorder, expected_rate
from edgespec.bench.run import encode, stored_costs
from edgespec.bench.settings import choose_settings
from edgespec.bundle import read_bundle
from edgespec.contracts import Drafter, DraftPolicy, GoesOn, Rows, Tokens
from edgespec.costs import CostCurve, CostTable
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.models import open_draft, open_target
from edgespec.noise import Noise
from edgespec.policy import AdaptivePolicy, FixedPolicy
from edgespec.shaper import Shaper
from edgespec.speculation import MAX_ROWS
from edgespec.verify import Draft

DEPTH = 12  # tokens of the draft model that are recorded at each place
OTHER_S = 0.3e-3  # of a round, beside the models: see loop_overhead.py
PRIOR = 0.5  # of the acceptance


@dataclass(frozen=True)
class Recording:
    """An answer, and what the draft model says at its places: token ids are numbers of those that occur."""

    family: str
    prompt: NDArray[np.int64]
    text: NDArray[np.int64]
    drafts: dict[int, tuple[NDArray[np.int64], tuple[float, ...]]]  # by length of the context
    vocab_size: int


class Clock:
    """In the place of `perf_counter`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RecordedTarget:
    """A `Scorer` that says again what it said, and takes as long as the profile says."""

    head = None
    context_length = 1 << 20

    def __init__(self, recording: Recording, costs: CostCurve, clock: Clock) -> None:
        self.vocab_size = recording.vocab_size
        self._text, self._costs, self._clock = recording.text, costs, clock
        self._length = len(recording.prompt) - 1

    def sync(self, context: Tokens) -> Tokens:
        assert np.array_equal(context, self._text[: len(context)]), "it emitted another text"
        self._clock.now += OTHER_S
        self._length = len(context) - 1
        return context[-1:]

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        self._clock.now += float(self._costs.seconds(self._length)[len(tokens)])
        # Behind the first wrong token, and behind the end of the text, it may say anything.
        following = self._text[self._length + 1 :][:rows]
        found = np.zeros((rows, self.vocab_size), np.float32)
        found[np.arange(len(following)), following] = 1
        self._length += len(tokens)
        return found

    def rewind(self, length: int) -> None:
        self._length = length


class RecordedDrafter(Drafter):
    """Proposes again what the draft model did."""

    is_lookup = False

    def __init__(self, recording: Recording, costs: CostCurve, clock: Clock) -> None:
        self._recording, self._costs, self._clock = recording, costs, clock

    def backlog(self, context: Tokens) -> int:
        return 1

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        tokens, confidences = self._recording.drafts[len(context)]
        for count in range(1, min(limit, len(tokens)) + 1):
            self._clock.now += float(self._costs.seconds(len(context))[1])
            if goes_on is not None and not goes_on(confidences[:count]):
                break
        return Draft(tokens[:count], None, confidences[:count])


def record(path: str, prompts: Sequence[bench.BenchPrompt], num_tokens: int) -> list[Recording]:
    """Plain greedy answers and drafts at all of their places but the first."""
    bundle, runtime = read_bundle(path, verify_hashes=False), RuntimeParams(spinning="off")
    target = open_target(bundle, runtime)
    draft = ModelDrafter(open_draft(bundle, runtime, target, reads=True), target.vocab_size)
    params = SamplingParams(max_new_tokens=num_tokens)
    shaper, noise = Shaper(params), Noise(0)
    found = []
    with edgespec.load(path, spec=SpecParams(drafter="none"), runtime=runtime) as engine:
        for prompt in prompts:
            start = encode(engine, prompt.text)
            stream = engine.generate(start, params)
            stream.text()
            text = np.array([*start, *stream.token_ids])
            drafts = {at: draft.propose(text[:at], DEPTH, shaper, noise) for at in range(len(start) + 1, len(text))}
            ids = np.unique(np.concatenate([text, *(one.tokens for one in drafts.values())]))
            renamed = {at: (np.searchsorted(ids, one.tokens), one.confidences) for at, one in drafts.items()}
            start, text = np.searchsorted(ids, start), np.searchsorted(ids, text)
            found.append(Recording(prompt.family, start, text, renamed, len(ids)))
            print(f"recorded {prompt.family} {prompt.id}", flush=True)
    return found


def replay(recording: Recording, spec: SpecParams, policy: DraftPolicy, costs: Sequence[CostCurve]) -> float:
    """Seconds of an answer behind its first token."""
    clock = Clock()
    decoder.perf_counter = clock
    target = RecordedTarget(recording, costs[0], clock)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(spec.max_ngram)}
    drafters["model"] = RecordedDrafter(recording, costs[1], clock)
    if spec.drafter in drafters:
        drafters = {spec.drafter: drafters[spec.drafter]}
    loop = SpeculativeDecoder(
        target, drafters if spec.drafter != "none" else None, policy=policy, eos_token_ids=(), prefill_chunk=1 << 20
    )
    params = SamplingParams(max_new_tokens=len(recording.text) - len(recording.prompt))
    stats = GenerationStats()
    emitted = [token for step in loop.generate(recording.prompt, params, stats) for token in step.tokens]
    assert emitted == recording.text[len(recording.prompt) :].tolist(), "it emitted another text"
    return stats.decode_s


def compare(recordings: Sequence[Recording], profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of every setting on every answer."""

    def curves() -> list[CostCurve]:
        return [CostCurve(CostTable(**profile[name]), MAX_ROWS) for name in ("target", "draft")]

    settings = choose_settings(("none",), SpecParams(), has_model=True, search=True)
    settings = [setting for setting in settings if not setting.is_plain or not setting.in_pair]
    target, draft = curves()
    chain = Recorder(AdaptivePolicy(target, {"ngram": (None, PRIOR), "model": (draft, PRIOR)}))
    rows = []
    for recording in recordings:
        row: dict[str, Any] = {"family": recording.family, "tokens": len(recording.text) - len(recording.prompt)}
        for setting in settings:
            depth = setting.spec.num_draft_tokens or 0
            policy = chain if setting.spec.drafter == "auto" else FixedPolicy(depth)
            row[setting.name] = round(replay(recording, setting.spec, policy, curves()), 5)
            if policy is chain:
                row["expected_tokens_per_s"] = expected_rate(chain.take())
        rows.append(row)
    return rows


def by_family(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each family, and for all together: speed-ups of the controller and of the best fixed setting."""
    fixed = [name for name in rows[0] if name.partition("-")[0] in ("ngram", "model")]
    found = []
    for family in [*dict.fromkeys(row["family"] for row in rows), "all"]:
        mine = [row for row in rows if family in (row["family"], "all")]
        seconds = {name: sum(row[name] for row in mine) for name in ("none", "chain", *fixed)}
        best = min(("none", *fixed), key=seconds.__getitem__)
        rates = [(row["expected_tokens_per_s"], (row["tokens"] - 1) / row["chain"]) for row in mine if row["chain"]]
        line = {"family": family, "best fixed in hindsight": best}
        line["its speed-up"] = f"{seconds['none'] / seconds[best]:.2f}x"
        line["controller"] = f"{seconds['none'] / seconds['chain']:.2f}x"
        line["controller over it"] = f"{seconds[best] / seconds['chain']:.3f}"
        line["predicted / measured"] = f"{median(promised / came for promised, came in rates if promised):.2f}"
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with edgespec.load(options.bundle, runtime=RuntimeParams(threads=2)) as engine:
        profile = stored_costs(engine)
    if profile is None:
        parser.error("the costs of calls are not kept: the cache folder cannot be written, see EDGESPEC_CACHE")
    prompts = bench.read_prompts(options.prompts, options.families, options.limit)
    rows = compare(record(options.bundle, prompts, options.max_new_tokens), profile)
    for line in by_family(rows):
        print(*(f"{name} {value}" for name, value in line.items()), sep=", ")
    if options.output is not None:
        write_jsonl(options.output, rows)


if __name__ == "__main__":
    main()
