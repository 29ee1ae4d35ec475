"""Benchmarks: what is run against what, and what the trials say.

A trial is one answer to one prompt by one setting. Settings take turns on each prompt (A B C, B C A, ...), so that
slow spells of the machine hit all of them. A repetition is one pass over all prompts, round robin over the families,
by engines that start it with nothing learnt: within it the controller goes on learning from prompt to prompt, as it
does in use, and it never meets a text for a second time. Each prompt is read with a cold cache.
"""

from edgespec.bench.prompts import BenchPrompt, read_prompts
from edgespec.bench.run import Bench, Plan
from edgespec.bench.summary import summarise
from edgespec.bench.trial import Trial

__all__ = ["Bench", "BenchPrompt", "Plan", "Trial", "read_prompts", "summarise"]
