"""Prompt lookup: propose what followed when the text, or an earlier one, ended like this.

Source: prompt lookup decoding (Saxena 2023). Keeps no state; knows no model.
"""

from __future__ import annotations

import numpy as np

from edgespec.contracts import Drafter, GoesOn, Tokens
from edgespec.lookup import most_frequent, occurrences
from edgespec.noise import Noise
from edgespec.shaper import Shaper
from edgespec.verify import EMPTY_DRAFT, Draft


class NgramDrafter(Drafter):
    """Proposes what followed the earlier occurrences of the longest suffix that has any.

    Where they were followed by different tokens the most frequent one is proposed, and of equally frequent ones the
    most recent; the occurrences that go on with it vote for the next.

    Args:
        max_ngram: longest suffix looked for, in tokens.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def propose(
        self, context: Tokens, limit: int, shaper: Shaper, noise: Noise, goes_on: GoesOn | None = None
    ) -> Draft:
        return look_up(context, context, limit, self.max_ngram)


def look_up(text: Tokens, context: Tokens, limit: int, max_ngram: int) -> Draft:
    """The continuation in `text` of the longest suffix of `context` that occurs in it.

    The confidence in a token is 1 - 2**-n, where n is the length of the match in front of it (drafted tokens count)
    times the share of the occurrences that agree on it.

    Args:
        text: where to look, shape (n,); may be `context` itself.
        context: committed tokens, shape (m,).
        limit: most tokens proposed.
        max_ngram: longest suffix looked for.
    """
    ends, length = occurrences(text, context, max_ngram)
    tokens: list[int] = []
    levels: list[float] = []
    while len(ends) > 1 and len(tokens) < limit:
        following = text[ends + 1]
        # The last occurrence is the most recent one: where all go on alike there is nothing to count.
        token = following[-1] if (following == following[-1]).all() else most_frequent(following.tolist())
        agree = following == token
        levels.append((length + len(tokens)) * float(agree.mean()))
        tokens.append(int(token))
        ends = ends[agree] + 1
        ends = ends[ends < len(text) - 1]
    if len(ends) == 1:  # nobody left to disagree
        start = int(ends[0]) + 1
        rest = text[start : start + limit - len(tokens)].tolist()
        levels += [float(length + i) for i in range(len(tokens), len(tokens) + len(rest))]
        tokens += rest
    if not tokens:
        return EMPTY_DRAFT
    return Draft(np.array(tokens), confidences=tuple(1 - 2.0**-level for level in levels))
