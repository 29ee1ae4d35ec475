"""How far a draft is from the target, out of the kept part of its distributions: the loss, and the acceptance.

Source: acceptance is sum(min(p, q)) (Leviathan et al. 2023); training on it, DistillSpec (Zhou et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.distill.store import Texts

_TINY = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The target's distributions in terms of the draft's head, n positions.

    Attributes:
        columns: of the head, shape (n, kept); 0 where a token is not in it.
        probs: shape (n, kept); 0 where it is not.
        weights: of the positions, shape (n,).
    """

    columns: Any
    probs: Any
    weights: Any


class HeadMap:
    """From token ids to columns of the head.

    Args:
        head_ids: ascending, shape (h,).
        vocab_size: of the target.
    """

    def __init__(self, head_ids: NDArray[np.int64], vocab_size: int) -> None:
        self.head_ids = head_ids
        self.columns = np.full(vocab_size, -1, np.int64)
        self.columns[head_ids] = np.arange(len(head_ids))

    def wanted(self, texts: Texts, device: str) -> Wanted:
        """Of every position but the last of each row."""
        columns = self.columns[texts.ids[:, :-1].astype(np.int64)].reshape(-1, texts.ids.shape[-1])
        probs = np.exp(texts.logps[:, :-1].astype(np.float32)).reshape(columns.shape) * (columns >= 0)
        made = np.maximum(columns, 0), probs, texts.weights.reshape(-1)
        return Wanted(*(torch.from_numpy(array).to(device) for array in made))


def distance(logits: Any, wanted: Wanted, share: float) -> Any:
    """The loss, weighted mean over positions: `share` of lost acceptance, the rest Kullback-Leibler divergence.

    Tokens outside the kept ones count as one; tokens outside the head cannot be had and are left out.

    Args:
        logits: of the draft, shape (n, h), float32.
    """
    logq = torch.log_softmax(logits, -1).gather(-1, wanted.columns)
    p = wanted.probs
    is_in = p > 0
    q = logq.exp() * is_in
    rest_p = (1 - p.sum(-1)).clamp_min(0)
    rest_q = (1 - q.sum(-1)).clamp_min(_TINY)
    divergence = (torch.where(is_in, p * (p.clamp_min(_TINY).log() - logq), 0.0)).sum(-1)
    divergence = divergence + rest_p * (rest_p.clamp_min(_TINY).log() - rest_q.log())
    lost = 1 - torch.minimum(p, q).sum(-1)
    total = (1 - share) * divergence + share * lost
    return (total * wanted.weights).sum() / wanted.weights.sum().clamp_min(1)


def agreement(logits: Any, wanted: Wanted) -> tuple[Any, Any]:
    """Whether the draft's first choice is the target's, and sum(min(p, q)) over the kept tokens: shape (n,) each.

    The kept tokens are sorted, so the target's first choice is the first; it counts only where it is in the head.
    """
    q = torch.softmax(logits, -1)
    is_first = (logits.argmax(-1) == wanted.columns[:, 0]) & (wanted.probs[:, 0] > 0)
    return is_first, torch.minimum(wanted.probs, q.gather(-1, wanted.columns)).sum(-1)
