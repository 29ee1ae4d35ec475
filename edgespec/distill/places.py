"""Places in texts at which a draft is trained and measured, and all that belongs to one. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.distill.loss import HeadMap, Wanted
from edgespec.distill.store import TEMPLATE, Texts


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """n places, and up to `depth` tokens behind each.

    Attributes:
        hidden: the target's hidden states, shape (n, num_features), float32.
        tokens: that are fed one after the other, shape (n, depth).
        wanted: what the target says after each of them, one for each depth.
        counts: 1 where what follows was chosen and not put there by a template, shape (n, depth), float32.
    """

    hidden: Any
    tokens: Any
    wanted: list[Wanted]
    counts: Any


class Places:
    """Every place of some texts behind which `depth` tokens stand, the first one to be drafted chosen by somebody.

    A place is a position t: the target has read token t, which gave its hidden states and, with them, token t + 1. The
    draft is fed that token and drafts token t + 2.

    Args:
        texts: of one or more sorts.
        hidden: the hidden states of each, float16, shape (rows, length, num_features).
        depth: tokens that are fed.
    """

    def __init__(self, texts: Sequence[Texts], hidden: Sequence[NDArray[np.float16]], depth: int) -> None:
        self.texts, self.hidden, self.depth = list(texts), list(hidden), depth
        self.index = np.concatenate([_places(i, part, depth) for i, part in enumerate(texts)])

    def __len__(self) -> int:
        return len(self.index)

    def where(self, name: str) -> NDArray[Any]:
        """An array of the texts' rows, like `temperatures`, at every place."""
        return np.array([getattr(self.texts[i], name)[row] for i, row, _ in self.index])

    def kinds(self) -> NDArray[np.uint8]:
        """Of the first drafted token of every place."""
        return np.array([self.texts[i].kinds[row, t + 2] for i, row, t in self.index], np.uint8)

    def batch(self, numbers: NDArray[np.int64], heads: HeadMap, device: str) -> Batch:
        """Some of the places."""
        chosen = self.index[numbers]
        order = np.argsort(chosen[:, 0], kind="stable")
        chosen = chosen[order]
        parts = [self._part(i, chosen[chosen[:, 0] == i, 1:]) for i in np.unique(chosen[:, 0])]
        back = np.argsort(order)
        hidden, tokens, ids, logps, follows, logp, counts = (
            np.concatenate([part[k] for part in parts])[back] for k in range(7)
        )
        wanted = [heads.wanted(ids[:, k], logps[:, k], follows[:, k], logp[:, k], device) for k in range(self.depth)]
        made = (torch.from_numpy(array).to(device) for array in (hidden, tokens, counts))
        first, second, third = made
        return Batch(first, second, wanted, third)

    def _part(self, i: int, places: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        texts, rows, t = self.texts[i], places[:, 0], places[:, 1]
        fed = rows[:, None], t[:, None] + 1 + np.arange(self.depth)
        after = fed[0], fed[1] + 1
        return (
            np.asarray(self.hidden[i][rows, t]).astype(np.float32),
            texts.tokens[fed].astype(np.int64),
            texts.ids[fed],
            texts.logps[fed],
            texts.tokens[after],
            texts.chosen[fed],
            (texts.kinds[after] != TEMPLATE).astype(np.float32),
        )


def _places(number: int, texts: Texts, depth: int) -> NDArray[np.int64]:
    length = texts.tokens.shape[1]
    rows, places = np.nonzero(texts.kinds[:, 2 : max(2, length - depth + 1)] != TEMPLATE)
    return np.stack([np.full_like(rows, number), rows, places], 1)
