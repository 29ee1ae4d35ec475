"""Acceptance by depth on texts that were kept apart, and what cheap drafters would reach there.

The texts themselves say what happens after an accepted draft. Greedily written, an accepted token *is* the text's
next one. Written at temperature 1, a token x of the text is accepted with probability min(1, q(x) / p(x)) had it been
drafted, and the expectation of that over x ~ p is sum(min(p, q)); so products of these along a text are, on average,
the probabilities that drafts of that length survive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.distill.loss import HeadMap, agreement, survival
from edgespec.distill.places import Places
from edgespec.distill.store import ANSWER, READ, Texts
from edgespec.drafters.ngram import look_up

_LOOKED_UP = 1500  # positions on which prompt lookup is tried
_MAX_NGRAM = 3
_MOST = 4096  # places of each kind that are measured


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Measured on validation texts; a list has the values of depths 1, 2, ...

    Attributes:
        greedy: share of tokens accepted at each depth, given that those before were; answers at temperature 0.
        sampled: the same of answers at temperature 1.
        read: sum(min(p, q)) of texts that were read; None where there are none.
    """

    greedy: list[float]
    sampled: list[float]
    read: float | None

    @property
    def score(self) -> float:
        """What training is to raise: the mean of greedy and sampled acceptance at depth one."""
        return (self.greedy[0] + self.sampled[0]) / 2

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """For people."""
        greedy, sampled = ("/".join(f"{v:.3f}" for v in values) for values in (self.greedy, self.sampled))
        return f"acceptance by depth: greedy {greedy}; at temperature 1 {sampled}"


def measure(model: Any, places: Places, heads: HeadMap, autocast: Any) -> Acceptance:
    """Run the draft over validation texts, the same places each time."""
    kinds, temperatures = places.kinds(), places.where("temperatures")
    answer, is_read = kinds == ANSWER, kinds == READ
    greedy = _some(answer & (temperatures == 0))
    sampled = _some(answer & (temperatures == 1))
    read = _some(is_read)
    model.eval()
    found = Acceptance(
        _by_depth(_rates(model, places, greedy, heads, autocast)[0]),
        _by_depth(_rates(model, places, sampled, heads, autocast)[1]),
        float(_rates(model, places, read, heads, autocast)[2].mean()) if len(read) else None,
    )
    model.train()
    return found


def _some(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The numbers of places that are chosen, evenly thinned out where they are many."""
    numbers = np.flatnonzero(chosen)
    return numbers[:: max(1, len(numbers) // _MOST)]


def _rates(
    model: Any, places: Places, numbers: NDArray[np.int64], heads: HeadMap, autocast: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Whether first choices agree and min(1, q(x) / p(x)), by depth, shape (n, depth); sum(min(p, q)) at depth one."""
    device = str(next(model.parameters()).device)
    parts: list[list[Any]] = [[], [], []]
    for line in places.by_row(numbers) if len(numbers) else []:
        if not len(line):
            continue
        batch = places.batch(line[None], heads, device)
        firsts, rates, overlaps = [], [], []
        with torch.no_grad():
            with autocast:
                state = model.read(batch.hidden)
            for depth in range(places.depth):
                with autocast:
                    state, logits = model(state, batch.tokens[:, depth], batch.hints[:, depth], batch.memory)
                first, overlap = agreement(logits.float(), batch.wanted[depth])
                firsts.append(first.float())
                overlaps.append(overlap)
                rates.append(survival(logits.float(), batch.wanted[depth]))
        for part, columns in zip(parts, (firsts, rates, overlaps[:1]), strict=True):
            part.append(torch.stack(columns, 1).cpu().numpy().astype(np.float64))
    empty = np.zeros((0, places.depth))
    first, rate, overlap = (np.concatenate(part) if part else empty for part in parts)
    return first, rate, overlap


def _by_depth(rates: NDArray[np.float64]) -> list[float]:
    """Acceptance at each depth, given that all before were accepted: rates of shape (n, depth) -> `depth` values."""
    survived = np.cumprod(rates, 1).mean(0) if len(rates) else np.zeros(rates.shape[1])
    before = np.concatenate([[1.0], survived[:-1]])
    return [float(now / last) if last > 0 else 0.0 for now, last in zip(survived, before, strict=True)]


def baselines(train: Texts, check: Texts) -> dict[str, float]:
    """Greedy acceptance at depth one of a table of bigrams and of prompt lookup, on the same answers."""
    table = _bigrams(train)
    rows = np.flatnonzero(check.temperatures == 0)
    at = [(r, j) for r in rows for j in np.flatnonzero(check.kinds[r, 1:] == ANSWER)]
    if not at:
        return {"bigram": 0.0, "prompt_lookup": 0.0}
    truth = np.array([check.tokens[r, j + 1] for r, j in at])
    before = np.array([check.tokens[r, j] for r, j in at])
    found = np.array([table.get(int(token), -1) for token in before])
    tried = range(0, len(at), max(1, len(at) // _LOOKED_UP))
    hits = [_looks_up(check.tokens[at[i][0]], int(at[i][1])) for i in tried]
    return {"bigram": float((found == truth).mean()), "prompt_lookup": float(np.mean(hits))}


def _bigrams(texts: Texts) -> dict[int, int]:
    """The most frequent successor of each token."""
    pairs, counts = np.unique(
        np.stack([texts.tokens[:, :-1].ravel(), texts.tokens[:, 1:].ravel()], 1), axis=0, return_counts=True
    )
    order = np.argsort(counts, kind="stable")
    return {int(pairs[i, 0]): int(pairs[i, 1]) for i in order}


def _looks_up(row: NDArray[np.int32], at: int) -> bool:
    text = row[: at + 1].astype(np.int64)
    draft = look_up(text, text, 1, _MAX_NGRAM)
    return len(draft) > 0 and int(draft.tokens[0]) == int(row[at + 1])
