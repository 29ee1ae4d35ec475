"""A smaller model as drafter. Knows the `Scorer` protocol, not what is behind it."""

from __future__ import annotations

import numpy as np

from edgespec.contracts import Scorer, Tokens
from edgespec.noise import Noise, Purpose
from edgespec.sampling import draw
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft


class ModelDrafter:
    """Drafts with a model of its own, token by token.

    Its cache follows the committed text by `sync`: rejected tokens are rewound, tokens that it has not read (the
    prompt, the last of a draft that was accepted whole) are read when it is next asked.

    Args:
        scorer: the draft model.
        vocab_size: columns of the target's logits. A draft may have more or fewer padding columns; distributions
            are cut or filled with zeros to this width.
    """

    def __init__(self, scorer: Scorer, vocab_size: int) -> None:
        self.scorer = scorer
        self.vocab_size = vocab_size

    def propose(self, context: Tokens, limit: int, shaper: Shaper, noise: Noise) -> Draft:
        limit = min(limit, self.scorer.context_length - len(context))
        if limit < 1:
            return EMPTY_DRAFT
        tokens = np.empty(limit, np.int64)
        dists = None if shaper.is_greedy else np.zeros((limit, self.vocab_size), np.float32)
        text = np.concatenate([context, tokens])  # what each drafted token follows
        uniforms = noise.uniforms(len(context), Purpose.DRAFT, limit)
        pending = self.scorer.sync(context)
        for i in range(limit):
            # Columns that the target does not have are padding: they must not be drafted.
            logits = self.scorer.forward(pending, 1)[:, : self.vocab_size]
            before = text[: len(context) + i]
            if dists is None:
                tokens[i] = shaper.adjust(logits, before, tokens[:0]).argmax()
            else:
                probs = shaper.shape(logits, before, tokens[:0])[0]
                tokens[i] = draw(probs, uniforms[i])
                dists[i, : len(probs)] = probs
            text[len(before)] = tokens[i]
            pending = tokens[i : i + 1]
        return Draft(tokens, dists)
