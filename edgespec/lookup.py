"""Where a text has said the same before, and what followed there. Arrays in, arrays out.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Tokens

LONGEST_HINT = 4  # tokens of a match that a hint tells apart
NUM_HINT_KINDS = 2 * LONGEST_HINT + 1


def find_hint(text: Tokens) -> tuple[int, int]:
    """What followed when the text ended like this before, and how much that says.

    Returns:
        The token that `look_up` would propose first, and the kind: the length of the match up to `LONGEST_HINT`, and
        `LONGEST_HINT` more where all its occurrences agree. Both are 0 where there is no match.
    """
    ends, length = occurrences(text, text, LONGEST_HINT)
    if not length:
        return 0, 0
    following: list[int] = text[ends + 1].tolist()
    is_sure = following.count(following[-1]) == len(following)
    token = following[-1] if is_sure else most_frequent(following)
    return token, length + is_sure * LONGEST_HINT


def occurrences(text: Tokens, context: Tokens, max_ngram: int) -> tuple[NDArray[np.intp], int]:
    """Where the longest suffix that occurs in `text` ends there, with a token behind it, and its length.

    Candidates are the occurrences of the last token; each further token back keeps those that match it.
    """
    ends = np.flatnonzero(text[:-1] == context[-1])
    length = int(len(ends) > 0)
    while 0 < length < min(max_ngram, len(context)):
        longer = ends if ends[0] >= length else ends[ends >= length]
        longer = longer[text[longer - length] == context[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length


def most_frequent(tokens: list[int]) -> int:
    """The most frequent token, and of equally frequent ones that which occurs last."""
    counts = Counter(reversed(tokens))
    return max(counts, key=counts.__getitem__)
