"""How a token is chosen, by the definitions: one row, one token at a time, float64. An oracle for the fast code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import special

from edgespec.params import SamplingParams


def naive_adjust(
    row: np.ndarray, text: Sequence[int], num_prompt: int, params: SamplingParams, eos: Sequence[int] = ()
) -> np.ndarray:
    """The logits that follow `text`, penalised."""
    row = np.array(row, np.float64)
    text = [int(t) for t in text]
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {t for t in text if t < len(row)}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token, count in Counter(text[num_prompt:]).items():
        if token < len(row):
            row[token] -= count * params.frequency_penalty + params.presence_penalty
    size = params.no_repeat_ngram_size
    for start in range(len(text) - size + 1 if size else 0):
        if text[start : start + size - 1] == text[len(text) - size + 1 :]:
            row[text[start + size - 1]] = -np.inf
    if len(text) - num_prompt < params.min_new_tokens:
        row[list(eos)] = -np.inf
    row[list(params.banned_tokens)] = -np.inf
    return row


def naive_shape(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row by the definitions: sort everything, float64."""
    probs = special.softmax(logits.astype(np.float64) / params.temperature)
    if params.top_k:
        probs[probs < np.sort(probs)[::-1][min(params.top_k, len(probs)) - 1]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        probs[probs < _last_kept(probs, probs, params.top_p)] = 0
        probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    if params.typical_p < 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(probs)
            typicality = -np.abs(surprise - np.nansum(probs * surprise))
        probs[typicality < _last_kept(typicality, probs, params.typical_p)] = 0
    return probs / probs.sum()


def _last_kept(scores: np.ndarray, probs: np.ndarray, mass: float) -> float:
    """Score of the token with which those of the best scores reach the mass."""
    order = np.argsort(-scores, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    return float(scores[order[max(int((before < mass).sum()), 1) - 1]])
