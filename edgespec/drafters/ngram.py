"""Prompt lookup: propose what followed when the text, or an earlier one, ended like this.

Source: prompt lookup decoding (Saxena 2023). Keeps no state; knows no model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Drafter, GoesOn, Tokens
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
    ends, length = _occurrences(text, context, max_ngram)
    tokens: list[int] = []
    levels: list[float] = []
    while len(ends) > 1 and len(tokens) < limit:
        following = text[ends + 1]
        # The last occurrence is the most recent one: where all go on alike there is nothing to count.
        token = following[-1] if (following == following[-1]).all() else _most_frequent(following)
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


def _occurrences(text: Tokens, context: Tokens, max_ngram: int) -> tuple[NDArray[np.intp], int]:
    """Where the longest suffix that occurs in `text` ends there, with a token behind it, and its length.

    Candidates are the occurrences of the last token; each further token back keeps those that match it.
    """
    ends = np.flatnonzero(text[:-1] == context[-1])
    length = int(len(ends) > 0)
    while length < min(max_ngram, len(context)):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == context[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length


def _most_frequent(tokens: Tokens) -> np.int64:
    """The most frequent token, and of equally frequent ones that which occurs last."""
    values, last, counts = np.unique(tokens[::-1], return_index=True, return_counts=True)
    most = counts == counts.max()
    winner: np.int64 = values[most][last[most].argmin()]
    return winner
