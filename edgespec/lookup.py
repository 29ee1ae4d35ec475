"""Where a text has said the same before, and what followed there. Arrays in, arrays out.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Tokens

LONGEST_HINT = 4  # tokens of a match that a hint tells apart
NUM_HINT_KINDS = 2 * LONGEST_HINT + 1


class HintIndex:
    """What followed when a text ended like this before, and how much that says. The text changes at its end.

    It gives what `look_up` would propose first, without looking through the text again at every token.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._endings: list[tuple[int, ...]] = []  # its last tokens, `LONGEST_HINT` of them and fewer
        self._following: dict[tuple[int, ...], list[int]] = {}  # an ending -> what came behind it

    def __len__(self) -> int:
        return len(self._text)

    def append(self, token: int) -> None:
        for ending in self._endings:
            self._following.setdefault(ending, []).append(token)
        self._text.append(token)
        self._end()

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        while len(self._text) > length:
            self._text.pop()
            self._end()
            for ending in self._endings:
                following = self._following[ending]
                following.pop()
                if not following:
                    del self._following[ending]

    def find(self) -> tuple[int, int]:
        """The hint for what comes next.

        Returns:
            A token and the kind: the length of the longest match up to `LONGEST_HINT`, and `LONGEST_HINT` more where
            all its occurrences agree. Both are 0 where there is no match.
        """
        for ending in self._endings:
            following = self._following.get(ending)
            if following is not None:
                token = following[-1]
                if following.count(token) == len(following):
                    return token, len(ending) + LONGEST_HINT
                return most_frequent(following), len(ending)
        return 0, 0

    def _end(self) -> None:
        last = tuple(self._text[-LONGEST_HINT:])
        self._endings = [last[start:] for start in range(len(last))]


def find_hints(text: Iterable[int]) -> list[tuple[int, int]]:
    """The hint after each token of a text."""
    index, found = HintIndex(), []
    for token in text:
        index.append(token)
        found.append(index.find())
    return found


def common_prefix(text: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(text), len(other))
    text, other = text[:length], other[:length]
    # Nearly always they are the same, which bytes tell at less than half the cost of comparing elements.
    return length if text.tobytes() == other.tobytes() else int((text != other).argmax())


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
