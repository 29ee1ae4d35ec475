"""What an application that embeds edgespec feels: import, first token, later turns, resuming, cancelling.

    python benchmarks/embedding.py BUNDLE

Prints one JSON document; seconds unless said otherwise. A cancel counts from the call of `cancel` in another thread
to the end of the loop, by when the engine is free.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

import edgespec
from edgespec import Conversation, Engine, SamplingParams, TextStream

SHORT = SamplingParams(max_new_tokens=64)
ENDLESS = SamplingParams(max_new_tokens=2000, ignore_eos=True)
NUM_CANCELS = 60


def process_seconds(code: str) -> float:
    """Best of six fresh interpreters."""
    times = []
    for _ in range(6):
        start = perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(perf_counter() - start)
    return min(times)


def first_piece(stream: TextStream) -> float:
    start = perf_counter()
    next(stream)
    seconds = perf_counter() - start
    stream.text()
    return seconds


def turns(engine: Engine, folder: Path) -> dict[str, object]:
    """Three turns, an edit, and a resumption on another engine: tokens of the prompt, and those that were read."""
    chat, found = Conversation(engine), {}

    def note(name: str, stream: TextStream) -> None:
        seconds, stats = first_piece(stream), stream.stats
        read = stats.prompt_tokens - stats.cached_tokens
        found[name] = {"prompt_tokens": stats.prompt_tokens, "read_tokens": read, "first_piece": seconds}

    for i, question in enumerate(("What is the capital of France?", "Name three rivers there.", "Which is longest?")):
        note(f"turn {i + 1}", chat.ask(question, SHORT))
    chat.edit(2, "Name three mountains there.")
    note("edited turn 2", chat.reply(SHORT))
    chat.save(folder / "chat.json", caches=True)
    with engine.fork() as other:
        note("resumed", Conversation.load(folder / "chat.json", other).ask("And the highest?", SHORT))
    return found


def target_pass(engine: Engine) -> float:
    """One row at a past of 256, median of nine."""
    session = engine._sessions[0]
    tokens = np.arange(100, 357)
    session.forward(session.sync(tokens), 1)
    times = []
    for _ in range(9):
        session.rewind(256)
        start = perf_counter()
        session.forward(tokens[256:], 1)
        times.append(perf_counter() - start)
    session.rewind(0)
    return statistics.median(times)


def cancels(make: Callable[[int], TextStream], earliest: float, latest: float) -> dict[str, float]:
    """Seconds from cancel to end, at random moments."""
    rng, seconds, reading = random.Random(1), [], 0
    for i in range(NUM_CANCELS):
        stream, moments = make(i), []

        def cancel(stream: TextStream = stream, moments: list[float] = moments) -> None:
            sleep(rng.uniform(earliest, latest))
            moments.append(perf_counter())
            stream.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        stream.text()
        end = perf_counter()
        thread.join()
        assert stream.finish_reason == "cancelled", stream.finish_reason
        reading += stream.stats.new_tokens == 0
        seconds.append(end - moments[0])
    quantiles = {"median": 0.5, "p95": 0.95, "most": 1.0}
    return {name: float(np.quantile(seconds, q)) for name, q in quantiles.items()} | {"while_reading": reading}


def main() -> None:
    bundle = sys.argv[1]
    figures: dict[str, object] = {name: process_seconds(f"import {name}") for name in ("edgespec", "numpy", "sys")}
    start = perf_counter()
    engine = edgespec.load(bundle)
    figures["load"] = perf_counter() - start
    question = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]
    figures["first piece, first call"] = first_piece(engine.chat(question, SHORT))
    engine.generate([5, 6, 7], SamplingParams(max_new_tokens=1)).text()
    figures["first piece, later call"] = first_piece(engine.chat(question, SHORT))
    with tempfile.TemporaryDirectory() as folder:
        figures["turns"] = turns(engine, Path(folder))
    figures["target pass of one row"] = target_pass(engine)
    stories = ([{"role": "user", "content": f"Write a long story, number {i}."}] for i in range(NUM_CANCELS))
    figures["cancel while writing"] = cancels(lambda i: engine.chat(next(stories), ENDLESS), 0.2, 0.6)
    rng = np.random.default_rng(1)
    figures["cancel while reading 1,000 tokens"] = cancels(
        lambda i: engine.generate(rng.integers(100, 40000, 1000), ENDLESS), 0.02, 0.7
    )
    engine.close()
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
