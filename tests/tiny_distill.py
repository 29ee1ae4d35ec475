"""A tiny target for the tests of distillation, and texts with distributions that are known."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.options import Settings
    from edgespec.distill.store import ANSWER, Texts
    from edgespec.distill.teacher import Machine, Teacher, load_target

from edgespec.export.source import Source, read_folder
from tests.export_models import save_llama
from tests.tiny import NUM_TOKENS

CPU = Machine("cpu", "float32")
SMALL = Settings(
    layers=1, head_size=64, tokens=1000, kept=8, write_rows=6, write_length=96, read_rows=4, read_length=64
)


def make_source(folder: Path) -> Source:
    """A tiny random llama."""
    saved = save_llama(folder / "tiny")
    return read_folder(saved, saved, "tiny")


def make_teacher(source: Source) -> Teacher:
    """It in torch."""
    return Teacher(load_target(source, CPU), SMALL, NUM_TOKENS, CPU)


def random_texts(num_rows: int = 3, length: int = 12, vocab: int = 40, seed: int = 0) -> tuple[Texts, np.ndarray]:
    """Texts with distributions of which the best 8 are kept, and the whole distributions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, length, vocab)) * 2
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logp, -1)[..., :8]
    tokens = rng.integers(0, vocab, (num_rows, length))
    chosen = np.zeros((num_rows, length), np.float16)
    chosen[:, :-1] = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    texts = Texts(
        tokens.astype(np.int32),
        np.full((num_rows, length), ANSWER, np.uint8),
        np.ones(num_rows, np.float32),
        ids.astype(np.uint16),
        np.take_along_axis(logp, ids, -1).astype(np.float16),
        chosen,
    )
    return texts, np.exp(logp)


def rotated(heads: np.ndarray, positions: np.ndarray, theta: float = 10_000.0) -> np.ndarray:
    """Rotary embedding, written out: halves of the last axis, shape (..., head_dim), turned by angles that follow the
    position, which broadcasts against the axes before."""
    half = heads.shape[-1] // 2
    angles = np.asarray(positions)[..., None] * theta ** -(np.arange(half) / half)
    left, right = heads[..., :half], heads[..., half:]
    turned = [left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)]
    return np.concatenate(turned, -1)
