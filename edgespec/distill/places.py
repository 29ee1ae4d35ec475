"""Places in texts at which a draft is trained and measured, and all that belongs to one. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.distill.loss import HeadMap, Wanted
from edgespec.distill.store import TEMPLATE, Seen, Texts
from edgespec.distill.student import Memory
from edgespec.lookup import find_hints


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """n places, as many in each of some rows, and up to `depth` tokens behind each.

    Attributes:
        hidden: the target's hidden states, shape (n, num_features), float32.
        tokens: that are fed one after the other, shape (n, depth).
        wanted: what the target says after each of them, one for each depth.
        hints: what `find_hints` says of the text up to each of them: column of the head and kind, shape (n, depth, 2).
            The kind is 0 also where the head has not that token.
        counts: 1 where what follows was chosen and not put there by a template, shape (n, depth), float32.
        memory: what a draft with attention looks back at.
    """

    hidden: Any
    tokens: Any
    wanted: list[Wanted]
    hints: Any
    counts: Any
    memory: Memory | None


class Places:
    """Every place of some texts behind which `depth` tokens stand, the first one to be drafted chosen by somebody.

    A place is a position t: the target has read token t, which gave its hidden states and, with them, token t + 1. The
    draft is fed that token and drafts token t + 2.

    Args:
        texts: of one or more sorts.
        seen: what the target computed of each.
        depth: tokens that are fed.
    """

    def __init__(self, texts: Sequence[Texts], seen: Sequence[Seen], depth: int) -> None:
        self.texts, self.seen, self.depth = list(texts), list(seen), depth
        self.hints = [_hints(part.tokens) for part in texts]
        self.index = np.concatenate([_places(i, part, depth) for i, part in enumerate(texts)])
        # Places of a row of a text follow one another: where each row's begin, and the end.
        changes = np.flatnonzero((np.diff(self.index[:, :2], axis=0) != 0).any(1)) + 1
        self.bounds = np.concatenate([[0], changes, [len(self.index)]])

    def __len__(self) -> int:
        return len(self.index)

    def where(self, name: str) -> NDArray[Any]:
        """An array of the texts' rows, like `temperatures`, at every place."""
        return np.array([getattr(self.texts[i], name)[row] for i, row, _ in self.index])

    def kinds(self) -> NDArray[np.uint8]:
        """Of the first drafted token of every place."""
        return np.array([self.texts[i].kinds[row, t + 2] for i, row, t in self.index], np.uint8)

    def draw(self, rng: np.random.Generator, rows: int, each: int) -> NDArray[np.int64]:
        """Numbers of random places, `each` out of one row of a text: shape (rows, each)."""
        chosen = np.searchsorted(self.bounds, rng.integers(0, len(self), rows), "right") - 1
        first, end = self.bounds[chosen, None], self.bounds[chosen + 1, None]
        found: NDArray[np.int64] = rng.integers(first, end, (rows, each))
        return found

    def by_row(self, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Places, ascending, divided into those of each row."""
        return np.split(numbers, np.searchsorted(numbers, self.bounds[1:-1]))

    def batch(self, numbers: NDArray[np.int64], heads: HeadMap, device: str) -> Batch:
        """Some places, shape (rows, each), all of one row of a text in each row."""
        parts = [self._part(self.index[line]) for line in numbers]
        hidden, tokens, hints, ids, logps, follows, logp, counts = map(np.concatenate, zip(*parts, strict=True))
        wanted = [heads.wanted(ids[:, k], logps[:, k], follows[:, k], logp[:, k], device) for k in range(self.depth)]
        columns = heads.columns[hints[..., 0]]
        hints = np.stack([np.maximum(columns, 0), hints[..., 1] * (columns >= 0)], -1)
        features, fed, given, chosen = (torch.from_numpy(array).to(device) for array in (hidden, tokens, hints, counts))
        return Batch(features, fed, wanted, given, chosen, self._memory(numbers, device))

    def _part(self, places: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        (i, row), t = places[0, :2], places[:, 2]
        texts, fed = self.texts[i], t[:, None] + 1 + np.arange(self.depth)
        return (
            np.asarray(self.seen[i].hidden[row, t]).astype(np.float32),
            texts.tokens[row][fed].astype(np.int64),
            self.hints[i][row][fed].astype(np.int64),
            texts.ids[row][fed],
            texts.logps[row][fed],
            texts.tokens[row][fed + 1],
            texts.chosen[row][fed],
            (texts.kinds[row][fed + 1] != TEMPLATE).astype(np.float32),
        )

    def _memory(self, numbers: NDArray[np.int64], device: str) -> Memory | None:
        """Keys and values of the rows as far as their places look back, the rest zeros."""
        if self.seen[0].keys is None:
            return None
        places = self.index[numbers]
        length = int(places[..., 2].max()) + 1
        parts = [self.seen[i].keys[row, :length] for i, row, _ in places[:, 0]]
        found = np.zeros((len(parts), length, *parts[0].shape[1:]), np.float32)
        for line, part in zip(found, parts, strict=True):
            line[: len(part)] = part
        keys, values = torch.from_numpy(found).to(device).permute(2, 0, 3, 1, 4)
        return Memory(keys, values, torch.from_numpy(places[..., 2]).to(device))


def _hints(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of the text up to every token: shape (n, length) -> (n, length, 2)."""
    return np.array([find_hints(row) for row in tokens.tolist()], np.int32)


def _places(number: int, texts: Texts, depth: int) -> NDArray[np.int64]:
    length = texts.tokens.shape[1]
    rows, places = np.nonzero(texts.kinds[:, 2 : max(2, length - depth + 1)] != TEMPLATE)
    return np.stack([np.full_like(rows, number), rows, places], 1)
