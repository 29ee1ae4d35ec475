"""`Shaper`: how the tokens of one answer are chosen, the same for the target's rows and the draft's.

Composed once per answer. Knows arrays; nothing of models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.params import SamplingParams
from edgespec.sampling import shape


class Shaper:
    """Turns rows of logits into what tokens are chosen from.

    Row i of a call follows `context` and then `drafted[:i]`, so that whatever depends on the text sees the drafted
    prefix, too.

    Args:
        params: of the answer.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    def adjust(
        self, logits: NDArray[np.float32], context: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Logits that the arg max is taken of, or that are shaped next.

        Args:
            logits: shape (rows, vocab); overwritten.
            context: committed tokens, shape (n,).
            drafted: tokens after them that the later rows follow, shape (rows - 1,).
        """
        return logits

    def shape(
        self, logits: NDArray[np.float32], context: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The distributions that tokens are really sampled from, shape (rows, vocab). Arguments as `adjust`."""
        return shape(self.adjust(logits, context, drafted), self.params)
