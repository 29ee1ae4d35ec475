"""How far a draft is from the target, out of the kept part of its distributions: the loss, and the acceptance.

Source: acceptance is sum(min(p, q)) (Leviathan et al. 2023); training on it, DistillSpec (Zhou et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_TINY = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The target's distributions at n positions, in terms of the draft's head, and the tokens that the text has there.

    Attributes:
        columns: of the head, shape (n, kept); 0 where a token is not in it.
        probs: shape (n, kept), best first; 0 where it is not.
        next_columns: of the text's next token, shape (n,); 0 where it is not in the head.
        next_logps: the target's log probability of that token, shape (n,); infinite where it is not in the head.
    """

    columns: Any
    probs: Any
    next_columns: Any
    next_logps: Any

    def first(self, count: int) -> Wanted:
        """Of the first positions."""
        return Wanted(*(getattr(self, name)[:count] for name in Wanted.__dataclass_fields__))


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

    def wanted(
        self, ids: NDArray[Any], logps: NDArray[np.float16], follows: NDArray[Any], chosen: NDArray[Any], device: str
    ) -> Wanted:
        """Of n positions.

        Args:
            ids, logps: the most probable tokens and their log probabilities, shape (n, kept).
            follows, chosen: the text's next token and its log probability, shape (n,).
        """
        columns = self.columns[ids.astype(np.int64)]
        probs = np.exp(logps.astype(np.float32)) * (columns >= 0)
        after = self.columns[follows.astype(np.int64)]
        after_logps = np.where(after >= 0, chosen.astype(np.float32), np.inf).astype(np.float32)
        made = np.maximum(columns, 0), probs, np.maximum(after, 0), after_logps
        return Wanted(*(torch.from_numpy(array).to(device) for array in made))


def distance(logits: Any, wanted: Wanted, share: float) -> Any:
    """The loss at each position, shape (n,): `share` of lost acceptance, the rest Kullback-Leibler divergence.

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
    return (1 - share) * divergence + share * lost


def survival(logits: Any, wanted: Wanted) -> Any:
    """min(1, q(x) / p(x)) of each text's next token x, shape (n,), without a gradient.

    A text that the target wrote has x ~ p, so texts with this weight are distributed like drafts that were accepted,
    min(p, q): what the draft goes on from at the next depth.
    """
    logq = torch.log_softmax(logits.detach(), -1).gather(-1, wanted.next_columns[:, None])[:, 0]
    return (logq - wanted.next_logps).clamp_max(0).exp()


def agreement(logits: Any, wanted: Wanted) -> tuple[Any, Any]:
    """Whether the draft's first choice is the target's, and sum(min(p, q)) over the kept tokens: shape (n,) each.

    The kept tokens are sorted, so the target's first choice is the first; it counts only where it is in the head.
    """
    q = torch.softmax(logits, -1)
    is_first = (logits.argmax(-1) == wanted.columns[:, 0]) & (wanted.probs[:, 0] > 0)
    return is_first, torch.minimum(wanted.probs, q.gather(-1, wanted.columns)).sum(-1)
