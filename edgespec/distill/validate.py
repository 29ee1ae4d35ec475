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

from edgespec.distill.loss import HeadMap, agreement
from edgespec.distill.store import ANSWER, READ, Texts
from edgespec.drafters.ngram import look_up

DEPTH = 4
_LOOKED_UP = 1500  # positions on which prompt lookup is tried
_MAX_NGRAM = 3


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


def measure(model: Any, texts: list[Texts], heads: HeadMap, autocast: Any, at_once: int = 8) -> Acceptance:
    """Run the draft over validation texts of one or more lengths."""
    steps: dict[str, list[NDArray[np.float64]]] = {"greedy": [], "sampled": [], "read": []}
    device = str(next(model.parameters()).device)
    model.eval()
    for part in (t.rows(slice(i, i + at_once)) for t in texts for i in range(0, len(t.tokens), at_once)):
        with torch.no_grad(), autocast:
            logits = model(torch.from_numpy(part.tokens[:, :-1].astype(np.int64)).to(device)).logits
        _collect(steps, logits.float(), part, heads, device)
    model.train()
    read = np.concatenate(steps["read"]) if steps["read"] else None
    return Acceptance(
        _by_depth(steps["greedy"]), _by_depth(steps["sampled"]), None if read is None else float(np.nanmean(read))
    )


def _collect(steps: dict[str, list[Any]], logits: Any, part: Texts, heads: HeadMap, device: str) -> None:
    shape = part.tokens.shape[0], part.tokens.shape[1] - 1
    wanted = heads.wanted(part, device)
    first, overlap = agreement(logits.reshape(-1, logits.shape[-1]), wanted)
    first, overlap = (found.float().cpu().numpy().reshape(shape).astype(float) for found in (first, overlap))
    rates = _rates(logits, part, heads)
    for row, temperature in enumerate(part.temperatures):
        answer, read = (part.kinds[row, 1:] == kind for kind in (ANSWER, READ))
        if read.any():
            steps["read"].append(overlap[row])
        elif temperature == 0:
            steps["greedy"].append(np.where(answer, first[row], np.nan))
        elif temperature == 1:
            steps["sampled"].append(np.where(answer, rates[row], np.nan))


def _rates(logits: Any, part: Texts, heads: HeadMap) -> NDArray[np.float64]:
    """min(1, q(x) / p(x)) of each next token x of the text: shape (n, length - 1)."""
    columns = heads.columns[part.tokens[:, 1:]]
    logq = torch.log_softmax(logits, -1).cpu()
    found = logq.gather(-1, torch.from_numpy(np.maximum(columns, 0))[..., None])[..., 0].numpy()
    rates = np.exp(np.minimum(found - part.chosen[:, :-1].astype(np.float32), 0))
    return np.where(columns >= 0, rates, 0).astype(np.float64)


def _by_depth(rows: list[NDArray[np.float64]]) -> list[float]:
    """Acceptance at each depth, given that all before were accepted; `rows` of rates, NaN where nothing counts."""
    survived = []
    for depth in range(DEPTH + 1):
        windows = [_products(row, depth) for row in rows if len(row) >= depth]
        joined = np.concatenate(windows) if windows else np.empty(0)
        survived.append(float(np.nanmean(joined)) if np.isfinite(joined).any() else 0.0)
    return [survived[d + 1] / survived[d] if survived[d] > 0 else 0.0 for d in range(DEPTH)]


def _products(row: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    made = np.ones(len(row) - max(depth, 1) + 1)
    for offset in range(depth):
        made = made * row[offset : offset + len(made)]
    return made if depth else np.where(np.isnan(row), np.nan, made)


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
