"""Prompt lookup: propose what followed the last time the text ended like this.

Source: prompt lookup decoding (Saxena 2023). Keeps no state; knows no model.
"""

from __future__ import annotations

import numpy as np

from edgespec.contracts import Tokens
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft


class NgramDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the longest suffix that has one.

    Args:
        max_ngram: longest suffix looked for, in tokens.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def propose(self, context: Tokens, limit: int, shaper: Shaper, noise: Noise) -> Draft:
        start = _continuation(context, self.max_ngram)
        return EMPTY_DRAFT if start is None else Draft(context[start : start + limit].copy())


def _continuation(context: Tokens, max_ngram: int) -> int | None:
    """Index of the token that followed the best earlier match of the suffix, or `None`.

    Candidates are the earlier occurrences of the last token; each further token back keeps those that match it.
    """
    last = len(context) - 1
    ends = np.flatnonzero(context[:last] == context[last])
    for back in range(1, max_ngram):
        longer = ends[ends >= back]
        longer = longer[context[longer - back] == context[last - back]]
        if not len(longer):
            break
        ends = longer
    return int(ends[-1]) + 1 if len(ends) else None
