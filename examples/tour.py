"""A tour of the library, cell by cell: `python examples/tour.py [BUNDLE]`, or open it as a notebook."""

# %% Load a bundle; without a name the default one, which `edgespec run` makes at its first start
import asyncio
import sys
import tempfile
import threading
from pathlib import Path

import edgespec

engine = edgespec.load(sys.argv[1] if len(sys.argv) > 1 else None)
print(f"{engine.bundle.manifest.name}: context of {engine.context_length} tokens, drafter {engine.drafter}")

# %% An answer while it is made; text that was drafted is in brackets
question = [{"role": "user", "content": "Write the numbers from one to ten as words."}]
params = edgespec.SamplingParams(max_new_tokens=60)
with engine.chat(question, params) as stream:
    for piece in stream.pieces():
        print(f"[{piece.text}]" if piece.is_drafted else piece.text, end="", flush=True)
print(f"\n-- {stream.finish_reason}, {stream.stats.as_dict()}")

# %% The same seed gives the same text with any drafter, if they share their noise (to the last bit in exact mode)
sampled = edgespec.SamplingParams(temperature=0.8, seed=7, max_new_tokens=30)
for drafter in ("ngram", "none"):
    with engine.fork(edgespec.SpecParams(drafter=drafter, verifier="coupled")) as other:
        print(f"-- {drafter}: {other.chat(question, sampled).text()!r}")

# %% A conversation: each turn reads only what is new; an earlier question can be changed
chat = edgespec.Conversation(engine, system="Answer in one sentence.")
print(chat.ask("What is a river?", params).text())
stream = chat.ask("And a lake?", params)
print(stream.text())
print(f"-- {stream.stats.prompt_tokens - stream.stats.cached_tokens} of {stream.stats.prompt_tokens} tokens were read")
chat.edit(2, "And a sea?")
print(chat.reply(params).text())
with tempfile.TemporaryDirectory() as folder:
    chat.save(Path(folder) / "chat.json", caches=True)
    again = edgespec.Conversation.load(Path(folder) / "chat.json", engine)
print(f"-- {len(again.messages)} messages came back")

# %% Stop from another thread
stream = engine.generate("Once upon a time", edgespec.SamplingParams(max_new_tokens=400))
threading.Timer(0.3, stream.cancel).start()
print(f"{stream.text()!r}\n-- {stream.finish_reason}")

# %% The probability of each token, and of what else it might have been
stream = engine.generate("The capital of France is", edgespec.SamplingParams(max_new_tokens=2, logprobs=2))
stream.text()
for token in stream.logprobs:
    others = {engine.tokenizer.decode([other]): round(logprob, 2) for other, logprob in token.top}
    print(f"{engine.tokenizer.decode([token.token])!r} {token.logprob:.2f}, most probable {others}")


# %% Two answers at once, in an event loop, on the same weights
async def both() -> list[str]:
    with engine.fork() as second:
        streams = [e.achat(question, params) for e in (engine, second)]
        return list(await asyncio.gather(*(s.text() for s in streams)))


first, second = asyncio.run(both())
print(f"-- {'equal' if first == second else 'different'} answers")
engine.close()
